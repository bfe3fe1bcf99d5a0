"""`get_logprobs` of a `ManagedServer`, in Atropos' form (atroposlib 0.4.0)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.served import USER, ServedBench, assistant, serve

from toolroll.endpoint.in_process import ManagedServer
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError
from toolroll.testing import Fault, reference_logprob


@asynccontextmanager
async def managed(**options: Any) -> AsyncIterator[tuple[ServedBench, ManagedServer]]:
    async with serve(**options) as bench, ManagedServer(bench.engine.url, "embedded") as m:
        yield bench, m


async def test_the_logprobs_are_those_of_the_prompts_own_tokens(tokenizer: Any) -> None:
    closed = [USER, assistant("Hello.")]
    as_text = tokenizer.apply_chat_template(closed, tokenize=False, add_generation_prompt=False)
    async with managed() as (bench, m):
        await m.chat_completion(messages=[USER])
        [node] = m.get_state()["nodes"]
        prompts: list[tuple[dict[str, Any], list[int]]] = [
            ({"prompt": "One two three."}, tokenizer.encode("One two three.")),
            ({"messages": [USER]}, bench.engine.log[0].input_ids.tolist()),
            ({"messages": closed}, tokenizer.encode(as_text, add_special_tokens=False)),
            ({"input_ids": node.tokens}, node.tokens),
        ]
        for prompt, ids in prompts:
            scored = await m.get_logprobs(**prompt, top_k=3, split="eval", max_tokens=1)
            assert scored["prompt_tokens"] == ids
            tops = zip(scored["prompt_topk_token_ids"], scored["prompt_topk_logprobs"], strict=True)
            assert next(tops) == ([], [])
            for place, (likeliest, logprobs) in enumerate(tops, 1):
                assert likeliest[0] == ids[place]  # the prompt's own token comes first
                assert len(likeliest) == len(set(likeliest)) == 3
                expected = [reference_logprob(ids[:place], index) for index in likeliest]
                assert logprobs == pytest.approx(expected)
        assert m.get_state()["nodes"] == [node]  # scoring a text trains nothing


def without(name: str) -> Any:
    def garble(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"].pop(name)
        return answer

    return garble


def other_ids(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["input_token_logprobs"].reverse()
    return answer


def no_value(answer: dict[str, Any]) -> dict[str, Any]:
    answer["meta_info"]["input_top_logprobs"][1] = None
    return answer


@pytest.mark.parametrize(
    ("garble", "words"),
    [
        (without("input_token_logprobs"), "returned no logprobs"),
        (without("input_top_logprobs"), "returned no logprobs"),
        (other_ids, "logprobs of other tokens"),
        (no_value, "no logprobs for a position"),
    ],
)
async def test_missing_logprobs_are_an_error_and_never_padded(garble: Any, words: str) -> None:
    async with managed(faults=lambda request: Fault(garble=garble)) as (_, m):
        with pytest.raises(EngineError, match=words):
            await m.get_logprobs(prompt="One two three.")


async def test_what_cannot_be_scored_is_not_sent() -> None:
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({}, UsageError),
        ({"prompt": "x", "input_ids": [1]}, UsageError),
        ({"input_ids": []}, UsageError),
        ({"input_ids": [10**6]}, UsageError),
        ({"prompt": "x", "top_k": 0}, UsageError),
        ({"input_ids": [5] * 64}, ContextOverflowError),
    ]
    async with managed(context_length=64) as (bench, m):
        for prompt, kind in refused:
            with pytest.raises(kind):
                await m.get_logprobs(**prompt)
        assert bench.engine.log == []
