"""`toolroll regrade`: recorded actions in new environments, what is found, and what is written."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import run_command, toolroll
from support.loop_clock import skip_until
from support.results import content, episode
from support.scripted_runs import AsyncScripted
from support.tau import MINI, REAL, STOP, needed, recorded_trials, scripted

from toolroll import CallPolicy, Environment, EnvironmentOptions, Episode, InteractionResult, Task
from toolroll.agents.text_agent import DEFAULT_POLICY, TextAgent
from toolroll.evaluation.regrade import Regrader
from toolroll.parsers.openai import to_openai
from toolroll.parsers.reading.lookalike import lookalike
from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import load_embedded_tokenizer
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.registry import find_environment
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Status, StopReason
from toolroll.testing import EmbeddedEngine, play_references, reference_policy, serve_in_thread


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 episodes of the desk, half of them with a mistake, some cut off by a limit of turns."""
    desk, out = find_environment("desk"), tmp_path_factory.mktemp("desk") / "run"
    lines = play_references(desk, desk.tasks("test"), samples=2, mistakes=0.5, seed=4)
    engine = EmbeddedEngine(load_embedded_tokenizer(), reference_policy(lines))
    with serve_in_thread(engine):
        options = "--samples 2 --tasks 0-11 --max-turns 6 --no-do-nothing --agent-args".split()
        options += ['{"invalid_penalty": -0.1}', "--out", str(out)]
        assert toolroll(*run_command(engine.url, *options)).exit_code == 0
    return out


@pytest.fixture
def engine(here: Path) -> Iterator[EmbeddedEngine]:
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer())) as served:
        yield served


def run(engine: EmbeddedEngine, env: str) -> None:
    toolroll(*run_command(engine.url, "--no-do-nothing", "--out", "run", env=env))


def by_key(folder: Path | str) -> dict[tuple[str, int], Episode]:
    return {(found.task_id, found.sample): found for found in read_episodes(Path(folder))}


def below_the_table(output: str) -> list[str]:
    """Return the lines about the replay. The last line of the output names the files."""
    lines = output.splitlines()
    [first] = [place for place, line in enumerate(lines) if ", replayed alike: " in line]
    return lines[first:-1]


def test_an_environment_that_did_not_change_agrees(recorded: Path, tmp_path: Path) -> None:
    result = toolroll("regrade", recorded, "--out", tmp_path / "again")
    line = "desk: episodes: 24, replayed alike: 24 (100.0%), rewards changed: 0"
    assert (result.exit_code, below_the_table(result.stdout)) == (0, [line])
    assert f"\ndesk: regraded from {recorded}\n" in result.stdout
    assert "regraded" not in toolroll("view", recorded).stdout
    assert result.stdout.endswith(f"view {tmp_path / 'again'}\n")
    before, after = by_key(recorded), by_key(tmp_path / "again")
    reasons = {str(played.result.stop_reason) for played in before.values()}
    assert reasons >= {"done", "max_turns"}
    assert any(played.result.info.get("bad_calls") for played in before.values())
    assert {played.result.reward for played in before.values()} >= {0.0, 0.9, 1.0}
    for key, played in before.items():
        regraded = content(after[key])
        alike = {"reward": played.result.reward, "difference": ""}
        assert regraded["info"].pop("regrade") == alike
        assert regraded == content(played)
    summaries = [
        json.loads((folder / "summary.json").read_text())["environments"]["desk"]
        for folder in (recorded, tmp_path / "again")
    ]
    assert summaries[0]["by_task"] == summaries[1]["by_task"]
    with pytest.raises(UsageError, match="already exists: name a new folder"):
        toolroll("regrade", recorded, "--out", tmp_path / "again")


def test_a_regraded_run_is_compared_regraded_and_played_again(engine: EmbeddedEngine) -> None:
    """It has what was recorded of the model, and where the environment's file is."""
    env = bench("bench")
    run(engine, env)
    with pytest.raises(UsageError, match=r"names code that would be run \(env: .*bench.py:Bench"):
        toolroll("regrade", "run", "--out", "out")
    toolroll("regrade", "run", "--out", "out", "--trust")
    assert "compared: 4 of 4 tasks" in toolroll("compare", "run", "out").stdout
    again = toolroll("regrade", "out", "--out", "again", "--env", env)
    assert "replayed alike: 3" in again.stdout
    Path("bench").rename("moved")
    with pytest.raises(UsageError, match=r"no file .*; if it was moved: --env FILE.py:NAME"):
        toolroll("regrade", "run", "--out", "there", "--trust")
    moved = "moved/bench.py:Bench"
    toolroll("regrade", "run", "--out", "there", "--env", moved)
    played = ("--from", "there", "--out", "played")
    with pytest.raises(UsageError, match=r"names code .* \(env: .*moved.bench.py:Bench\)"):
        toolroll("run", *played)
    assert toolroll("run", *played, "--trust").exit_code == 0
    assert toolroll("run", moved, *played).exit_code == 0
    assert by_key("played").keys() == by_key("run").keys()
    with pytest.raises(UsageError, match="use toolroll regrade"):
        toolroll(*run_command(engine.url, "--agent", "replay"))


