"""Examples as processes: README's, the OpenAI Agents SDK against `toolroll serve`, and
docs/record-codex.md with clients of the recorded shapes of Codex and Claude Code."""

import asyncio
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from support.commands import serve_command, toolroll
from support.endpoints import Bench, judge
from support.episodes import call
from support.processes import printed, toolroll_serve
from support.recorded_shapes import ClaudeCode, Codex
from support.source import ROOT

from toolroll import load_environment, read_episodes
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer, play_references

SAID = [
    "Let me look. " + call("look", at="kitchen"),
    call("look", at="garden"),
    "The key is under the third pot.",
]


async def lines_of(example: str, *options: str) -> list[str]:
    """What an example prints."""
    program = ROOT / "examples" / "openai_agents" / example
    return (await asyncio.to_thread(printed, program, *options)).splitlines()


async def test_the_agents_sdk_against_toolroll_serve() -> None:
    async with (
        EmbeddedEngine(
            load_embedded_tokenizer(), lambda request: SAID[request.call], split="random"
        ) as engine,
        toolroll_serve(serve_command(engine.url)) as url,
    ):
        lines = await lines_of("looker.py", "--url", url, "--runs", "3")
        assert len(lines) == 3
        assert all("reward 1.0, 3 turns" in line for line in lines), lines
        async with aiohttp.ClientSession() as http:
            for at in range(3):
                async with http.get(f"{url}/sessions/finder-{at}/trajectories") as response:
                    data: Any = await response.json()
                judge(data["trajectories"], engine, f"finder-{at}")
                assert len(data["trajectories"]) == 1


async def test_an_agent_of_the_sdk_plays_the_tasks_of_an_environment(tmp_path: Path) -> None:
    """Its sessions have the table of a run. One of two tasks is not solved."""
    desk = load_environment("desk")
    solved, unsolved = desk.tasks("test")[:2]
    replies = play_references(desk, [solved], samples=2).values()
    keyed = {solved.id: iter([line for lines in replies for line in lines])}

    def policy(request: PolicyRequest) -> str:
        task = next((name for name in keyed if name in request.routing_key), None)
        return "I cannot help you. Goodbye." if task is None else next(keyed[task])

    async with (
        EmbeddedEngine(load_embedded_tokenizer(), policy) as engine,
        toolroll_serve(serve_command(engine.url, "--out", str(tmp_path))) as url,
    ):
        lines = await lines_of("tasks.py", "desk", "--url", url, "--tasks", "2", "--samples", "2")
        rewards = {solved.id: 1.0, unsolved.id: 0.0}
        assert sorted(lines) == sorted([f"{t}: reward {rewards[t]}" for t in rewards] * 2)
        table = toolroll("view", tmp_path).stdout
    assert re.search(r"episodes +│ +4 │\n│ reward \(mean\) +│ 0.500 .* \(2 tasks\)", table), table
    reasons = {found.result.info.get("reward_reason", "") for found in read_episodes(tmp_path)}
    assert len(reasons) == 2, "the environment's reason for 0 is kept"


def test_the_example_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = ROOT / "examples" / "quickstart.py"
    code, shown = re.search(
        r"```python\n(async def main.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    assert code in script.read_text(encoding="utf-8")
    assert printed(script) == shown


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
            session = await Bench.get(bench, "/sessions/s/trajectories")
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
