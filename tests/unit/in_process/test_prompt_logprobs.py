"""`get_logprobs` of a `ManagedServer`, in Atropos' form (atroposlib 0.4.0)."""

from __future__ import annotations

from typing import Any

import pytest
from support.endpoints import endpoint

from toolroll.endpoint.in_process import ManagedServer
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError
from toolroll.testing import Fault, load_embedded_tokenizer, reference_logprob

USER: Any = {"role": "user", "content": "Hi"}


async def test_the_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    tokenizer = load_embedded_tokenizer()
    async with (
        endpoint(tokenizer, lambda request: "Hello.") as bench,
        ManagedServer(bench.engine.url, tokenizer) as m,
    ):
        await m.chat_completion(messages=[USER])
        [node] = m.get_state()["nodes"]
        asked: list[tuple[dict[str, Any], list[int]]] = [
            ({"prompt": "One two three."}, tokenizer.encode("One two three.")),
            ({"messages": [USER]}, bench.engine.log[0].input_ids.tolist()),
            ({"input_ids": node.tokens}, node.tokens),
        ]
        for given, ids in asked:
            found = await m.get_logprobs(**given, top_k=3, split="eval", max_tokens=1)
            assert found["prompt_tokens"] == ids
            assert (found["prompt_topk_token_ids"][0], found["prompt_topk_logprobs"][0]) == ([], [])
            places = zip(
                found["prompt_topk_token_ids"][1:], found["prompt_topk_logprobs"][1:], strict=True
            )
            for at, (likeliest, logprobs) in enumerate(places, 1):
                assert likeliest[0] == ids[at]  # the prompt's own token comes first
                assert len(likeliest) == len(set(likeliest)) == 3
                expected = [reference_logprob(ids[:at], index) for index in likeliest]
                assert logprobs == pytest.approx(expected)
        assert m.get_state()["nodes"] == [node]  # scoring a text trains nothing


async def test_a_closed_turn_of_the_assistant_is_scored_as_the_template_writes_it() -> None:
    tokenizer = load_embedded_tokenizer()
    async with (
        endpoint(tokenizer, lambda request: "Hello.") as bench,
        ManagedServer(bench.engine.url, tokenizer) as m,
    ):
        messages = [USER, {"role": "assistant", "content": "Hello."}]
        found = await m.get_logprobs(messages=messages)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        assert found["prompt_tokens"] == tokenizer.encode(text, add_special_tokens=False)


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
    async with (
        endpoint(
            load_embedded_tokenizer(),
            lambda request: "",
            faults=lambda request: Fault(garble=garble),
        ) as bench,
        ManagedServer(bench.engine.url, "embedded") as m,
    ):
        with pytest.raises(EngineError, match=words):
            await m.get_logprobs(prompt="One two three.")


async def test_what_cannot_be_scored_is_not_sent() -> None:
    async with (
        endpoint(load_embedded_tokenizer(), lambda request: "", context_length=64) as bench,
        ManagedServer(bench.engine.url, "embedded") as m,
    ):
        refused: list[tuple[dict[str, Any], type[Exception]]] = [
            ({}, UsageError),
            ({"prompt": "x", "input_ids": [1]}, UsageError),
            ({"input_ids": []}, UsageError),
            ({"input_ids": [10**6]}, UsageError),
            ({"prompt": "x", "top_k": 0}, UsageError),
            ({"input_ids": [5] * 64}, ContextOverflowError),
        ]
        for given, kind in refused:
            with pytest.raises(kind):
                await m.get_logprobs(**given)
        assert bench.engine.log == []
