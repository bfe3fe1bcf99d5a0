"""ATIF: each step has the text and the tokens of the same turn, and every turn is in one step."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.endpoints import Bench, endpoint
from support.episodes import agent, call, serving
from support.exports import (
    CALLS,
    own_turns,
    sampled_steps,
    tokens_of,
    trajectory_of,
    varied,
    write_run,
)
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template
from support.results import episode, trajectory

from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.types import (
    Action,
    Environment,
    Episode,
    Observation,
    StepResult,
    Task,
)
from toolroll.testing import PolicyRequest

pytestmark = pytest.mark.tokens
USER: Any = {"role": "user", "content": "And now?"}


def exported(run: Path, out: Path) -> int:
    return write_atif(ExportedRun(run), out)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


def judge(atif: dict[str, Any], line: dict[str, Any], tokenizer: Any) -> None:
    """The file has each turn of the episode once, exactly; and a step's text is that of its ids."""
    assert sorted(tokens_of(atif)) == sorted(own_turns(line))
    for step in sampled_steps(atif):
        text = tokenizer.decode(step["metrics"]["completion_token_ids"])
        assert step["message"].strip() in text
        assert (step.get("reasoning_content") or "").strip() in text
        for made in step.get("tool_calls") or ():
            assert made["function_name"] in text
            assert all(str(argument) in text for argument in made["arguments"].values())


class Talk(Environment):
    """Answers calls with a result, and text with the user's next message. Ends after `steps`."""

    def __init__(self, steps: int, *examples: Any) -> None:
        self.left, self.examples = steps, examples

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([*self.examples, {"role": "user", "content": "Hi"}], [TOOL])

    def step(self, action: Action) -> StepResult:
        self.left -= 1
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": made.id, "name": made.name, "content": "Seen."}
            for made in action.tool_calls
        ]
        return StepResult(answers or [USER], 1.0, self.left == 0)


SAID = [
    f"<think>\nFirst.\n</think>\n\nI look. {call(at='pond')}",
    "<think>\nSecond.\n</think>\n\nHello.",
    "<think>\nThird.\n</think>\n\nThere.",
    "Bye.",
]


async def played(run: Path, *examples: Any) -> Any:
    """Write an episode that forks, because Qwen3's template drops old thoughts."""
    tokenizer = tokenizer_for(trl_template("qwen3"))
    async with serving(tokenizer, lambda request: SAID[request.call]) as (_, model):
        result = await agent(model).asolve(
            Talk(4, *examples), task=Task("t-0", 0), session_id="s", max_num_steps=9
        )
    assert len(result.trajectories) > 1
    write_run(run, [Episode("pond", "t-0", 0, 0, 1, result, "tiny")])
    return tokenizer


async def test_a_forked_episode_is_one_trajectory_with_the_tokens_of_each_turn(
    tmp_path: Path,
) -> None:
    tokenizer = await played(tmp_path / "run")
    assert exported(tmp_path / "run", tmp_path / "out") == 1
    atif = trajectory_of(tmp_path / "out", "t-0", 0)
    judge(atif, lines_of(tmp_path / "run")[0], tokenizer)
    assert atif["subagent_trajectories"] is None
    assert [step["step_id"] for step in atif["steps"]] == list(range(1, 9))
    assert [step["message"].strip() for step in sampled_steps(atif)] == [
        "I look.",
        "Hello.",
        "There.",
        "Bye.",
    ]


async def test_examples_in_the_prompt_get_no_tokens(tmp_path: Path) -> None:
    """The record does not say which assistant messages the model wrote."""
    example = {"role": "assistant", "content": "Hello."}
    tokenizer = await played(tmp_path / "run", {"role": "user", "content": "Hi"}, example)
    exported(tmp_path / "run", tmp_path / "out")
    atif = trajectory_of(tmp_path / "out", "t-0", 0)
    judge(atif, lines_of(tmp_path / "run")[0], tokenizer)
    assert all("metrics" not in step for step in atif["steps"])


# --- sessions of the endpoint ---------------------------------------------------------------------

Asks = Callable[[Bench], Awaitable[object]]


async def chat(bench: Bench, messages: list[Any]) -> list[Any]:
    reply = await bench.client().chat.completions.create(model="m", messages=messages, tools=[TOOL])
    return [*messages, reply.choices[0].message.model_dump(exclude_none=True), USER]


async def one_conversation(bench: Bench) -> None:
    await chat(bench, await chat(bench, [USER]))


async def two_conversations(bench: Bench) -> None:
    first = await chat(bench, [USER])
    await chat(bench, [{"role": "user", "content": "You are a sub-agent."}])
    await chat(bench, first)


