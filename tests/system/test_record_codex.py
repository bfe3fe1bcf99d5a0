"""docs/record-codex.md: `toolroll serve` as the page starts it, and a client of Codex' recorded
shape at the address that the page gives to Codex.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from support.endpoints import Bench, judge
from support.patience import PATIENCE
from support.recorded_shapes import ClaudeCode, Codex

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "record-codex.md").read_text()
SERVE = re.findall(r"^toolroll (serve .*)$", PAGE, re.MULTILINE)


def _call(name: str, command: str) -> str:
    said = json.dumps({"name": name, "arguments": {"command": command}})
    return f"<tool_call>\n{said}\n</tool_call>"


async def _recorded(words: list[str], agent: type[Any], tool: str) -> None:
    """Serve as `words` say, and let `agent` play two tasks of three turns each."""
    said = [_call(tool, "ls"), "<think>\nHm.\n</think>\n\n" + _call(tool, "make"), "Done."]
    policy = lambda request: said[request.call % 3]
    async with EmbeddedEngine(load_embedded_tokenizer(), policy, split="random") as engine:
        words[words.index("--engine") + 1] = engine.url
        main = "from toolroll.cli import main; main()"
        server = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", main, *words, "--port", "0", "--history", "preserve"),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert server.stdout is not None
        try:
            line = (await asyncio.wait_for(server.stdout.readline(), PATIENCE)).decode()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            async with aiohttp.ClientSession() as http:
                bench: Any = SimpleNamespace(url=found.group(), http=http)
                bench.post = lambda *asked: Bench.post(bench, *asked)
                client = agent(bench) if agent is ClaudeCode else agent(bench, "t1")
                assert await client.run("Make it.") == "Done."
                assert await client.run("Again.") == "Done."
                async with http.get(f"{bench.url}/sessions/s/trajectories") as response:
                    session = await response.json()
            judge(session["trajectories"], engine, "s")
            assert session["forks"] == []
            [trajectory] = session["trajectories"]
            assert len(trajectory["turns"]) == 6
        finally:
            server.send_signal(signal.SIGINT)
            await asyncio.wait_for(server.wait(), PATIENCE)


async def test_codex_is_recorded_in_two_commands() -> None:
    assert re.search(r'base_url="http://127.0.0.1:8400/sessions/demo/v1"', PAGE)
    await _recorded(shlex.split(SERVE[0]), Codex, "shell")


async def test_claude_code_is_recorded_in_two_commands() -> None:
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8400 " in PAGE
    await _recorded(shlex.split(SERVE[1]), ClaudeCode, "Bash")
