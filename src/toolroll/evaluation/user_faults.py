"""`user_faults`: mistakes of a simulated user that are certain from the messages of an episode.

The rules are few, because a wrong alarm excuses the model: mistakes that only a reader can see are
for a judge (`toolroll blame --judge-model`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolroll.evaluation.export.messages import text_of
from toolroll.rollout.types import InteractionResult, Message

_MARKER = re.compile(r"###(?:STOP|TRANSFER|OUT-OF-SCOPE)###")
_WORD = re.compile(r"\w+(?:'\w+)?")
_QUOTE = re.compile(r"\"[^\"]*\"|“[^”]*”|(?<!\w)'(?:[^']|(?<=\w)'(?=\w))*'(?!\w)")
_LEAKED_WORDS = 8
_OUT_OF_ROLE = re.compile(
    r"\b(?:user simulat(?:or|ion)|simulated (?:user|customer)|as an ai\b|ai language model)"
    r"|^[^\w\n]{0,8}(?:thought|user response|reflection):|</?think>",
    re.IGNORECASE | re.MULTILINE,
)
_QUESTION = re.compile(
    r"would you like me to|do you want me to|shall i\b|should i\b|confirm|proceed", re.IGNORECASE
)
_END = 300
_AGREES = re.compile(
    r"\W*(?:yes|yeah|yep|sure|please do|go ahead|confirmed|i confirm)\b"
    r"(?!.*that(?:'?s| is) (?:all|it|everything))",
    re.IGNORECASE | re.DOTALL,
)
_EMAIL = r"\b[\w.+-]{1,64}@[\w-]{1,63}\.\w+"  # bounded, so that the search is linear
_DENIED = r"\b(?:do not|don'?t|can'?t|cannot)(?: \w+)? (?:have|know|remember|recall) (?:my|an?) "
_FACTS = {
    "user ID": (r"user ?(?:id|name)\b", r"\b[a-z]+_[a-z]+_\d+\b"),
    "email address": (r"e-?mail(?: address)?\b(?! con)", _EMAIL),
    "zip code": (r"(?:zip|postal) code\b", r"(?:zip|postal) code\D{0,20}?(\d{4,})"),
}
"""What a user may say not to know: its name, and where the instruction states it."""
_IDENTIFIER = re.compile(_EMAIL + r"|\b[a-z]+_[a-z]+_\d{3,}\b|#W\d{5,}\b")
_REPEATED_WORDS, _REPEATED, _ECHO_WORDS = 5, 3, 8


@dataclass(frozen=True, slots=True)
class UserFault:
    """A mistake of the simulated user. `kind`: a key of `RULES`, or "judge". `position`: that of
    the line in the episode's messages, or None for a judge's verdict on all lines. `why`: what is
    wrong.
    """

    kind: str
    position: int | None
    why: str


class _Line(NamedTuple):
    """A line of the user. `agent`: the message of the agent that it answers, or ""."""

    position: int
    text: str
    agent: str


Mistakes = Iterator[tuple[int, str]]


def user_faults(result: InteractionResult) -> list[UserFault]:
    """Return the faults of the simulated user of an episode, at most one of each kind.

    Without a simulated user (no `user_calls` in the metrics) there are none. The instruction is in
    `info`, as `instruction` or, as tau-bench writes it, in `task`.
    """
    if "user_calls" not in result.metrics:
        return []
    lines = list(_lines(result.messages))
    instruction, rules = instruction_of(result.info), dict(RULES)
    if result.metrics.get("user_tool_calls"):
        rules.pop("invented")  # its tools may have told it
    firsts = {kind: next(rule(lines, instruction), None) for kind, rule in rules.items()}
    return [UserFault(kind, *first) for kind, first in firsts.items() if first is not None]


def _lines(messages: Sequence[Message]) -> Iterator[_Line]:
    """Yield the lines of the user. A message that answers an empty reply, or that is an error, is
    the loop's own. Content without text, such as an image, is skipped.
    """
    agent: str | None = None
    for position, message in enumerate(messages):
        content = message.get("content")
        text = text_of(content).replace("’", "'")
        skipped = text.startswith("Error: ") or (content and not text)
        if message.get("role") == "assistant":
            agent = text
        elif message.get("role") == "user" and agent != "" and not skipped:
            yield _Line(position, text, agent or "")


def instruction_of(info: Mapping[str, Any]) -> str:
    """Return the simulated user's instruction in the `info` of an episode, or "" if it has none."""
    task = info.get("task")
    inner = task.get("instruction") if isinstance(task, Mapping) else None
    instruction = info.get("instruction", inner)
    return instruction.replace("’", "'") if isinstance(instruction, str) else ""


def _leak(lines: Sequence[_Line], instruction: str) -> Mistakes:
    # What is in quotation marks is for the user to say.
    orders = {
        run for run in _runs(_QUOTE.sub(" ", instruction)) if not {"you", "your"}.isdisjoint(run)
    }
    for line in lines:
        if slip := _OUT_OF_ROLE.search(line.text):
            yield line.position, f"it steps out of its part: {slip[0].strip()!r}"
        if leaked := orders & _runs(line.text):
            yield line.position, f"it repeats its instruction: {' '.join(min(leaked))!r}"


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return set(zip(*(words[start:] for start in range(_LEAKED_WORDS)), strict=False))


def _early_stop(lines: Sequence[_Line], instruction: str) -> Mistakes:
    for line in lines:
        if not _MARKER.search(line.text):
            continue
        if not line.agent:
            yield line.position, "it ends the conversation in its first line"
        if _QUESTION.search(line.agent[-_END:]) and _AGREES.match(line.text):
            yield line.position, "it agrees, and ends the conversation before the agent can act"


def _contradiction(lines: Sequence[_Line], instruction: str) -> Mistakes:
    talk = "\n".join(line.text for line in lines).casefold()
    for name, (word, stated) in _FACTS.items():
        denied = re.compile(_DENIED + word, re.IGNORECASE)
        fact = re.search(stated, instruction)
        if not fact or denied.search(instruction) or fact[fact.lastindex or 0].casefold() in talk:
            continue
        for line in lines:
            if denied.search(line.text):
                yield line.position, f"it does not know its {name}, which its instruction states"


def _invented(lines: Sequence[_Line], instruction: str) -> Mistakes:
    shown = instruction.casefold()
    for line in lines:
        shown += f"\n{line.agent}".casefold()
        for identifier in _IDENTIFIER.findall(line.text):
            if instruction and identifier.casefold() not in shown:
                yield line.position, f"it invents {identifier!r}"


def _repeats(lines: Sequence[_Line], instruction: str) -> Mistakes:
    said: list[list[str]] = []
    heard: list[list[str]] = []
    for line in lines:
        words = _WORD.findall(line.text.casefold())
        heard.append(_WORD.findall(line.agent.casefold()))
        said.append(words)
        if not words:
            yield line.position, f"it says nothing: {line.text!r}"
        if len(words) >= _REPEATED_WORDS and said.count(words) >= _REPEATED:
            yield line.position, f"it says the same for the {_REPEATED}rd time"
        if len(words) >= _ECHO_WORDS and words in heard:
            yield line.position, "it repeats what the agent wrote"


RULES: Mapping[str, Callable[[Sequence[_Line], str], Mistakes]] = {
    "leak": _leak,
    "early_stop": _early_stop,
    "contradiction": _contradiction,
    "invented": _invented,
    "repeats": _repeats,
}
"""Each rule yields the position of a line, and what is wrong with it."""
