"""The faults of simulated users: what the rules find, and what they do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.commands import toolroll
from support.results import episode
from support.tau import recorded_trials

from toolroll.cli import blame as blame_command
from toolroll.cli.display import remarks
from toolroll.evaluation.compare import Question, compare, read_runs
from toolroll.evaluation.user_faults import RULES, UserFault, user_faults
from toolroll.evaluation.viewer.data import row
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import EpisodeStore
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runs.report import report
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.types import EnvironmentOptions, Episode, InteractionResult, Message
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, serve_in_thread

STOP = "###STOP###"
ORDERS = (
    "You are mia_li_3668, and you live in zip code 19122. You want to fly to Seattle, but you do "
    "not want to fly before noon. Always say 'You are the kindest agent that I have ever met.'"
)


def played(
    *lines: Any, reward: float = 0.0, task: str = "t-0", sample: int = 0, **metrics: float
) -> Episode:
    """An episode in which the user and the agent write `lines` in turn."""
    messages: list[Message] = [
        {"role": ("user", "assistant")[place % 2], "content": line}
        for place, line in enumerate(lines)
    ]
    info = {"task": {"instruction": ORDERS}}
    numbers = {"user_calls": 2.0, **metrics}
    return episode(task, sample, reward, messages=messages, info=info, metrics=numbers)


def kinds(found: Episode) -> list[str]:
    return [fault.kind for fault in user_faults(found.result)]


FAULTY = {
    "repeats its instruction": ("leak", ["You want to fly to Seattle, but you do not want that"]),
    "writes its reasoning": ("leak", ["Thought: I want a flight.\nUser Response: Hello"]),
    "says what it is": ("leak", ["Hello", "What are you?", "I am a user simulator."]),
    "ends before it asks": ("early_stop", [f"Hello {STOP}"]),
    "ends with its consent": (
        "early_stop",
        ["Hello", "It costs $5. Shall I book it?", f"Yes, please. {STOP}"],
    ),
    "hides what it knows": ("contradiction", ["Hello", "Who?", "I don't know my user ID."]),
    "hides its zip code": ("contradiction", ["Hello", "Where?", "I don’t remember my zip code."]),
    "invents an address": ("invented", ["Hello", "Your email?", "It is mia.li@example.com."]),
    "insists": ("repeats", ["I want a flight to Seattle", "No."] * 3),
    "answers as the agent": (
        "repeats",
        ["Hello", "Which of your two flights would you like to change today?"] * 2
        + ["Which of your two flights would you like to change today?"],
    ),
    "says nothing": ("repeats", ["Hello", "Yes?", "..."]),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_is_found(case: str) -> None:
    kind, lines = FAULTY[case]
    assert kinds(played(*lines)) == [kind]


def test_each_rule_has_a_case() -> None:
    assert {kind for kind, _ in FAULTY.values()} == RULES.keys()


SOUND: dict[str, list[Any]] = {
    "it must say it": ["You are the kindest agent that I have ever met."],
    "it asks the agent": ["Do you want to fly to Seattle? That is what my sister asked me."],
    "all is done": ["Hello", "Booked. Shall I do more?", f"Sure not, that's all. {STOP}"],
    "it declines": ["Hello", "It costs $5. Shall I book it?", f"No, thank you. {STOP}"],
    "it is told later": ["Hello", "Who?", "I don't know my user ID.", "So?", "It is mia_li_3668."],
    "the agent named it": ["Hello", "I wrote to mia.li@example.com.", "mia.li@example.com is fine"],
    "it is told in capitals": ["Hello", "Who?", "I don't know my user ID.", "So?", "MIA_LI_3668"],
    "it agrees": ["Hello", "A?", "Yes, please.", "B?", "Yes, please.", "C?", "Yes, please."],
    "its content has parts": ["Hello", "Which?", [{"type": "text", "text": "The blue one."}]],
    "its content is an image": ["Hello", "Which?", [{"type": "image_url", "image_url": {}}]],
    "the loop answers an empty reply": ["Hello", *["", "The reply was empty: call a tool."] * 4],
}


@pytest.mark.parametrize("case", SOUND)
def test_no_fault_is_found(case: str) -> None:
    assert user_faults(played(*SOUND[case]).result) == []


def test_what_a_user_with_tools_names_may_come_from_a_tool() -> None:
    lines = "Hello", "Your email?", "It is mia.li@example.com."
    assert kinds(played(*lines, user_tool_calls=1.0)) == []


def test_without_a_simulated_user_there_is_no_fault() -> None:
    said: list[Message] = [{"role": "user", "content": f"Thought: {STOP}"}]
    assert user_faults(episode(messages=said).result) == []


def test_the_faults_in_recorded_conversations() -> None:
    """All three are real: read them. The other 37 have none."""
    found = {
        trial["task_id"]: kinds(
            episode(messages=trial["traj"], info=trial["info"], metrics={"user_calls": 1.0})
        )
        for trial in recorded_trials()
    }
    assert {task: faults for task, faults in found.items() if faults} == {
        12: ["early_stop"],
        23: ["contradiction"],
        24: ["invented"],
    }


async def talk(task: Any, replies: Sequence[Any]) -> list[Message]:
    env = load_environment("desk").make(EnvironmentOptions())
    messages = list((await env.reset(task, 0)).messages)  # type: ignore[misc]
    for action in replies:
        messages.append({"role": "assistant", "content": action.content})
        step = await env.step(action)  # type: ignore[misc]
        messages += step.messages
        if step.done:
            break
    await env.close()  # type: ignore[misc]
    return messages


def test_the_scripted_members_of_the_desk_have_no_fault() -> None:
    desk = load_environment("desk")
    for task in desk.tasks("test"):
        messages = asyncio.run(talk(task, desk.reference(task) or ()))
        found = episode(messages=messages, metrics={"user_calls": 1.0})
        assert user_faults(found.result) == []


# --- beside the reward ----------------------------------------------------------------------------

LINES = ["Hello", "Who?", "I don't know my user ID."]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four failed episodes, one of them with a fault, and a passed one with the same fault."""
    with EpisodeStore(tmp_path) as store:
        store.append(played(*LINES, task="t-0"))
        store.append(played(*LINES, task="t-1", reward=1.0))
        for task in ("t-2", "t-3", "t-4"):
            store.append(played("Hello", "Goodbye.", STOP, task=task))
    return tmp_path


