"""`ShownConversation`: the prompts of one conversation as `transformers` renders them.

Each message is prepared once, and each prompt is rendered once: a check asks for the prompt before a
turn after it asked for the one after the previous turn.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from toolroll.rollout.template.reference import ReferenceRender, readable
from toolroll.rollout.types import Message, Tool


@dataclass(frozen=True, slots=True)
class Shown:
    """A render, or a part of one, and the same with neutral bodies."""

    text: str
    neutral: str


class NeutralTextError(Exception):
    """The render depends on control-token text in a body: no neutral form has the same length."""


class ShownConversation:
    """Renders the beginnings of `messages` with `tools`.

    `control` matches the text of control tokens. In the neutral form, other text of the same length
    stands for it.
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
        self._prompts: dict[tuple[int, bool], Shown] = {}

    def prompt(self, stop: int, *, assistant: bool = False) -> Shown:
        """Return the prompt after `stop` messages.

        `assistant`: make control-token text in messages of the assistant neutral as well. Raise one of
        `RENDER_ERRORS`, or `NeutralTextError`.
        """
        key = (stop, assistant)
        if key not in self._prompts:
            self._prompts[key] = self._prompt(stop, assistant=assistant)
        return self._prompts[key]

    def without_prompt(self, stop: int) -> str:
        """Return the render of `stop` messages without a generation prompt."""
        return self._reference.render(self._messages[:stop], self._tools or None, generate=False)

    def head(self) -> str:
        """Return the render of the leading system messages, without a generation prompt."""
        lead = takewhile(lambda message: message["role"] in ("system", "developer"), self._messages)
        return self._reference.render(list(lead), self._tools or None, generate=False)

    def _prompt(self, stop: int, *, assistant: bool) -> Shown:
        messages, tools = self._messages[:stop], self._tools
        text = self._reference.render(messages, tools or None)
        others = (self._all_neutral if assistant else self._neutral)[:stop]
        neutral_tools = self._neutral_tools
        if others == messages and neutral_tools == tools:
            return Shown(text, text)
        shown = self._reference.render(others, neutral_tools or None)
        if len(shown) != len(text):
            raise NeutralTextError("control-token text changes the render")
        return Shown(text, shown)

    @cached_property
    def _all_neutral(self) -> list[Message]:
        return [self._made_neutral(message) for message in self._messages]

    @cached_property
    def _neutral(self) -> list[Message]:
        return [message if message.get("role") == "assistant" else self._made_neutral(message) for message in self._messages]

    @cached_property
    def _neutral_tools(self) -> list[Tool]:
        return [self._made_neutral(tool) for tool in self._tools]

    def _made_neutral(self, value: Any) -> Any:
        """Return JSON data in which control-token text is other text of the same length."""
        if isinstance(value, str):
            return self._control.sub(_other_text, value)
        if isinstance(value, Mapping):
            return {self._made_neutral(name): self._made_neutral(item) for name, item in value.items()}
        return [self._made_neutral(item) for item in value] if isinstance(value, list) else value


def _other_text(match: re.Match[str]) -> str:
    """Return text of the same length, with letters for letters, so that filters treat it alike."""
    text = match.group()
    turned = codecs.encode(text, "rot13")
    return turned if turned != text else "\u3007" * len(text)
