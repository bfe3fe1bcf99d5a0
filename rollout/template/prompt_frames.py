"""`PromptFrames`: first prompts of known shapes without a render.

Invariants: a frame stands for prompts of the same tools whose messages are of the same kinds; its first use, and a sample of the
later ones, is to be checked by a render; at the first disagreement all are given up for good, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import frames
from toolroll.rollout.template.encode import Span
from toolroll.rollout.template.features import Features, Kind
from toolroll.rollout.types import Message, Tool

logger = logging.getLogger(__name__)

_LIMIT = 256
"""How many shapes are remembered."""


class PromptFrames:
    """`render` gives the text of a whole prompt; `is_due` says whether the nth use of all frames is to be checked."""

    def __init__(
        self, features: Features, render: Callable[[Sequence[Message], Sequence[Tool] | None], str], is_due: Callable[[int], bool]
    ) -> None:
        self._features = features
        self._render = render
        self._is_due = is_due
        self._frames: dict[Kind, frames.Frame | None] = {}
        self._used: set[Kind] = set()
        self._uses = 0
        self._given_up = not features.readable

    def fill(self, messages: Sequence[Message], tools_key: bytes) -> tuple[str, list[Span], bool] | None:
        """The text of a first prompt with the tools of this JSON, where its bodies stand, and whether it is to be checked (a
        frame's first use, and a sample of the others); None where it must be rendered: then tell `saw` the render."""
        key = self._key(messages, tools_key)
        frame = self._frames.get(key) if key is not None else None
        if key is None or frame is None:
            return None
        self._uses += 1
        due = key not in self._used or self._is_due(self._uses)
        self._used.add(key)
        return *frame.fill({}, messages), due

    def saw(self, messages: Sequence[Message], tools: Sequence[Tool] | None, tools_key: bytes, text: str) -> None:
        """Learn from a prompt that was rendered as `text`."""
        key = self._key(messages, tools_key)
        if key is None or key in self._frames:
            return
        if len(self._frames) >= _LIMIT:
            self._frames.clear()
            self._used.clear()
        self._frames[key] = self._learn(messages, tools, text)

    def give_up(self) -> None:
        """A check found one that the template writes otherwise: from here on each prompt is rendered."""
        if not self._given_up:
            logger.error(
                "the chat template writes a first prompt otherwise than one of the same shape before it: of the %d prompts that "
                "were made without a render, those that were not checked may lack what it shows for their texts",
                self._uses,
            )
        self._given_up = True

    def _key(self, messages: Sequence[Message], tools_key: bytes) -> Kind | None:
        """What the frame of a first prompt depends on; None where none may be used."""
        signature = None if self._given_up else frames.signature(self._features, {}, messages)
        return None if signature is None else (tools_key, signature)

    def _learn(self, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str) -> frames.Frame | None:
        try:
            masked = [self._render(frames.with_nonces({}, messages, edge)[1], tools) for edge in frames.EDGES]
        except TemplateError:
            return None
        frame = frames.learn(masked, {}, messages)
        return frame if frame is not None and frame.fill({}, messages)[0] == text else None