# --- environments that changed --------------------------------------------------------------------

BENCH = """
import time
from toolroll import Environment, Observation, StepResult
from toolroll.rollout.errors import ActionError

class Bench(Environment):
    blocking = False
    reward_mode = "MODE"
    tasks = [{"id": name} for name in ("plain", "clock", "longer", "gone")[:TASKS]]

    def reset(self, task, seed):
        self.task, self.turns = task.id, 0
        return Observation([{"role": "assistant", "content": "I begin."},
                            {"role": "user", "content": f"Begin with {seed}."}])

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            raise ActionError("Not like this.")
        text = f"It is {time.time_ns()}." if self.task == "clock" else "More."
        done = self.turns == (LONGER if self.task == "longer" else 3)
        return StepResult([{"role": "user", "content": text}], reward=REWARD, done=done,
                          info={"why": "PART"})
"""


def bench(folder: str, **values: object) -> str:
    values = {"MODE": "final", "TASKS": 4, "LONGER": 3, "REWARD": 0.5, "PART": "old", **values}
    text = BENCH
    for name, value in values.items():
        text = text.replace(name, str(value))
    Path(folder).mkdir()
    Path(folder, "bench.py").write_text(text)
    return f"{folder}/bench.py:Bench"


def test_what_changed_in_an_environment_is_found(engine: EmbeddedEngine) -> None:
    new = bench("new", MODE="sum", TASKS=3, LONGER=4, REWARD=1.0, PART="new")
    run(engine, bench("old", MODE="sum"))
    result = toolroll("regrade", "run", "--out", "out", "--env", new)
    lines = below_the_table(result.stdout)
    assert result.exit_code == 1
    assert lines.pop(2) == "bench:Bench: had a reward, and have none now: 1"
    assert lines[:2] == [
        "bench:Bench: episodes: 3, replayed alike: 1 (33.3%), rewards changed: 3",
        "bench:Bench: left out, because aborted or of tasks that are gone: 1",
    ]
    lines[2:4] = sorted(lines[2:4])  # the episodes ran at once
    assert "bench:Bench/clock#0 is not replayed alike: messages[5].content is" in lines[2]
    assert "recorded and" in lines[2] and lines[2].endswith("replayed")
    assert "bench:Bench/longer#0 is not replayed alike: stop_reason is" in lines[3]
    assert "bench:Bench/plain#0: the reward was 1.0 and is 2.0" in lines
    plain, recorded = by_key("out")["plain", 0], by_key("run")["plain", 0]
    assert plain.result.info["why"] == "new"
    assert plain.result.messages == recorded.result.messages
    assert [turn.reward for turn in plain.result.trajectories[0].turns] == [0.0, 1.0, 1.0]
    assert plain.result.step_rewards == (1.0, 1.0)


def test_an_aborted_episode_is_left_out_and_counts_as_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirectory(run, "desk", {}) as folder:
        folder.append(episode("renew-one", env="desk", reason=StopReason.ENGINE_ERROR))
    with (run / "episodes.jsonl").open("a") as file:
        file.write("no episode\n")
    result = toolroll("regrade", run, "--out", tmp_path / "out")
    *lines, bad_line = below_the_table(result.stdout)
    assert lines == [
        "desk: episodes: 0, replayed alike: 0 (0.0%), rewards changed: 0",
        "desk: left out, because aborted or of tasks that are gone: 1",
    ]
    assert "line 2, is not a valid episode" in bad_line
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["environments"]["desk"]
    assert (summary["lost"]["episodes"], summary["lost"]["of_episodes"]) == (1, 1)


@pytest.mark.parametrize(
    ("env", "played", "words"),
    [
        ("harbor", "harbor", "what its programs did is not recorded"),
        ("serve", "serve", "its sessions have no environment"),
        ("desk", "bench:Bench", "episodes of bench:Bench, but no run.json with its settings"),
    ],
)
def test_what_has_no_replay_is_refused(tmp_path: Path, env: str, played: str, words: str) -> None:
    settings = {"agent": "program"} if env == "harbor" else {}
    with RunDirectory(tmp_path / "run", env, settings) as folder:
        folder.append(episode(env=played))
    with pytest.raises(UsageError, match=words):
        toolroll("regrade", tmp_path / "run", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def stuck(options: EnvironmentOptions) -> Environment:
    """Its reset never ends."""
    return AsyncScripted(lambda method, task: asyncio.Event().wait())


def full_disk(options: EnvironmentOptions) -> Environment:
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("make", "turns", "why"),
    [
        (full_disk, 1.0, "no space left"),
        (stuck, 1.0, "the replay took more than 600 s"),
        (find_environment("desk").make, 2.0, "2 turns, but only 1 replies are recorded"),
    ],
)
async def test_a_replay_that_fails_is_an_aborted_episode(make: Any, turns: float, why: str) -> None:
    factory: Any = SimpleNamespace(make=make, reference=lambda task: None)
    played = episode(env="desk", metrics={"turns": turns})
    regrader = Regrader(factory, Threads(1), {"episode_timeout": 600})
    again = await skip_until(regrader.regrade(played, Task("t-0", 0)), seconds=601)
    assert (again.result.status, again.result.reward) == (Status.ABORTED, None)
    difference = f"the replay failed: {why}"
    assert again.result.info["regrade"] == {"reward": 1.0, "difference": difference}
    assert again.result.messages == played.result.messages
    [trajectory] = again.result.trajectories
    assert trajectory.trained_tokens > 0
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0]