def blame(folder: Path, *options: str) -> list[str]:
    return toolroll("blame", folder, *options).stdout.splitlines()


def test_failed_episodes_with_a_fault_are_counted_and_keep_their_reward() -> None:
    summary = Summary("pond")
    for sample, reward in enumerate((0.0, 0.0, 1.0)):
        summary.add(played(*LINES, reward=reward, sample=sample))
    summary.add(played("Hello", "Goodbye.", STOP, sample=3))
    part = report(summary)
    assert part["user_faults"] == {
        "failed": 3,
        "with_fault": 2,
        "by_kind": {"contradiction": 2},
    }
    assert part["by_task"]["t-0"]["rewards"] == [0.0, 0.0, 1.0, 0.0]
    assert any("in 2 of 3 failed episodes: contradiction 2" in line for line in remarks("x", part))


def test_a_comparison_and_the_page_show_them(run: Path) -> None:
    runs = read_runs(run)
    (comparison,) = compare(runs, [runs], Question())
    assert comparison["usage"]["user_faults"] == {"base": 0.4, "candidate": 0.4}
    assert row(played(*LINES))["reason"] == "simulated user: contradiction"


def test_blame_lists_the_faults_of_failed_episodes(run: Path) -> None:
    assert blame(run) == [
        "pond/t-0#0, message 2: contradiction: it does not know its user ID, which its instruction "
        "states: I don't know my user ID.",
        f"{run}: faults of the simulated user in 1 of 4 failed episodes: contradiction 1",
    ]


def test_blame_keeps_no_tokens_and_begins_no_task_before_its_turn(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[InteractionResult] = []
    tasks: list[int] = []

    def watched(result: InteractionResult) -> list[UserFault]:
        results.append(result)
        tasks.append(len(asyncio.all_tasks()))
        return user_faults(result)

    monkeypatch.setattr(blame_command, "user_faults", watched)
    monkeypatch.setattr(blame_command, "_AT_ONCE", 2)
    assert len(blame(run)) == 2
    assert len(results) == 4
    assert not any(result.trajectories or result.tokens or result.logprobs for result in results)
    assert max(tasks) <= 4, "the command's own two, and two"


def test_a_judge_reads_failed_episodes_once(run: Path) -> None:
    def judge(request: Any) -> str:
        score = 0 if "Goodbye" in request.text else 1
        return json.dumps({"reason": "It gave up.", "score": score})

    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), judge)) as engine:
        options = ["--judge-url", f"{engine.url}/v1", "--judge-model", "m"]
        lines = blame(run, *options)
        assert blame(run, *options) == lines
        # Three conversations are equal.
        assert len({logged.input_ids.tobytes() for logged in engine.log}) == 2
        asked = len(engine.log)
        assert blame(run, *options) == lines
        assert len(engine.log) == asked
    assert lines[1:] == [
        *(f"pond/t-{task}#0: judge: 0: It gave up." for task in (2, 3, 4)),
        f"{run}: faults of the simulated user in 4 of 4 failed episodes: contradiction 1, judge 3",
    ]


def test_an_episode_without_a_verdict_keeps_no_other_from_the_report(run: Path) -> None:
    def judge(request: Any) -> str:
        good = json.dumps({"reason": "Fine.", "score": 1})
        return "I cannot say." if "Goodbye" in request.text else good

    with (run / "episodes.jsonl").open("a") as file:
        file.write("no episode\n")
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), judge)) as engine:
        lines = blame(run, "--judge-url", f"{engine.url}/v1", "--judge-model", "m")
    assert "t-0#0, message 2: contradiction" in lines[0]
    assert lines[1].endswith("in 1 of 4 failed episodes: contradiction 1")
    assert [line.partition(" is not judged")[0] for line in lines[2:5]] == [
        f"pond/t-{task}#0" for task in (2, 3, 4)
    ]
    assert "line 6, is not a valid episode" in lines[5]


def test_a_run_in_which_nothing_failed_has_nobody_to_blame(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.append(played(*LINES, reward=1.0))
    total = "faults of the simulated user in 0 of 0 failed episodes"
    assert blame(tmp_path) == [f"{tmp_path}: {total}"]


def test_what_has_no_effect_is_refused(tmp_path: Path, run: Path) -> None:
    with EpisodeStore(tmp_path / "desk") as store:
        store.append(episode())
    with pytest.raises(UsageError, match="no simulated user"):
        blame(tmp_path / "desk")
    with pytest.raises(UsageError, match="need --judge-model"):
        blame(run, "--judge-url", "http://127.0.0.1:1/v1")
