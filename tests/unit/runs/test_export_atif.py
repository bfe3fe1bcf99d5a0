"""ATIF: each step has the text and the tokens of the same turn, and every turn is in one step."""

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
from support.listed_environment import TOOL, ListedWorld
from support.qwen import tokenizer_for, trl_template
from support.results import episode, trajectory

from toolroll import Episode, Observation, Task, UsageError
from toolroll.evaluation.export.atif import write_atif
from toolroll.evaluation.export.exported_run import ExportedRun
from toolroll.rollout.runs.episode_file import to_line
from toolroll.testing import PolicyRequest

pytestmark = pytest.mark.tokens
USER: Any = {"role": "user", "content": "And now?"}


def exported(folder: Path, name: str = "t-0", env: str = "pond") -> tuple[int, dict[str, Any]]:
    """How many files the run in `folder` becomes, and what is in one of them."""
    count = write_atif(ExportedRun(folder / "run"), folder / "out")
    return count, trajectory_of(folder / "out", name, 0, env)


def line_of(folder: Path) -> dict[str, Any]:
    """The first episode of the run."""
    return json.loads((folder / "run" / "episodes.jsonl").read_text().splitlines()[0])


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


class Examples(ListedWorld):
    """Begins with an exchange of the prompt's."""

    def reset(self, task: Task, seed: int) -> Observation:
        first = super().reset(task, seed)
        examples: Any = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
        ]
        return Observation([*examples, *first.messages], first.tools)


SAID = [
    f"<think>\nFirst.\n</think>\n\nI look. {call(at='pond')}",
    "<think>\nSecond.\n</think>\n\nHello.",
    "<think>\nThird.\n</think>\n\nThere.",
    "Bye.",
]


async def played(folder: Path, world: type[ListedWorld]) -> Any:
    """Write an episode that forks, because Qwen3's template drops old thoughts."""
    tokenizer = tokenizer_for(trl_template("qwen3"))
    texts: Any = {"user_texts": ["Hi", *["And now?"] * 3], "tool_texts": ["Seen.", ""]}
    async with serving(tokenizer, lambda request: SAID[request.call]) as (_, model):
        task, env = Task("t-0", 0), world(system="", **texts)
        result = await agent(model).asolve(env, task=task, session_id="s", max_num_steps=4)
    assert len(result.trajectories) > 1
    write_run(folder / "run", [Episode("pond", "t-0", 0, 0, 1, result, "tiny")])
    return tokenizer


async def test_a_forked_episode_has_the_tokens_of_each_turn(tmp_path: Path) -> None:
    tokenizer = await played(tmp_path, ListedWorld)
    count, atif = exported(tmp_path)
    judge(atif, line_of(tmp_path), tokenizer)
    assert (count, atif["subagent_trajectories"]) == (1, None)
    assert [step["step_id"] for step in atif["steps"]] == list(range(1, 9))
    texts = [step["message"].strip() for step in sampled_steps(atif)]
    assert texts == ["I look.", "Hello.", "There.", "Bye."]


async def test_examples_in_the_prompt_get_no_tokens(tmp_path: Path) -> None:
    """The record does not say which assistant messages the model wrote."""
    tokenizer = await played(tmp_path, Examples)
    _, atif = exported(tmp_path)
    judge(atif, line_of(tmp_path), tokenizer)
    assert all("metrics" not in step for step in atif["steps"])


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
async def test_a_session_has_tokens_only_beside_their_own_text(
    ask: Asks, root: list[bool], embedded: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    """`root`: whether each step of the agent has tokens. `embedded`: the steps of other ones."""

    def policy(request: PolicyRequest) -> str:
        return f"Answer {request.index}."

    async with endpoint(tokenizer, policy, out=tmp_path / "run") as bench:
        await ask(bench)
        await bench.post("/sessions/s/export", {})
    count, atif = exported(tmp_path, "s", "serve")
    assert count == 1
    judge(atif, line_of(tmp_path), tokenizer)
    spoken = [step for step in atif["steps"] if step["source"] == "agent"]
    assert ["metrics" in step for step in spoken] == root
    copied = [step.get("is_copied_context", False) for step in spoken]
    assert copied == [ask is three_ends and not has for has in root]
    others = atif["subagent_trajectories"] or ()
    assert [len(part["steps"]) for part in others] == embedded


# --- what the record says, and what is refused ----------------------------------------------------


def test_calls_and_their_results(tmp_path: Path) -> None:
    write_run(tmp_path / "run", varied())
    count, atif = exported(tmp_path, "a%2Fb")
    assert count == 4, "the aborted one is left out"
    instruction, question, step, last = atif["steps"]
    assert instruction["source"] == "system"
    assert (question["message"], last["message"]) == ("Look.", "A pond.")
    calls = [
        (call["tool_call_id"], call["function_name"], call["arguments"], call["extra"])
        for call in step["tool_calls"]
    ]
    assert calls == [
        ("c1", "look", {"at": 1}, {"parse_error": None}),
        ("c2", "look", {}, {"parse_error": 'no JSON object: {"at": '}),
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
    first, second = sampled_steps(exported(tmp_path)[1])
    assert first["metrics"]["logprobs"] is None
    masks = [step["metrics"]["extra"]["loss_mask"] for step in (first, second)]
    assert masks == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("wrong", [slice(5, 6), slice(4, 7)])
def test_a_trained_token_without_a_logprob_is_refused(wrong: slice, tmp_path: Path) -> None:
    part = trajectory()
    part.logprobs[wrong] = np.nan
    write_run(tmp_path / "run", [episode(messages=CALLS, trajectories=[part])])
    with pytest.raises(UsageError, match=r"pond/t-0/0: \d of 3 sampled tokens have"):
        exported(tmp_path)
    assert not (tmp_path / "out").exists()


def test_no_name_leads_out_of_the_folder_or_is_too_long(tmp_path: Path) -> None:
    lines = [replace(episode(name), env="..") for name in ("..", "任务" * 40, "任务" * 41)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.jsonl").write_bytes(b"".join(map(to_line, lines)))
    assert write_atif(ExportedRun(tmp_path / "run"), tmp_path / "out") == 3
    assert len(list((tmp_path / "out").glob("*/*/agent/trajectory.json"))) == 3
