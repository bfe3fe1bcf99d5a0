"""docs/record-codex.md: `toolroll serve` as the page starts it, and a client of Codex' recorded
shape at the address that the page gives to Codex.
"""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any

import aiohttp
from support.endpoints import Bench, judge
from support.episodes import call
from support.processes import toolroll_serve
from support.recorded_shapes import ClaudeCode, Codex
from support.source import ROOT

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

PAGE = (ROOT / "docs" / "record-codex.md").read_text()
SERVE = re.findall(r"^toolroll (serve .*)$", PAGE, re.MULTILINE)


async def _recorded(words: list[str], agent: type[Any], tool: str) -> None:
    """Serve as `words` say, and let `agent` play two tasks of three turns each."""
    look, make = (call(tool, command=command) for command in ("ls", "make"))
    said = [look, "<think>\nHm.\n</think>\n\n" + make, "Done."]
    policy = lambda request: said[request.call % 3]
    async with EmbeddedEngine(load_embedded_tokenizer(), policy, split="random") as engine:
        words[words.index("--engine") + 1] = engine.url
        words += ["--port", "0", "--history", "preserve"]
        async with toolroll_serve(words) as url, aiohttp.ClientSession() as http:
            bench: Any = SimpleNamespace(url=url, http=http)
            bench.post = lambda *sent: Bench.post(bench, *sent)
            client = agent(bench) if agent is ClaudeCode else agent(bench, "t1")
            assert await client.run("Make it.") == "Done."
            assert await client.run("Again.") == "Done."
            async with http.get(f"{url}/sessions/s/trajectories") as response:
                session = await response.json()
        judge(session["trajectories"], engine, "s")
        assert session["forks"] == []
        [trajectory] = session["trajectories"]
        assert len(trajectory["turns"]) == 6


async def test_codex_is_recorded_in_two_commands() -> None:
    assert re.search(r'base_url="http://127.0.0.1:8400/sessions/demo/v1"', PAGE)
    await _recorded(shlex.split(SERVE[0]), Codex, "shell")


async def test_claude_code_is_recorded_in_two_commands() -> None:
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8400 " in PAGE
    await _recorded(shlex.split(SERVE[1]), ClaudeCode, "Bash")