async def three_ends(bench: Bench) -> None:
    """All share the first turn, which is trained in the first sequence."""
    first = await chat(bench, [USER])
    for text in ("What?", "Again?", "Why?"):
        await chat(bench, [*first[:-1], {"role": "user", "content": text}])


async def an_answer_that_the_client_wrote(bench: Bench) -> None:
    await chat(bench, [USER])
    await chat(bench, [USER, {"role": "assistant", "content": "Mine."}, USER])


async def a_text_completion_last(bench: Bench) -> None:
    await chat(bench, [USER])
    await bench.client().completions.create(model="m", prompt="Once", max_tokens=20)


async def only_text(bench: Bench) -> None:
    await bench.client().completions.create(model="m", prompt="Once", max_tokens=20)


@pytest.mark.parametrize(
    ("ask", "root", "embedded"),
    [
        (one_conversation, [True, True], []),
        (two_conversations, [True, True], [1]),
        (three_ends, [False, True], [2, 1]),
        (an_answer_that_the_client_wrote, [False, False], [1, 1]),
        (a_text_completion_last, [False], [1, 1]),
        (only_text, [True], []),
    ],
)
async def test_a_session_has_tokens_beside_text_only_if_they_belong_together(
    ask: Asks, root: list[bool], embedded: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    """`root`: whether each step of the agent has tokens. `embedded`: the steps of other ones."""

    def policy(request: PolicyRequest) -> str:
        return f"Answer {request.index}."

    async with endpoint(tokenizer, policy, out=tmp_path / "run") as bench:
        await ask(bench)
        await bench.post("/sessions/s/export", {})
    assert exported(tmp_path / "run", tmp_path / "out") == 1
    atif = trajectory_of(tmp_path / "out", "s", 0, "serve")
    judge(atif, lines_of(tmp_path / "run")[0], tokenizer)
    spoken = [step for step in atif["steps"] if step["source"] == "agent"]
    assert ["metrics" in step for step in spoken] == root
    copied = [step.get("is_copied_context", False) for step in spoken]
    assert copied == [ask is three_ends and not has for has in root]
    others = atif["subagent_trajectories"] or ()
    assert [len(part["steps"]) for part in others] == embedded


# --- what the record says, and what is refused ----------------------------------------------------


def test_calls_and_their_results(tmp_path: Path) -> None:
    write_run(tmp_path / "run", varied())
    assert exported(tmp_path / "run", tmp_path / "out") == 4, "the aborted one is left out"
    atif = trajectory_of(tmp_path / "out", "a%2Fb", 0)
    instruction, question, step, last = atif["steps"]
    assert (instruction["source"], question["message"], last["message"]) == (
        "system",
        "Look.",
        "A pond.",
    )
    assert step["tool_calls"] == [
        {
            "tool_call_id": "c1",
            "function_name": "look",
            "arguments": {"at": 1},
            "extra": {"parse_error": None},
        },
        {
            "tool_call_id": "c2",
            "function_name": "look",
            "arguments": {},
            "extra": {"parse_error": 'no JSON object: {"at": '},
        },
    ]
    assert step["observation"]["results"] == [
        {"source_call_id": "c1", "content": "A pond."},
        {"source_call_id": "c2", "content": "Invalid JSON."},
        {"source_call_id": None, "content": "A late result."},
    ]
    assert atif["extra"]["reward"] == 1.0


def test_a_masked_turn_says_so_and_needs_no_logprobs(tmp_path: Path) -> None:
    part = trajectory()
    part.loss_mask[4:7] = 0
    part.logprobs[4:7] = np.nan
    write_run(tmp_path / "run", [episode(messages=CALLS, trajectories=[part])])
    exported(tmp_path / "run", tmp_path / "out")
    first, second = sampled_steps(trajectory_of(tmp_path / "out", "t-0", 0))
    assert first["metrics"]["logprobs"] is None
    masks = [step["metrics"]["extra"]["loss_mask"] for step in (first, second)]
    assert masks == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("wrong", [slice(5, 6), slice(4, 7)])
def test_a_trained_token_without_a_logprob_is_refused(wrong: slice, tmp_path: Path) -> None:
    part = trajectory()
    part.logprobs[wrong] = np.nan
    write_run(tmp_path / "run", [episode(messages=CALLS, trajectories=[part])])
    with pytest.raises(UsageError, match=r"pond/t-0/0: \d of 3 sampled tokens have"):
        exported(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_name_leads_out_of_the_folder_or_is_too_long(tmp_path: Path) -> None:
    lines = [replace(episode(name), env="..") for name in ("..", "任务" * 40, "任务" * 41)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.jsonl").write_bytes(b"".join(map(to_line, lines)))
    assert exported(tmp_path / "run", tmp_path / "out") == 3
    assert len(list((tmp_path / "out").glob("*/*/agent/trajectory.json"))) == 3
