"""Tokenizers of all kinds with four templates: the delta is exact, or the model is refused when it
is loaded.

A turn that is cut inside a text may be continued only by ids that read on from it; if the
tokenizer would have merged across the cut, nothing is right and nothing is judged."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
from support.adversarial.dialogues import TURNS, loop, mixed
from support.adversarial.dialogues import Conversation as Script
from support.adversarial.patches import STYLES
from support.adversarial.size import FULL, SEED
from support.adversarial.skeleton import filled
from support.adversarial.templates import Template
from support.adversarial.texts import Inapplicable, Refused
from support.adversarial.token_judge import Judge
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


def scripts(kind: str) -> list[Script]:
    """A loop with calls, one without, one in which all turns are cut, and mixed dialogues."""
    made = [loop(f"{kind}/{SEED}/{n}", calls=n) for n in (1, 0)]
    cut = [loop(f"{kind}/{SEED}/cut{n}", calls=0, sampling="cut") for n in range(4 if FULL else 1)]
    return [*made, *cut, *(mixed(f"{kind}/{SEED}/{n}") for n in range(4 if FULL else 0))]


def judged(subject: ChatTemplate, canon: Canon, script: Script) -> Iterator[tuple[str, str]]:
    """The verdict on the prompt and on each delta of a script, by the tokenizer's encoding of the
    whole render, and what is wrong."""
    messages, tools = [dict(message) for message in script.first], script.tools
    rng, judge = random.Random(script.name), canon.judge
    prompt = canon.encode(judge.text(messages, tools, generate=True))
    yield verdict(canon, prompt, partial(subject.prompt, messages, tools))
    for turn, step in enumerate(script.steps, 1):
        said_turn, found, detail = step.turn, "nothing said", ""
        with suppress(Inapplicable, Refused):
            said = judge.say(messages, step, tools, rng)
            said_turn = said.turn
            expected = canon.delta(messages, said, step.new, tools)
            delta = partial(
                subject.delta,
                [*messages, said.turn],
                step.new,
                tools=tools,
                sampled_ids=canon.sampled(judge.text(messages, tools, generate=True), said),
                finish_reason="stop" if said.stop else "length",
            )
            found, detail = verdict(canon, expected, delta)
        cut = " cut" if step.sampling == "cut" else ""
        yield found + cut, detail and f"{script.name} turn {turn}{cut}: {detail}"
        messages = [*messages, said_turn, *step.new]


def verdict(
    canon: Canon, expected: Sequence[int], make: Callable[[], Sequence[int]]
) -> tuple[str, str]:
    try:
        ids = make()
    except HistoryRewrittenError:
        return "fork", ""
    except TemplateError:
        return "refused", ""
    if list(ids) == expected:
        return "exact", ""
    texts = [[str(canon.backend.id_to_token(i)) for i in some[:12]] for some in (expected, ids)]
    return "wrong", f"expected {texts[0]}, got {texts[1]}"


@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_exact_or_refused_when_it_is_loaded(kind: str, name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = tokenizer_of_kind(kind, dict.fromkeys(template.control), template.stops[0])
    try:
        subject = ChatTemplate(tokenizer, chat_template=template.source)
    except (TemplateError, UsageError) as error:
        assert kind not in EXACT, f"a tokenizer of a published kind is refused: {error}"
        return
    canon = Canon(Judge(tokenizer, template))
    found = [row for script in scripts(kind) for row in judged(subject, canon, script)]
    wrong = [detail for _, detail in found if detail]
    assert not wrong, f"{len(wrong)} wrong: " + "\n".join(wrong[:3])
    counts = Counter(what for what, _ in found)
    assert counts["exact"] >= TURNS, counts
    assert counts["exact cut"] + counts["nothing said cut"] >= TURNS, counts


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
    before, deltas, replies = list(script.first), list[list[int]](), list[Reply]()
    try:
        async with serving(tokenizer, lambda request: replies[-1]) as (engine, served):
            dialogue = Conversation(served, script.first, (), session_id="s", verify="always")
            for step in script.steps:
                turn = canon.judge.say(dialogue.messages, step, None, random.Random(0))
                prompt = canon.judge.text(dialogue.messages, None, generate=True)
                replies.append(Reply(output_ids=canon.sampled(prompt, turn)))
                await dialogue.reply({"max_new_tokens": 512})
                dialogue.extend(step.new)
                deltas.append(canon.delta(before, turn, step.new, None))
                before += [step.turn, *step.new]
            await dialogue.settle()
    except (TemplateError, UsageError):
        return  # refused when it was loaded
    wrong = [
        delta
        for (entry, then), delta in zip(pairwise(engine.log), deltas, strict=False)
        if [*entry.input_ids, *entry.output_ids, *delta] != then.input_ids.tolist()
    ]
    trained = sum(trajectory.trained_tokens for trajectory in dialogue.session.trajectories())
    assert not wrong, f"{len(wrong)} deltas are wrong, {trained} tokens are trained"
    assert trained
