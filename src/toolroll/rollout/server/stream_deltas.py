"""A reply as a stream of deltas, made from the ids as they are sampled.

Invariants: what was sent is never taken back: whatever may turn out to be a marker, a stop string,
white space at an edge or half a character is held until it is decided; together the deltas are the
message of the finished reply. Calls come whole, one by one, each as soon as it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.openai import to_openai
from toolroll.rollout.model.call_ids import with_call_ids
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.server.tool_choice import CLOSERS
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Tool

Delta = dict[str, Any]

_THINK, _UNTHINK = "<think>", "</think>"
_OPENERS = {"hermes": "<tool_call>"}


class GrowingText:
    """Text of growing ids, half characters held back; each id is decoded a bounded number of
    times.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.ids: list[int] = []
        self.text = ""
        self._from = self._read = 0

    def grow(self, ids: Sequence[int]) -> None:
        """The ids are `ids` now, which begin with those from before."""
        self.ids = list(ids)
        known = self._encoder.decode(self.ids[self._from : self._read])
        now = self._encoder.decode(self.ids[self._from :])
        if len(now) > len(known) and not now.endswith("\ufffd"):
            self.text += now[len(known) :]
            self._from, self._read = self._read, len(self.ids)


class ChoiceDeltas:
    """The deltas of one choice. `tools` None: none were offered, all text is text. `place` seeds
    the ids of calls, as in the finished reply."""

    def __init__(
        self,
        template: ChatTemplate,
        parser: ToolCallParser,
        tools: Sequence[Tool] | None,
        place: str,
        stop_strings: Sequence[str],
    ) -> None:
        self._template = template
        self._parser = parser
        self._tools = tools
        self._place = place
        self._stops = tuple(stop_strings)
        self._opener = _OPENERS.get(parser.name)
        self._closer = CLOSERS.get(parser.name) if self._opener else None
        self._growing = GrowingText(template.encoder)
        self._closed = 0
        self._reasoning = ""
        self._content = ""
        self._calls = 0

    # --- while it grows ---------------------------------------------------------------------------

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What can be told once `ids` (all of them so far) are sampled."""
        if ids and ids[-1] in self._template.stop_token_ids:
            ids = ids[:-1]
        if len(ids) <= len(self._growing.ids):
            return []
        self._growing.grow(ids)
        text = self._growing.text
        for stop in self._stops:
            text = text.partition(stop)[0]
        deltas: list[Delta] = []
        begin = self._feed_reasoning(text, deltas)
        if begin is not None:
            self._feed_content(text, begin, deltas)
            self._feed_calls(text, deltas)
        return deltas

    def _feed_reasoning(self, text: str, deltas: list[Delta]) -> int | None:
        """Where the text behind the reasoning begins, None while that is not known."""
        lead = len(text) - len(text.lstrip())
        start = lead + len(_THINK) if text.startswith(_THINK, lead) else 0
        if not start and not self._template.opens_reasoning:
            return None if _THINK.startswith(text[lead:]) else 0
        end = text.find(_UNTHINK, start)
        body = text[start : end if end >= 0 else self._safe(text, (_UNTHINK,))].strip("\n")
        self._tell("reasoning_content", body, deltas)
        return end + len(_UNTHINK) if end >= 0 else None

    def _feed_content(self, text: str, begin: int, deltas: list[Delta]) -> None:
        if self._tools is not None and self._opener is None:
            return  # a format whose markers are not known here: the content comes at the end
        markers = (self._opener,) if self._tools is not None and self._opener else ()
        found = text.find(markers[0], begin) if markers else -1
        stop = found if found >= 0 else self._safe(text, (*markers, *self._stops))
        self._tell("content", text[begin:stop].strip(), deltas)

    def _feed_calls(self, text: str, deltas: list[Delta]) -> None:
        if self._tools is None or self._closer is None or text.count(self._closer) <= self._closed:
            return
        self._closed = text.count(self._closer)
        stop = text.rfind(self._closer) + len(self._closer)
        offsets = self._template.encoder.offsets(self._growing.ids, self._growing.text)
        parsed = self._parser.parse(
            text[:stop],
            ids=self._growing.ids,
            offsets=offsets,
            tools=self._tools,
            in_reasoning=self._template.opens_reasoning or None,
        )
        if all(call.span is not None and call.span[1] <= stop for call in parsed.tool_calls):
            self._tell_calls(
                to_openai(with_call_ids(parsed, self._place)).get("tool_calls") or [], deltas
            )

    def _safe(self, text: str, markers: Sequence[str]) -> int:
        """Up to where `text` cannot become the beginning of a marker."""
        longest = 0
        for marker in markers:
            length = next(
                (
                    n
                    for n in range(min(len(marker) - 1, len(text)), 0, -1)
                    if text.endswith(marker[:n])
                ),
                0,
            )
            longest = max(longest, length)
        return len(text) - longest

    # --- at the end -------------------------------------------------------------------------------

    def finish(self, reading: ParsedTurn) -> list[Delta]:
        """What is left of the finished reply."""
        deltas: list[Delta] = []
        self._tell("reasoning_content", reading.message.get("reasoning_content") or "", deltas)
        self._tell("content", reading.message.get("content") or "", deltas)
        self._tell_calls(reading.message.get("tool_calls") or [], deltas)
        return deltas

    # --- telling ----------------------------------------------------------------------------------

    def _tell(self, name: str, text: str, deltas: list[Delta]) -> None:
        told = self._reasoning if name == "reasoning_content" else self._content
        if len(text) <= len(told) or not text.startswith(told):
            return
        deltas.append({name: text[len(told) :]})
        if name == "reasoning_content":
            self._reasoning = text
        else:
            self._content = text

    def _tell_calls(self, calls: Sequence[dict[str, Any]], deltas: list[Delta]) -> None:
        for index, call in enumerate(calls[self._calls :], start=self._calls):
            function = call["function"]
            opened = {"name": function["name"], "arguments": ""}
            deltas.append(
                {
                    "tool_calls": [
                        {"index": index, "id": call["id"], "type": "function", "function": opened}
                    ]
                }
            )
            deltas.append(
                {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}
            )
        self._calls = max(self._calls, len(calls))
