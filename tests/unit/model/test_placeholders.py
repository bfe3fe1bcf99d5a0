"""A sampled placeholder token, which stands for an image or a video: the turn is cut before it, it
is never sent back to the engine, and the episode ends with a reason of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError
from support.endpoints import endpoint
from support.episodes import agent, call, serving
from support.listed_environment import LOOK, ListedWorld

from toolroll.endpoint.in_process import ManagedServer
from toolroll.rollout.environment import Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.tokenizers import find_placeholders
from toolroll.rollout.types import Status, StopReason
from toolroll.testing import Reply, load_embedded_tokenizer

TEXT = [40, 41, 42]
"""Ids of ordinary text."""


class Looks(ListedWorld):
    """Gives 0.25 for an episode that it did not end."""

    def truncated_reward(self) -> float | None:
        return 0.25


def looks() -> Looks:
    return Looks(tool_texts=["seen"], tools=(LOOK,))


@pytest.fixture
def vision(tmp_path: Path) -> Any:
    """The embedded tokenizer as that of a multimodal model, whose placeholder is `<|pad|>`."""
    tokenizer = load_embedded_tokenizer()
    config = {"text_config": {}, "image_token_id": tokenizer.convert_tokens_to_ids("<|pad|>")}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


def placeholder_of(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids("<|pad|>"))


def test_the_config_or_the_tokenizer_names_placeholders(tmp_path: Path) -> None:
    tokenizer = load_embedded_tokenizer()
    assert find_placeholders(tokenizer) == set()
    tokenizer.name_or_path = str(tmp_path)
    assert find_placeholders(tokenizer) == set()
    nested = {"thinker_config": {"video_token_id": 7, "image_token_index": 8}}
    config = {"image_token_id": None, "vocab_size": 9, **nested}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert find_placeholders(tokenizer) == {7, 8}
    tokenizer.audio_token_id = 6
    assert find_placeholders(tokenizer) == {6, 7, 8}


@pytest.mark.parametrize("before", [TEXT, []])
async def test_an_episode_ends_at_its_first_placeholder(vision: Any, before: list[int]) -> None:
    placeholder = placeholder_of(vision)

    def policy(request: Any) -> Any:
        ids = [*before, placeholder, *TEXT]
        return call() if request.call == 0 else Reply(output_ids=ids)

    async with serving(vision, policy) as (engine, model):
        result = await agent(model).asolve(looks(), task=Task("t", 0), session_id="s")
    assert (result.stop_reason, result.status) == (StopReason.PLACEHOLDER, Status.TRUNCATED)
    assert result.reward == 0.25 and "error" not in result.info
    assert not any(name.startswith("token_mismatches") for name in result.metrics)
    first, last = engine.log
    assert last.output_ids == [*before, placeholder]  # the engine stops there
    [trajectory] = result.trajectories
    turns = [trajectory.input_ids[turn.start : turn.stop].tolist() for turn in trajectory.turns]
    assert turns == [first.output_ids, before][: 1 + bool(before)]
    assert placeholder not in trajectory.input_ids
    assert trajectory.turns[-1].matched == (placeholder if before else first.output_ids[-1])
    logprobs = np.array([*first.logprobs, *last.logprobs[: len(before)]], dtype=np.float32)
    assert np.array_equal(trajectory.logprobs[trajectory.loss_mask == 1], logprobs)


async def test_an_engine_that_samples_on_changes_nothing(vision: Any) -> None:
    """With `ignore_eos`, no stop token ends a turn."""
    placeholder = placeholder_of(vision)
    reply = Reply(output_ids=[*TEXT, placeholder, *TEXT, placeholder])
    async with serving(vision, lambda request: reply) as (engine, model):
        player = agent(model)
        player.sampling_params = {"max_new_tokens": 32, "ignore_eos": True}
        result = await player.asolve(looks(), task=Task("t", 0), session_id="s")
    assert result.stop_reason is StopReason.PLACEHOLDER
    assert engine.log[0].output_ids == reply.output_ids
    assert result.tokens[-len(TEXT) :] == TEXT and result.response_length == len(TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_endpoint_cuts_answers_and_never_sends_the_token(
    vision: Any, stream: bool
) -> None:
    placeholder = placeholder_of(vision)

    def policy(request: Any) -> Any:
        return Reply(output_ids=[*TEXT, placeholder, *TEXT]) if request.call == 0 else "Fine."

    asked: list[Any] = [{"role": "user", "content": "Go."}]
    async with endpoint(vision, policy, settings={"verify": "always"}) as bench:
        client: Any = bench.client()
        ignored = {"extra_body": {"ignore_eos": True}}
        options: dict[str, Any] = {"model": "m", "max_tokens": 20, **ignored}
        if stream:
            sent = await client.chat.completions.create(messages=asked, stream=True, **options)
            chunks = [chunk async for chunk in sent]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish = chunks[-1].choices[0].finish_reason
        else:
            answer = await client.chat.completions.create(messages=asked, **options)
            choice = answer.choices[0]
            text, finish = choice.message.content, choice.finish_reason
            assert choice.model_extra is not None
            assert choice.model_extra["stop_reason"] == placeholder
        assert (text, finish) == (vision.decode(TEXT), "length")
        asked += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        await client.chat.completions.create(messages=asked, **options)
        trajectories = (await bench.get("/sessions/s/trajectories"))["trajectories"]
    assert len(bench.engine.log) == 2
    assert all(placeholder not in entry.input_ids for entry in bench.engine.log)
    assert all(placeholder not in trajectory["input_ids"] for trajectory in trajectories)


async def test_a_clients_prompt_with_a_placeholder_is_refused(vision: Any) -> None:
    """A text is encoded with its control tokens."""
    ids = [*TEXT, placeholder_of(vision)]
    async with (
        endpoint(vision, lambda request: "Fine.") as bench,
        ManagedServer(bench.engine.url, vision) as m,
    ):
        for prompt in ("See <|pad|>.", ids):
            with pytest.raises(BadRequestError, match=rf"<\|pad\|> \(id {ids[-1]}\).*an image"):
                await bench.client().completions.create(model="m", prompt=prompt)
        with pytest.raises(UsageError, match=r"<\|pad\|>, which stands for an image"):
            await m.get_logprobs(input_ids=ids)
    assert bench.engine.log == []
