"""history="scaffold": one sequence if a template only removes what its generation prompt wrote
before sampled turns, and a fork for every other rewrite."""

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.template_replay import OPENING, TOOLS, conversation, sampled_text
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import Message

pytestmark = pytest.mark.tokens

SCAFFOLD = "<think>\n\n</think>\n\n"
NAMES = ("qwen3", "qwen3_5_nothink")


def template_of(name: str, history: Any = "scaffold", source: str | None = None) -> ChatTemplate:
    return ChatTemplate(
        tokenizer_for(trl_template(name)),
        chat_template=source,
        kwargs={"enable_thinking": False},
        history=history,
    )


def episode(answers: int) -> list[Message]:
    """A conversation in which each answer follows two calls."""
    steps = [step for step in conversation(reasons=False, control="") if not step.optional]
    talk = [message for step in steps[: 3 * answers] for message in (step.turn, *step.new)]
    return [*OPENING, *talk]


@dataclass
class Played:
    """A conversation as it was served and sampled."""

    template: ChatTemplate
    messages: list[Message]
    ids: list[int]
    turns: list[TurnSpan] = field(default_factory=list)

    def sequence(self) -> ServedSequence:
        return ServedSequence(as_ids(self.ids), tuple(self.turns), self.messages, TOOLS)

    def text(self, *, scaffolds: bool) -> str:
        """The text of the sequence. Without `scaffolds`, none of its turns has one."""
        decode, begin, pieces = self.template.encoder.decode, 0, []
        for turn in self.turns:
            served = decode(self.ids[begin : turn.start])
            assert served.endswith(SCAFFOLD)
            pieces.append(served if scaffolds else served.removesuffix(SCAFFOLD))
            begin = turn.start
        return "".join([*pieces, decode(self.ids[begin:])])


def play(template: ChatTemplate, messages: list[Message], *, spaced: bool) -> Played:
    """Play `messages`. `spaced`: the model writes JSON with other spaces than the template."""
    at = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    cursor = template.start(messages[: at[0]], TOOLS)
    played = Played(template, messages[: at[-1] + 1], list(cursor.prompt()))
    for turn, following in pairwise(at):
        upto, new = messages[: turn + 1], messages[turn + 1 : following]
        text = sampled_text(template, cursor.text, upto, new, TOOLS)
        text = text.replace('": ', '":  ') if spaced else text
        sampled = template.encoder.encode(text, previous=played.ids[-1])
        start = len(played.ids)
        played.turns.append(TurnSpan(start, start + len(sampled), turn))
        delta, cursor = cursor.after(template.sampled(sampled), messages[turn:following])
        played.ids += [*sampled, *delta]
        fresh = template.renderer.render(messages[:following], TOOLS, generate=True)
        assert cursor.text == fresh
        if not spaced:
            assert played.text(scaffolds=False) == bare(fresh)
        assert template.encoder.encode(fresh)[-len(delta) :] == list(delta)
    last = template.encoder.encode("It is 1.<|im_end|>", previous=played.ids[-1])
    played.turns.append(TurnSpan(len(played.ids), len(played.ids) + len(last), at[-1]))
    played.ids += last
    return played


def bare(text: str) -> str:
    """`text` without the scaffolds of earlier turns. No message contains one."""
    kept = text.removesuffix(SCAFFOLD)
    return kept.replace(SCAFFOLD, "") + text[len(kept) :]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_scaffold_differs_from_the_template_s_render(name: str, *, spaced: bool) -> None:
    template, messages = template_of(name), episode(4)
    with pytest.raises(HistoryRewrittenError):
        play(template_of(name, "fork"), messages, spaced=spaced)
    played = play(template, messages, spaced=spaced)
    assert played.text(scaffolds=True).count(SCAFFOLD) == len(played.turns) == 12
    assert template.verifier.check(played.sequence()) is None
    assert template_of(name, "fork").verifier.check(played.sequence()) == "rewritten"


@pytest.mark.parametrize("name", NAMES)
def test_no_changed_token_outside_the_turns_is_verified(name: str) -> None:
    played = play(template_of(name), episode(2), spaced=False)
    sampled = {at for turn in played.turns for at in range(turn.start, turn.stop)}
    right, verifier = list(played.ids), played.template.verifier
    for at in range(len(right)):
        if at not in sampled:
            played.ids = [*right[:at], right[at] + 1, *right[at + 1 :]]
            assert verifier.check(played.sequence()) is not None, at
    played.ids = right
    count, start = len(played.template.encoder.encode(SCAFFOLD)), played.turns[2].start
    del played.ids[start - count : start]
    played.turns[2:] = [
        TurnSpan(turn.start - count, turn.stop - count, turn.message) for turn in played.turns[2:]
    ]
    assert verifier.check(played.sequence()) is not None, "a removed scaffold"


@pytest.mark.parametrize("name", NAMES)
def test_every_other_rewrite_forks(name: str) -> None:
    """The template also changes the text of earlier answers."""
    old = r"(\'<\|im_start\|>\' \+ message\.role \+ \'\\n\' \+ content)( }})"
    source, count = re.subn(old, r"\1 | replace('It is', 'It was')\2", trl_template(name))
    assert count
    with pytest.raises(HistoryRewrittenError, match="rewrites history"):
        play(template_of(name, source=source), episode(2), spaced=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_verification_finds_every_other_rewrite(name: str) -> None:
    """The template writes another head once there are more than four messages."""
    before, _, after = trl_template(name).partition('{{- "# Tools')
    source = before + '{{- ("!" if messages | length > 4 else "") + "# Tools' + after
    played = play(template_of(name), episode(2), spaced=False)
    other = template_of(name, source=source)
    assert other.prompt(played.messages[:2], TOOLS) == played.ids[: played.turns[0].start]
    assert other.verifier.check(played.sequence()) == "rewritten"


@pytest.mark.parametrize(
    ("written", "scaffold"),
    [
        (SCAFFOLD, SCAFFOLD),
        ("<think></think>", "<think></think>"),
        ("<think>\n", ""),  # the model continues the reasoning
        ("<think>\nNo.\n</think>\n", ""),
        ("Yes. ", ""),
        ("</think>\n", ""),
    ],
)
def test_only_an_empty_element_is_a_scaffold(written: str, scaffold: str) -> None:
    """For the verification too, which would exclude what the deltas keep."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + written + "{% endif %}"
    )
    template = template_of("qwen3", source=source)
    assert template.verifier._reference.scaffold == scaffold
    assert template.parts.deltas.scaffold == scaffold