# --- a simulated user -----------------------------------------------------------------------------


async def regraded(factory: Any, task: Task, played: Episode, **settings: Any) -> InteractionResult:
    """The result of the replay, with a user."""
    regrader = Regrader(factory, Threads(2), {"user_model": "any", **settings})
    return (await regrader.regrade(played, task)).result


async def recorded_with_a_user(
    actions: list[Any], policy: CallPolicy = DEFAULT_POLICY
) -> tuple[Any, Any, Episode]:
    """An episode of the small tau-bench, whose user says another line each time."""
    factory = MINI.factory()
    task = factory.tasks("test")[5]
    lines = ("Hi", "Yes.", "Go on.", STOP)
    agent = Repeating(Threads(2), actions, policy)
    result = await agent.asolve(factory.make(scripted(*lines)), task=task, seed=3)
    return factory, task, Episode("tau", task.id, task.index, 0, 3, result, "tiny")


class Repeating(TextAgent):
    """Replies with `replies`, each a text, a call or a parsed reply."""

    def __init__(self, threads: Threads, replies: list[Any], policy: CallPolicy) -> None:
        super().__init__(threads, policy=policy)
        self._replies = iter(replies)

    async def reply(self, *args: Any) -> AssistantTurn:  # pyright: ignore[reportIncompatibleMethodOverride]
        reply = next(self._replies)
        parsed = ParsedReply(reply) if isinstance(reply, str) else reply
        if isinstance(parsed, ToolCall):
            parsed = ParsedReply("", None, (parsed,))
        return AssistantTurn(parsed, to_openai(parsed))


async def test_the_users_lines_are_those_that_were_recorded() -> None:
    grant = ToolCall("grant", {"member": "m5", "points": 1}, "", id="a")
    replies = ["Hello?", "", grant, "Is that all?", "Goodbye."]
    factory, task, played = await recorded_with_a_user(replies)
    said = [message for message in played.result.messages if message["role"] == "user"]
    assert len(said) == 5 and "empty" in said[2]["content"], "one is not the user's"
    again = await regraded(factory, task, played)
    assert (played.result.reward, again.reward) == (1.0, 1.0)
    assert again.info["regrade"]["difference"] == ""


@pytest.mark.parametrize("limit", [1, 3])
async def test_text_that_was_an_invalid_call_is_one_again(limit: int) -> None:
    """The user never got it."""
    text = ParsedReply("grant(m5)", lookalikes=(lookalike("grant(m5)", "grant"),))
    rules: Any = {"on_lookalike": "invalid", "max_invalid_in_a_row": limit, "invalid_penalty": -0.5}
    factory, task, played = await recorded_with_a_user(
        ["Hello?", text, "Goodbye.", "Bye."], CallPolicy(**rules)
    )
    assert (played.result.stop_reason is StopReason.INVALID_CALLS) == (limit == 1)
    again = await regraded(factory, task, played, agent_args=rules)
    assert again.info["regrade"]["difference"] == ""
    assert again.reward == played.result.reward == -0.5


async def test_an_episode_without_its_last_message_is_not_alike() -> None:
    """A line of the user is missing. A turn that was cut is not executed: its reply may look whole,
    but the environment never got it.
    """
    factory, task, played = await recorded_with_a_user(["Hello?", "Goodbye.", "So?", "Bye."])
    shorter = replace(played.result, messages=played.result.messages[:-1])
    again = await regraded(factory, task, replace(played, result=shorter))
    assert again.status is Status.ABORTED
    assert "no line of the user here" in again.info["regrade"]["difference"]
    placeholder = StopReason.PLACEHOLDER
    cut = replace(shorter, stop_reason=placeholder, status=Status.TRUNCATED)
    again = await regraded(factory, task, replace(played, result=cut))
    assert (again.stop_reason, again.info["regrade"]["difference"]) == (placeholder, "")


@pytest.mark.peers
async def test_the_recorded_conversations_of_tau_bench_agree() -> None:
    needed(REAL)
    factory = REAL.factory("airline")
    tasks = factory.tasks("test")
    agreed = 0
    for entry in recorded_trials():
        done: Any = {"prompt": "", "info": {}, "stop_reason": StopReason.DONE}
        given = {"reward": entry["reward"], "messages": entry["traj"], **done}
        task, result = tasks[entry["task_id"]], InteractionResult.of((), **given)
        played = Episode("tau-bench/airline", task.id, task.index, entry["trial"], 0, result)
        agreed += (await regraded(factory, task, played)).reward == entry["reward"]
    assert agreed == 40
