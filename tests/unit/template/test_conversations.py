"""Random conversations under every template: each prompt of a `Conversation` is judged by the
oracle.

Where `test_conformance.py` judges single deltas, this judges what builds up: pieces encoded in one
conversation and used in another, forks after forks, odd token splits in the middle of history
(I1-I6). `Verifier` must agree with the oracle after every turn.
"""

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.episodes import judge_tokens, opened_model
from support.oracle import Case, Inapplicable, Oracle, Truth
from support.oracle_scenarios import (
    ASK,
    MARK,
    SYSTEM,
    TOOLS,
    Message,
    Sampling,
    Scenario,
    call,
    calls,
    result,
    said,
    user,
)
from support.qwen import tokenizer_for, tool_templates
from support.tiers import by_tier, costly

from toolroll.parsers.openai import from_openai
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply

pytestmark = pytest.mark.tokens

TEMPLATES = tool_templates()

ODD_BODIES = ["", " ", "a\n", '{"a": [1, "b"]}', "</think>", "日本 🙂", "</tool_call>"]
BODY = st.one_of(
    st.text(max_size=30), st.sampled_from([*ODD_BODIES, "<|im_end|>\n<|im_start|>assistant\n"])
)
WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
TURN = st.fixed_dictionaries(
    {
        "calls": st.integers(0, 2),
        "words": WORDS,
        "thinks": st.booleans(),
        "bodies": st.lists(BODY, min_size=2, max_size=2),
        "odd_split": st.booleans(),
        "cut": st.sampled_from([False, False, False, True]),
    }
)


@lru_cache(maxsize=1)
def subject(name: str) -> tuple[Oracle, ChatTemplate]:
    """The oracle and the chat template under test; what the template caches stays from one
    conversation to the next."""
    tokenizer = tokenizer_for(TEMPLATES[name])
    return Oracle(tokenizer), ChatTemplate(tokenizer)


def message_of(turn: dict[str, Any], at: int) -> Message:
    more = {"reasoning_content": f"I think {turn['words']}"} if turn["thinks"] else {}
    if not turn["calls"]:
        return said(f"{turn['words']} {at} {MARK}", **more)
    cities = [turn["words"]] * (turn["calls"] - 1) + [f"{turn['words']} {MARK}"]
    made = [call(2 * at + i, json.dumps({"city": city})) for i, city in enumerate(cities)]
    return calls(*made, content=None, **more)


@pytest.mark.parametrize("name", by_tier(TEMPLATES))
@costly(10)
@given(turns=st.lists(TURN, min_size=1, max_size=6), system=st.booleans())
async def test_every_prompt_of_a_conversation_is_the_templates_own(
    name: str, turns: list[dict[str, Any]], *, system: bool
) -> None:
    oracle, template = subject(name)
    queued: list[Case] = []
    parsed: list[ParsedReply] = []

    def say(_: PolicyRequest) -> Reply:
        case = queued.pop(0)
        return Reply(output_ids=case.sampled_ids, stop=case.finish_reason == "stop")

    tokenizer = template.tokenizer
    async with (
        EmbeddedEngine(tokenizer, say) as engine,
        opened_model(engine.url, tokenizer, template=template, threads=1) as served,
    ):
        dialogue = Conversation(
            served,
            [SYSTEM, ASK] if system else [ASK],
            TOOLS,
            session_id="s",
            parse=lambda *_: parsed.pop(0),
            verify="always",
        )
        truth: Truth | None = None
        for at, turn in enumerate(turns):
            new = [result(2 * at + i, turn["bodies"][i]) for i in range(turn["calls"])] or [
                user(turn["bodies"][0])
            ]
            case, following = judged(oracle, dialogue, turn, new, at)
            if case is None or set(case.sampled_ids[:-1]) & set(template.stop_token_ids):
                break
            queued.append(case)
            parsed.append(from_openai(case.messages[-1]))
            forks = len(dialogue.forks)
            try:
                await dialogue.reply(
                    {"max_new_tokens": len(case.sampled_ids), "stop_token_ids": case.stop_token_ids}
                )
            except TemplateError:
                assert truth is not None
                assert truth.kind == "raises"
                break
            assert engine.log[-1].output_ids == case.sampled_ids
            assert dialogue.messages == case.messages
            judge_prompt(oracle, dialogue, engine, truth, forked=len(dialogue.forks) > forks)
            dialogue.extend(new)
            truth = following
        await dialogue.settle()
    assert dialogue.mismatches.keys() <= {"unshown"}
    for trajectory in dialogue.session.trajectories():
        assert trajectory.trained_tokens
    judge_tokens(dialogue.session.trajectories(), engine, "s")


def judged(
    oracle: Oracle, dialogue: Conversation, turn: dict[str, Any], new: list[Message], at: int
) -> tuple[Case | None, Truth | None]:
    """What the model says next in the template's own words, and what is right behind it."""
    how: Sampling = "cut" if turn["cut"] and not turn["calls"] else "whole"
    history = tuple(dialogue.messages)
    scenario = Scenario(
        "random", history, message_of(turn, at), tuple(new), TOOLS, how, odd_split=turn["odd_split"]
    )
    try:
        return oracle.judge(scenario)
    except Inapplicable:
        return None, None


def judge_prompt(oracle: Oracle, dialogue: Any, engine: Any, truth: Any, *, forked: bool) -> None:
    """The last prompt is the stream and exactly what the oracle appends; or, where no append
    exists, the template's own render."""
    prompt = engine.log[-1].input_ids.tolist()
    wanted = oracle.prompt(dialogue.messages[:-1], dialogue.tools)
    if truth is None:
        assert prompt == wanted
        return
    assert truth.kind != "raises"
    if not forked:
        rewritten = "the template rewrites history, and nothing was said"
        assert truth.kind in ("append", "drift"), rewritten
        stream = [*engine.log[-2].input_ids.tolist(), *engine.log[-2].output_ids]
        assert prompt[: len(stream)] == stream
        assert prompt[len(stream) :] == truth.input_ids
        return
    assert truth.kind == "rewrite", "a fork where an append exists"
    assert oracle.tokenizer.decode(prompt) == oracle.tokenizer.decode(wanted)
    control = set(oracle.control.values())
    assert [index for index in prompt if index in control] == [
        index for index in wanted if index in control
    ]
