"""Tokenizers of all kinds with four templates: the delta is exact, or the model is refused when it
is loaded.

A turn that is cut inside a text may be continued only by ids that read on from it; if the
tokenizer would have merged across the cut, nothing is right and nothing is judged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from support.adversarial.dialogues import TURNS, loop, mixed
from support.adversarial.dialogues import Conversation as Script
from support.adversarial.size import FULL, SEED, sampled
from support.adversarial.skeleton import filled
from support.adversarial.styles import STYLES
from support.adversarial.templates import Template
from support.adversarial.token_judge import Inapplicable, Judge, Refused, Said
from support.adversarial.zoo import EXACT, KINDS, Canon, tokenizer_of_kind
from support.episodes import serving

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError, UsageError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import Reply

pytestmark = pytest.mark.tokens

COMMON = (
    *("<|turn|>", "<|end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def _style(name: str) -> Template:
    source, stops, control = STYLES[name]
    return Template(name, source, stops, (*COMMON, *control))


TEMPLATES = {
    "chatml": Template("chatml", filled(), ("<|end|>",), COMMON),
    "llama2": _style("style_llama2"),
    "glm": _style("style_glm"),
    "phi": _style("style_phi"),
}
FEW = ("chatml", "llama2")
CELLS = [(kind, name) for kind in KINDS for name in (TEMPLATES if FULL else FEW)]


@dataclass(frozen=True)
class Cell:
    """One tokenizer with one template; `refused`: why it was refused at load."""

    counts: Counter[str]
    wrong: list[str]
    refused: str = ""


def scripts(kind: str) -> list[Script]:
    """A loop with calls, one without, one in which all turns are cut, and mixed dialogues."""
    made = [loop(f"{kind}/{SEED}/{n}", calls=n) for n in (1, 0)]
    cut = [loop(f"{kind}/{SEED}/cut{n}", calls=0, sampling="cut") for n in range(4 if FULL else 1)]
    return [*made, *cut, *(mixed(f"{kind}/{SEED}/{n}") for n in range(4 if FULL else 0))]


def play(kind: str, template: Template) -> Cell:
    """Play the scripts; each delta is judged by the tokenizer's encoding of the whole render."""
    tokenizer = tokenizer_of_kind(kind, dict.fromkeys(template.control), template.stops[0])
    try:
        subject = ChatTemplate(tokenizer, chat_template=template.source)
    except (TemplateError, UsageError) as error:
        return Cell(Counter(), [], str(error))
    canon = Canon(Judge(tokenizer, template))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for script in scripts(kind):
        messages = [dict(message) for message in script.first]
        rng = random.Random(script.name)
        verdict, detail = _prompt(subject, canon, messages, script.tools)
        counts[verdict] += 1
        wrong += [detail] if verdict == "wrong" else []
        for turn, step in enumerate(script.steps, 1):
            said_turn = step.turn
            try:
                said = canon.judge.say(messages, step, script.tools, rng)
                said_turn = said.turn
                verdict, detail = _delta(subject, canon, messages, said, step.new, script.tools)
            except (Inapplicable, Refused):
                verdict = "nothing said"
            counts[verdict + (" cut" if step.sampling == "cut" else "")] += 1
            wrong += [f"{script.name} turn {turn}: {detail}"] if verdict == "wrong" else []
            messages = [*messages, said_turn, *step.new]
    return Cell(counts, wrong)


def _prompt(subject: ChatTemplate, canon: Canon, messages: Any, tools: Any) -> tuple[str, str]:
    expected = canon.encode(canon.judge.text(messages, tools, generate=True))
    try:
        got = list(subject.prompt(messages, tools))
    except TemplateError:
        return "refused", ""
    return _compared(canon, "prompt", expected, got)


def _delta(
    subject: ChatTemplate, canon: Canon, messages: Any, said: Said, new: Sequence[Any], tools: Any
) -> tuple[str, str]:
    expected = canon.delta(messages, said, new, tools)
    prompt = canon.judge.text(messages, tools, generate=True)
    try:
        got = subject.delta(
            [*messages, said.turn],
            new,
            tools=tools,
            sampled_ids=canon.sampled(prompt, said),
            finish_reason="stop" if said.stop else "length",
        )
    except HistoryRewrittenError:
        return "fork", ""
    except TemplateError:
        return "refused", ""
    return _compared(canon, "whole" if said.stop else "cut", expected, got)


def _compared(
    canon: Canon, kind: str, expected: Sequence[int], got: Sequence[int]
) -> tuple[str, str]:
    if got == expected:
        return "exact", ""
    texts = [[str(canon.backend.id_to_token(i)) for i in ids[:12]] for ids in (expected, got)]
    return "wrong", f"{kind}: expected {texts[0]}, got {texts[1]}"


@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_exact_or_refused_when_it_is_loaded(kind: str, name: str) -> None:
    cell = play(kind, TEMPLATES[name])
    assert not cell.wrong, f"{len(cell.wrong)} wrong: " + "\n".join(cell.wrong[:3])
    if cell.refused:
        assert kind not in EXACT, f"a tokenizer of a published kind is refused: {cell.refused}"
        return
    assert cell.counts["exact"] >= TURNS, cell.counts
    assert cell.counts["exact cut"] + cell.counts["nothing said cut"] >= TURNS, cell.counts


@pytest.mark.parametrize(
    "kind", ["byte_level", "metaspace_first", "unigram_first", "special_rstrip"]
)
async def test_what_is_not_exact_is_never_trained(kind: str) -> None:
    """The check of an episode must not share the error that it looks for."""
    template = TEMPLATES["chatml"]
    tokenizer = tokenizer_of_kind(kind, dict.fromkeys(template.control), "<|end|>")
    tokenizer.chat_template = template.source
    canon = Canon(Judge(tokenizer, template))
    script = loop(f"{kind}/{SEED}/trained", calls=0)
    said: list[Said] = []
    replies: list[Reply] = []
    try:
        async with serving(tokenizer, lambda request: replies[-1]) as (engine, served):
            dialogue = Conversation(served, script.first, (), session_id="s", verify="always")
            for step in script.steps:
                turn = canon.judge.say(dialogue.messages, step, None, random.Random(0))
                prompt = canon.judge.text(dialogue.messages, None, generate=True)
                said.append(turn)
                replies.append(Reply(output_ids=canon.sampled(prompt, turn)))
                await dialogue.reply({"max_new_tokens": 512})
                dialogue.extend(step.new)
            await dialogue.settle()
    except (TemplateError, UsageError):
        return  # refused when it was loaded
    wrong = [
        turn
        for turn, (entry, then) in enumerate(pairwise(engine.log))
        if [*entry.input_ids, *entry.output_ids, *_expected(canon, script, turn, said[turn])]
        != then.input_ids.tolist()
    ]
    trained = sum(trajectory.trained_tokens for trajectory in dialogue.session.trajectories())
    assert not wrong or not trained, (
        f"{trained} tokens are trained, and {len(wrong)} deltas are wrong"
    )
    assert trained


def _expected(canon: Canon, script: Script, turn: int, said: Said) -> list[int]:
    before = list(script.first)
    for step in script.steps[:turn]:
        before += [step.turn, *step.new]
    return canon.delta(before, said, script.steps[turn].new, None)


def test_every_kind_is_another_tokenizer() -> None:
    kinds = sampled(list(KINDS), 8)
    assert len(KINDS) >= 16
    made = [tokenizer_of_kind(kind, ["<|end|>"], "<|end|>") for kind in kinds]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in made}) == len(kinds)
