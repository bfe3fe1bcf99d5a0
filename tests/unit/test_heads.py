"""`HeadCache`: what many prompts begin with is encoded once, and the ids are those of the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.encode import Encoder, Span
from toolroll.rollout.template.heads import HeadCache
from toolroll.rollout.types import Tool

pytestmark = pytest.mark.tokens

LONG = "Some rules of conduct, with all their exceptions. " * 40


class Counting(Encoder):
    """Counts the characters that it encodes."""

    characters = 0

    def encode(self, text: str, bodies: Sequence[Span] = ()) -> list[int]:
        self.characters += len(text)
        return super().encode(text, bodies)


@pytest.fixture
def encoder(tokenizer: Any) -> Counting:
    return Counting(tokenizer)


def prompt(system: str, user: str) -> str:
    return f"<|turn|>system\n{system}<|end|>\n<|turn|>user\n{user}<|end|>\n<|turn|>assistant\n"


WORDS = ["<|turn|>", "<|end|>", " ", "\n", "word", " words", "}", "é", "<tool_response>", "</tool_response>", "<", "|end|>"]
PIECES = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@given(parts=st.lists(st.tuples(st.sampled_from(["A", "B"]), PIECES, st.booleans()), min_size=2, max_size=10))
def test_the_ids_are_those_of_the_whole_prompt(encoder: Counting, parts: list[tuple[str, str, bool]]) -> None:
    """Prompts with one of two heads, interleaved; user text with control-token characters, as text and as the template's own."""
    cache = HeadCache(encoder)
    for head, user, as_body in parts:
        text = prompt(f"{head} <|end|> {LONG}", user)
        start = text.index(" <|end|> ") + 1
        bodies = [(start, start + len("<|end|>"))]
        if as_body and user:
            begin = text.rindex(user + "<|end|>\n<|turn|>assistant")
            bodies.append((begin, begin + len(user)))
        assert cache.encode(text, bodies).tolist() == Encoder.encode(encoder, text, bodies)


def test_a_known_head_is_not_encoded_again(encoder: Counting) -> None:
    cache = HeadCache(encoder)
    for user in ("one", "two"):
        cache.encode(prompt(LONG, user))
    before = encoder.characters
    for at in range(10):
        cache.encode(prompt(LONG, f"number {at}"))
    assert encoder.characters - before < 10 * 100


def test_heads_that_come_interleaved_are_all_learned(encoder: Counting) -> None:
    cache = HeadCache(encoder)
    for turn in range(3):
        for head in range(5):
            cache.encode(prompt(f"{head} {LONG}", f"turn {turn}"))
    before = encoder.characters
    for head in range(5):
        cache.encode(prompt(f"{head} {LONG}", "again"))
    assert encoder.characters - before < 5 * 100


def test_no_more_than_the_limit_is_kept_and_the_least_used_goes(encoder: Counting) -> None:
    cache = HeadCache(encoder, limit=2)
    for head in ("a", "b", "a", "c"):
        for user in ("one", "two"):
            cache.encode(prompt(f"{head} {LONG}", user))
    assert [text.split("\n")[1][0] for text, _ in cache._heads] == ["a", "c"]


def test_the_same_body_text_as_control_and_as_text_are_two_heads(encoder: Counting) -> None:
    cache = HeadCache(encoder)
    text = [prompt(f"<|end|> {LONG}", user) for user in ("one", "two", "three", "four")]
    start = text[0].index("<|end|> ")
    span = [(start, start + len("<|end|>"))]
    for each in text:
        assert cache.encode(each, span).tolist() == Encoder.encode(encoder, each, span)
        assert cache.encode(each).tolist() == Encoder.encode(encoder, each)


def test_a_prompt_of_a_template_is_the_same_with_and_without_it(tokenizer: Any) -> None:
    functions = [{"name": f"tool_{at}", "description": LONG[:300] + "<|end|>", "parameters": {}} for at in range(8)]
    tools: list[Tool] = [{"type": "function", "function": function} for function in functions]
    warm = ChatTemplate(tokenizer)
    for at in range(4):
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": f"{at} <|turn|>"}]
        assert warm.prompt(messages, tools) == ChatTemplate(tokenizer).prompt(messages, tools)
        assert warm.prompt(messages, tools[:3]) == ChatTemplate(tokenizer).prompt(messages, tools[:3])
