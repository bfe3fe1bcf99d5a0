"""`ShownConversation`: the prompts of one conversation as `transformers` renders them.

Each message is prepared once and each prompt is rendered once, because the prompt after one turn is
also the prompt before the next turn.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from toolroll.rollout.template.reference import ReferenceRender, readable
from toolroll.rollout.types import Message, Tool


@dataclass(frozen=True, slots=True)
class Shown:
    """A render, or a part of one: as it is (`text`) and in its neutral form (`neutral`, see
    `ShownConversation`).
    """

    text: str
    neutral: str

    def pieces(self, control: re.Pattern[str]) -> list[Shown]:
        """Split at the control tokens of the neutral form."""
        pieces, start = [], 0
        for match in control.finditer(self.neutral):
            end = match.start()
            pieces.append(Shown(self.text[start:end], self.neutral[start:end]))
            start = match.end()
        return [*pieces, Shown(self.text[start:], self.neutral[start:])]


class NeutralTextError(Exception):
    """A render has no neutral form (see `ShownConversation`): if control-token text in a message is
    replaced, the rest of the render changes.
    """


class ShownConversation:
    """Renders the prompts of a conversation. Each prompt is a prefix of `messages`, rendered with
    `tools`.

    `control` matches the text of control tokens. In the neutral form of a render, this text is
    replaced in messages and tools with other text of the same length, so that it is no longer read
    as control tokens. First, the letters are replaced. If that changes the rest of the render, the
    punctuation is replaced instead.
    """

    def __init__(
        self,
        reference: ReferenceRender,
        control: re.Pattern[str],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> None:
        self._reference = reference
        self._control = control
        self._messages = [reference.prepared(message) for message in messages]
        self._tools = [readable(tool) for tool in tools]
        self._prompts: dict[tuple[int, frozenset[str]], Shown] = {}
        self._generation_prompt: str | None = None
        self._forms: dict[_Other, tuple[list[Message], list[Tool]]] = {}

    def prompt(self, stop: int, *, assistant: frozenset[str] = frozenset()) -> Shown:
        """Return the prompt after the first `stop` messages.

        `assistant`: the control tokens whose text is replaced in assistant messages too. Raises one
        of `RENDER_ERRORS` if the template refuses the messages, or `NeutralTextError` if the prompt
        has no neutral form.
        """
        key = (stop, assistant)
        if key not in self._prompts:
            self._prompts[key] = self._shown(stop, assistant, generate=True)
        return self._prompts[key]

    def without_prompt(self, stop: int) -> str:
        """Return the render of the first `stop` messages without a generation prompt."""
        return self._reference.render(self._messages[:stop], self._tools or None, generate=False)

    def generation_prompt(self, stop: int) -> str:
        """Return the generation prompt after the first `stop` messages, or "" if there is none."""
        if self._generation_prompt is None:
            text, without = self.prompt(stop).text, self.without_prompt(stop)
            self._generation_prompt = text.removeprefix(without) if text.startswith(without) else ""
        return self._generation_prompt

    def turn_places(self, messages: Sequence[int]) -> Iterator[tuple[int, bool] | None]:
        """Yield, for each of the turns with these messages except the last, where it starts in the
        prompt of the next turn, and whether this prompt lacks scaffolds of the turn's own prompt.
        Yield None if the prompt lacks anything else.
        """
        starts: list[int] = []  # of turns with a scaffold
        for message, following in pairwise(messages):
            before, after = self.prompt(message).text, self.prompt(following).text
            starts.append(len(before))
            bare = not after.startswith(before)
            if bare:
                scaffold = self._reference.scaffold
                if not all(before.endswith(scaffold, 0, start) for start in starts):
                    yield None
                    return
                for start in reversed(starts):
                    before = before[: start - len(scaffold)] + before[start:]
                starts.clear()
            yield (len(before), bare) if after.startswith(before) else None
            self._prompts.pop((message, frozenset()))  # a long episode has hundreds

    def head(self) -> Shown:
        """Return the render of the leading system messages, without a generation prompt."""
        lead = takewhile(lambda message: message["role"] in ("system", "developer"), self._messages)
        return self._shown(len(list(lead)), frozenset(), generate=False)

    def _shown(self, stop: int, assistant: frozenset[str], *, generate: bool) -> Shown:
        render = self._reference.render
        text = render(self._messages[:stop], self._tools or None, generate=generate)
        for other in (_other_letters, _other_marks):
            messages, tools = self._neutral(other)
            messages = messages[:stop]
            if assistant:
                messages = [self._with_assistant(m, other, assistant) for m in messages]
            if messages == self._messages[:stop] and tools == self._tools:
                return Shown(text, text)
            neutral = render(messages, tools or None, generate=generate)
            if _differ_only(text, neutral, other):
                return Shown(text, neutral)
        raise NeutralTextError("control-token text changes the render")

    def _neutral(self, other: _Other) -> tuple[list[Message], list[Tool]]:
        """Return the messages and the tools, with control-token text replaced by `other`, but not
        in assistant messages.
        """
        if other not in self._forms:
            self._forms[other] = (
                [m if _is_assistant(m) else self._changed(m, other) for m in self._messages],
                self._changed(self._tools, other),
            )
        return self._forms[other]

    def _with_assistant(self, message: Message, other: _Other, texts: frozenset[str]) -> Message:
        """Return `message` with the control tokens `texts` replaced by `other` if it is an
        assistant message.
        """
        if not _is_assistant(message):
            return message
        changed: Message = self._changed(
            message, lambda text: other(text) if text in texts else text
        )
        return changed

    def _changed(self, value: Any, other: _Other) -> Any:
        """Return JSON data with control-token text replaced by `other`."""
        if isinstance(value, str):
            return self._control.sub(lambda match: other(match.group()), value)
        if isinstance(value, dict):
            return {
                self._changed(name, other): self._changed(item, other)
                for name, item in value.items()
            }
        return [self._changed(item, other) for item in value] if isinstance(value, list) else value


def _is_assistant(message: Message) -> bool:
    return message.get("role") == "assistant"


_Other = Callable[[str], str]
"""Returns a text of the same length that does not spell a control token."""


def _other_letters(text: str) -> str:
    """Replace letters with others, so that the template's filters treat both texts alike."""
    turned = codecs.encode(text, "rot13")
    return turned if turned != text else _other_marks(text)


def _other_marks(text: str) -> str:
    """Replace punctuation, except quotes, because JSON escapes them."""
    turned = text.translate(_MARKS)
    return turned if turned != text else _UNKNOWN * len(text)


_UNKNOWN = "\u3007"
_MARKS = str.maketrans("<>[]{}|/", "()()()!!")


def _differ_only(text: str, replaced: str, other: _Other) -> bool:
    """Return True if two renders differ only in characters that `other` replaces."""
    if len(text) != len(replaced):
        return False
    pairs = {(a, b) for a, b in zip(text, replaced, strict=True) if a != b}
    return all(b in (other(a), a.translate(_MARKS), _UNKNOWN) for a, b in pairs)


def spelling(match: re.Match[str]) -> tuple[str, int]:
    """Return the text of `match` and its position, as `str.startswith` takes them."""
    return match.group(), match.start()


def blanked(text: str, matches: Sequence[re.Match[str]]) -> str:
    """Return `text` with other text of the same length in place of `matches`."""
    parts, stop = [], 0
    for match in matches:
        parts += [text[stop : match.start()], _UNKNOWN * len(match.group())]
        stop = match.end()
    return "".join([*parts, text[stop:]])
