"""Design A (slime's tau-bench example): each defect of its tokens, as a test with the defect's
number in its name.

Each check is shown to fail on the published way of making tokens, which is re-made here or in
`support.published`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.episodes import call, judge
from support.published import (
    TOOLS_LAST,
    DiffingAgent,
    episode,
    observed,
    qwen,
    retold,
    text_of,
    with_bos,
)
from support.qwen import qwen3_tokenizer, tokenizer_for, trl_template
from support.results import trajectory as a_trajectory
from support.slime_mirror import Sample
from support.worlds import ListedWorld

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.model.model import Model
from toolroll.rollout.testing import EmbeddedEngine, Reply
from toolroll.rollout.types import InteractionResult, Status, StopReason, Trajectory

pytestmark = pytest.mark.tokens

RESULT = "<tool_response>\nORDER-1\n</tool_response>"


def _begins_after_generation_prompt(tokenizer: Any, trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        assert tokenizer.decode(trajectory.input_ids[: turn.start]).endswith(
            "<|im_start|>assistant\n"
        )
        assert not trajectory.loss_mask[turn.start - 3 : turn.start].any()


async def test_a01_every_turn_is_sampled_and_trained_behind_a_generation_prompt() -> None:
    tokenizer, said = qwen(), [call(at="here"), "It shipped.", "You are welcome."]
    world = lambda: ListedWorld(user_texts=["Where is it?", "Thanks."], tool_texts=["on its way"])
    result, engine = await episode(tokenizer, world(), said)
    assert len(result.trajectories[0].turns) == 3
    _begins_after_generation_prompt(tokenizer, result.trajectories[0])
    judge(result, engine, "s")
    wrong, _ = await episode(tokenizer, world(), said, kind=DiffingAgent)
    with pytest.raises(AssertionError):
        _begins_after_generation_prompt(tokenizer, wrong.trajectories[0])


async def test_a02_only_what_was_sampled_is_trained() -> None:
    """Neither the newline behind a stop token nor the close of a turn that was cut."""
    tokenizer = qwen()
    cut = Reply(output_ids=tokenizer.encode("It will arrive on"), stop=False)
    world = ListedWorld(user_texts=["When?", "Go on.", "Yes?"])
    result, engine = await episode(
        tokenizer, world, ["One moment.", cut, "Monday."], on_length="continue"
    )
    judge(result, engine, "s")
    [trajectory] = result.trajectories
    assert trajectory.input_ids[trajectory.turns[0].stop - 1] == tokenizer.eos_token_id, (
        "the model sampled this stop token, and trains it"
    )
    assert tokenizer.decode(observed(trajectory, 0)).startswith("\n<|im_start|>user")
    assert trajectory.turns[1].finish_reason == "length"
    assert tokenizer.decode(observed(trajectory, 1)).startswith("<|im_end|>\n<|im_start|>user")
    for at in (0, 1):
        mask = trajectory.loss_mask.copy()
        mask[trajectory.turns[at].stop] = 1
        with pytest.raises(AssertionError):
            judge(_with_mask(result, mask), engine, "s")


def _with_mask(result: InteractionResult, mask: Any) -> InteractionResult:
    [trajectory] = result.trajectories
    return dataclasses.replace(
        result, trajectories=(dataclasses.replace(trajectory, loss_mask=mask),)
    )


@pytest.mark.parametrize("on_length", ["stop", "continue"])
async def test_a02_a_tool_call_that_was_cut_is_nothing_said_to_the_user(on_length: str) -> None:
    tokenizer = qwen()
    cut = Reply(output_ids=tokenizer.encode('Let me look. <tool_call>{"name": "lo'), stop=False)
    world = ListedWorld(user_texts=["When?", "What?"])
    result, _ = await episode(tokenizer, world, [cut, "Never."], on_length=on_length)
    assert "tool_call" not in " ".join(action.content for action in world.seen)
    if on_length == "stop":
        assert world.seen == [] and (result.status, result.stop_reason) == (
            Status.TRUNCATED,
            StopReason.LENGTH,
        )
    else:
        assert result.messages[3]["role"] == "tool" and result.messages[3]["content"].startswith(
            "Error: "
        )


def _holds_result(tokenizer: Any, trajectory: Trajectory) -> None:
    assert text_of(tokenizer, trajectory).count(RESULT) == 7
    said = [
        tokenizer.decode(trajectory.input_ids[turn.start : turn.stop]) for turn in trajectory.turns
    ]
    assert not any("<think>" in text for text in said)


async def test_a03_no_reasoning_is_put_into_a_turn_and_no_character_of_a_result_is_lost() -> None:
    tokenizer, said = qwen("qwen3"), [call(at="here")] * 7 + ["It shipped."]
    world = lambda: ListedWorld(user_texts=["Where is it?"], tool_texts=["ORDER-1"] * 7)
    result, engine = await episode(tokenizer, world(), said)
    for trajectory in result.trajectories:
        _holds_result(tokenizer, trajectory)
    judge(result, engine, "s")
    wrong, _ = await episode(tokenizer, world(), said, kind=DiffingAgent)
    with pytest.raises(AssertionError):
        _holds_result(tokenizer, wrong.trajectories[0])


THOUGHT = [
    "<think>\nThey want it soon.\n</think>\n\nWhich order?",
    "<think>\nFound.\n</think>\n\nIt shipped.",
    "Goodbye.",
]


def _holds_user(tokenizer: Any, trajectory: Trajectory) -> None:
    assert "<|im_start|>user\nMy order is 17.<|im_end|>\n<|im_start|>assistant\n" in text_of(
        tokenizer, trajectory
    )


async def test_a04_a_user_message_behind_reasoning_is_there_whole() -> None:
    tokenizer = qwen("qwen3")
    world = lambda: ListedWorld(user_texts=["Where is it?", "My order is 17."])
    result, engine = await episode(tokenizer, world(), THOUGHT)
    assert len(result.trajectories) > 1, (
        "the template drops reasoning before a user message: a fork"
    )
    _holds_user(tokenizer, result.trajectories[1])
    judge(result, engine, "s")
    wrong, _ = await episode(tokenizer, world(), THOUGHT, kind=DiffingAgent, history="preserve")
    with pytest.raises(AssertionError):
        _holds_user(tokenizer, wrong.trajectories[0])


def _every_prompt_begins(engine: EmbeddedEngine, sequences: list[list[int]]) -> None:
    for entry in engine.log:
        prompt = entry.input_ids.tolist()
        assert any(sequence[: len(prompt)] == prompt for sequence in sequences)


async def test_a05_what_was_served_is_the_beginning_of_what_is_trained() -> None:
    tokenizer = qwen("qwen3")
    world = ListedWorld(user_texts=["Where is it?", "My order is 17.", "Thanks."])
    result, engine = await episode(tokenizer, world, THOUGHT)
    assert len(engine.log) == 3
    _every_prompt_begins(
        engine, [trajectory.input_ids.tolist() for trajectory in result.trajectories]
    )
    raw = [
        {
            "role": message["role"],
            "content": THOUGHT[at // 2 - 1]
            if message["role"] == "assistant"
            else message["content"],
        }
        for at, message in enumerate(result.messages)
    ]
    with pytest.raises(AssertionError):
        _every_prompt_begins(engine, [retold(tokenizer, raw)])


@pytest.mark.parametrize("ids", [[49122, 385], [198, 198, 9707], [198, 198, 49122, 385]])
async def test_a06_the_split_that_was_sampled_is_the_split_that_is_trained(ids: list[int]) -> None:
    tokenizer = qwen3_tokenizer(trl_template("qwen2_5"))  # the ids are of the whole vocabulary
    end = tokenizer.eos_token_id
    result, engine = await episode(
        tokenizer,
        ListedWorld(user_texts=["Hi", "Yes?"]),
        [Reply(output_ids=[*ids, end])],  # pyright: ignore[reportArgumentType]
    )
    [trajectory] = result.trajectories
    turn = trajectory.turns[0]
    assert (
        trajectory.input_ids[turn.start : turn.stop].tolist()
        == [*ids, end]
        == engine.log[0].output_ids
    )
    judge(result, engine, "s")
    again = tokenizer.encode(tokenizer.decode(ids))
    assert again != ids, "text would give other tokens"
    ids_then = trajectory.input_ids.tolist()
    retokenised = [*ids_then[: turn.start], *again, *ids_then[turn.stop - 1 :]]
    _every_answer_stands(engine, [ids_then])
    with pytest.raises(AssertionError):
        _every_answer_stands(engine, [retokenised])


def _every_answer_stands(engine: EmbeddedEngine, sequences: list[list[int]]) -> None:
    for entry in engine.log:
        whole = [*entry.input_ids.tolist(), *entry.output_ids]
        assert any(sequence[: len(whole)] == whole for sequence in sequences)


class Recording(TrainableToolCallingAgent):
    """Keeps the payloads; `without` and `text` make them as the published example does."""

    payloads: list[dict[str, Any]]
    without = ""
    text = False

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        if "payloads" not in vars(self):
            self.payloads = []
        payload = {name: value for name, value in payload.items() if name != self.without}
        if self.text:
            assert isinstance(self.model, Model)
            payload["text"] = self.model.template.encoder.decode(payload.pop("input_ids"))
        self.payloads.append(payload)
        return await super()._call_llm(url, payload)


class WithoutLogprobs(Recording):
    without = "return_logprob"


class AsText(Recording):
    text = True


def _has_logprobs(result: InteractionResult) -> None:
    trained = [t.logprobs[t.loss_mask == 1] for t in result.trajectories]
    assert sum(map(len, trained)) > 0 and all(np.isfinite(found).all() for found in trained)
    assert len(result.logprobs or ()) == len(result.loss_mask) == result.response_length


async def test_a07_every_trained_token_has_the_engine_s_logprob() -> None:
    world = lambda: ListedWorld(user_texts=["Hi", "Yes?"])
    result, engine = await episode(qwen(), world(), ["Hello."])
    _has_logprobs(result)
    judge(result, engine, "s")
    recorded, _ = await episode(qwen(), world(), ["Hello."], kind=Recording)
    _has_logprobs(recorded)
    wrong, _ = await episode(qwen(), world(), ["Hello."], kind=WithoutLogprobs)
    assert wrong.status is Status.ABORTED and wrong.reward is None, (
        "an answer without logprobs is an error, and no sample"
    )
    with pytest.raises(AssertionError):
        _has_logprobs(wrong)


async def test_a08_the_engine_is_given_ids_and_one_bos() -> None:
    tokenizer = with_bos()
    payloads: list[Mapping[str, Any]] = []

    class Spy(Recording):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            payloads.append(payload)
            return await super()._call_llm(url, payload)

    one_bos = lambda engine: [
        entry.input_ids.tolist().count(tokenizer.bos_token_id) for entry in engine.log
    ]
    for kind in (TrainableToolCallingAgent, Spy):
        result, engine = await episode(
            tokenizer, ListedWorld(user_texts=["Hi", "Yes?"]), ["Hello.", "Bye."], kind=kind
        )
        assert one_bos(engine) == [1, 1]
        assert result.trajectories[0].input_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert [sorted(payload) for payload in payloads] == [
        ["input_ids", "return_logprob", "sampling_params"]
    ] * 2
    wrong, engine = await episode(
        tokenizer, ListedWorld(user_texts=["Hi", "Yes?"]), ["Hello."], kind=AsText
    )
    assert one_bos(engine)[0] == 2
    assert wrong.status is Status.ABORTED, (
        "the engine says how long its prompt was, and it is not ours"
    )


def _renders_as_the_template(
    tokenizer: Any, result: InteractionResult, engine: EmbeddedEngine
) -> None:
    at = [index for index, message in enumerate(result.messages) if message["role"] == "assistant"]
    for entry, end in zip(engine.log, at, strict=True):
        text = tokenizer.apply_chat_template(
            result.messages[:end], tools=result.tools, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(entry.input_ids) == text


async def test_a09_tools_that_move_with_the_last_user_message_fork() -> None:
    tokenizer = tokenizer_for(TOOLS_LAST)
    world = lambda: ListedWorld(user_texts=["Hi", "And now?"])
    result, engine = await episode(tokenizer, world(), ["Hello.", "Bye."], policy=CallPolicy())
    _renders_as_the_template(tokenizer, result, engine)
    assert len(result.trajectories) == 2
    judge(result, engine, "s")
    wrong, engine = await episode(
        tokenizer,
        world(),
        ["Hello.", "Bye."],
        policy=CallPolicy(),
        kind=DiffingAgent,
        history="preserve",
    )
    with pytest.raises(AssertionError):
        _renders_as_the_template(tokenizer, wrong, engine)


def _holds_both(tokenizer: Any, trajectory: Trajectory) -> None:
    both = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in ("R1", "R2"))
    both = f"<|im_start|>user\n{both.rstrip()}<|im_end|>\n"
    assert both in text_of(tokenizer, trajectory)


async def test_a10_two_tool_results_in_a_row_are_one_block_and_whole() -> None:
    tokenizer, said = qwen(), [call(at="a") + "\n" + call(at="b"), "Both."]
    world = lambda: ListedWorld(user_texts=["Look twice."], tool_texts=["R1", "R2"])
    result, engine = await episode(
        tokenizer, world(), said, policy=CallPolicy(parallel_calls="all")
    )
    _holds_both(tokenizer, result.trajectories[0])
    judge(result, engine, "s")
    wrong, _ = await episode(
        tokenizer, world(), said, policy=CallPolicy(parallel_calls="all"), kind=DiffingAgent
    )
    with pytest.raises(AssertionError):
        _holds_both(tokenizer, wrong.trajectories[0])


logger = logging.getLogger(__name__)


def res_to_sample(res: InteractionResult, task_index: int) -> Any:
    """The function of slime's example, at `support.slime_mirror.COMMIT`, without its comments."""
    status_mapping = {
        Status.COMPLETED: "completed",
        Status.TRUNCATED: "truncated",
        Status.ABORTED: "aborted",
    }
    status: Any = status_mapping.get(res.status)
    logger.debug(
        f"res_to_sample: response_length="
        f"{res.response_length if hasattr(res, 'response_length') else 'None'}, "
        f"loss_mask_len={len(res.loss_mask) if res.loss_mask else 'None'}, "
        f"tokens_len={len(res.tokens) if res.tokens else 'None'}"
    )
    sample: Any = Sample(
        index=task_index,
        prompt=res.prompt,
        tokens=res.tokens,
        response=res.response,
        reward=res.reward,
        loss_mask=res.loss_mask,
        status=status,
        metadata=res.info,
    )
    if hasattr(res, "response_length"):
        sample.response_length = res.response_length
    return sample


def _result(*trajectories: Trajectory) -> InteractionResult:
    return InteractionResult.of(
        trajectories, prompt="P", reward=1.0, messages=[], info={}, stop_reason=StopReason.DONE
    )


def test_the_result_and_its_published_sample_are_lists_of_numbers() -> None:
    result = _result(a_trajectory(500, ((4, 300), (310, 422))))
    sample = res_to_sample(result, 7)
    mask, tokens, logprobs = sample.loss_mask, sample.tokens, result.logprobs
    assert sum(mask) == 408 and len(mask) == len(logprobs or ()) == sample.response_length == 496
    assert tokens + [5] == [*range(100, 600), 5]  # noqa: RUF005 - as users write it
    assert {type(value) for value in [*mask, *tokens]} == {int}
    assert logprobs is not None and logprobs[0] == -0.25 and logprobs[300] == 0.0
    plain = json.loads(json.dumps([mask, tokens, logprobs, sample.metadata], allow_nan=False))
    assert plain == [mask, tokens, logprobs, {}]
    empty = res_to_sample(_result(), 7)
    assert (empty.tokens, empty.loss_mask, empty.response_length) == ([], [], 0)


def test_the_result_has_no_logprobs_if_a_trained_token_has_none() -> None:
    unknown = a_trajectory()
    unknown.logprobs[11] = np.nan
    assert _result(unknown).logprobs is None
    excluded = dataclasses.replace(unknown, loss_mask=np.zeros_like(unknown.loss_mask))
    assert _result(excluded).logprobs == [-0.25, -0.5, -0.75, 0.0, 0.0, -0.25, -0.5, 0.0]
