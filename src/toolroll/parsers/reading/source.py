"""`Source`: the text of a reply as it arrives, with the positions of its tokens. The methods that
read it are generators, called readers. A reader yields when it needs more text, and continues when
more text has arrived or the text is closed.

Invariants:

- The result of a reader never depends on where the text was split into pieces.
- If a marker is one control token of the vocabulary, only that token counts as the marker.
- The time is linear in the length of the text, even for small pieces: failed searches are not
  repeated, and waiting searches continue where they stopped.
- No reader keeps a match object across a yield. A match object refers to the text, so each new
  piece would copy the whole text (see `Source.feed`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.types import Span

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader. It yields None to wait for more text, and returns a T."""
Put = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Source:
    """A growing text. `control`: the control tokens of the vocabulary, as texts. `offered`: the
    tools that were offered for the reply, or None if they are unknown.
    """

    def __init__(self, control: Collection[str] = (), offered: Offered | None = None) -> None:
        self.text = ""
        self.offered = offered
        self.closed = False
        self._control = control
        self._starts: list[int] | None = None
        self._stops: list[int] = []
        self._absent: dict[object, int] = {}
        self._closed: dict[object, tuple[int, int, int]] = {}
        self._groups: dict[object, tuple[int, int, str]] = {}

    def feed(self, text: str, offsets: Sequence[Span] | None) -> None:
        """Append `text`. `offsets`: for each token of `text`, its character range `[start, stop)`
        in `text`.
        """
        base = len(self.text)
        if offsets is not None:
            if self._starts is None:
                if base:
                    raise ValueError(
                        "offsets are given for a later piece of the text but not for the first: "
                        "give them for all"
                    )
                self._starts = []
            starts, stops = zip(*offsets, strict=True) if offsets else ((), ())
            self._starts += [base + start for start in starts] if base else starts
            self._stops += [base + stop for stop in stops] if base else stops
        elif text and self._starts is not None:
            raise ValueError(
                "offsets are missing for this piece of the text: give them for all pieces or for "
                "none"
            )
        # CPython extends a string in place only if a local variable holds its only reference.
        # Otherwise each piece would copy the whole text.
        joined = self.text
        self.text = ""
        joined += text
        self.text = joined

    def exact(self, marker: str) -> bool:
        """Return True if only the control token counts as `marker`, and ordinary text does not."""
        return self._starts is not None and marker in self._control

    def is_control_token(self, marker: str, pos: int) -> bool:
        """Return True if the text of `marker` at `pos` is a real marker.

        If the tokens are known and `marker` is a control token, the text must be this token.
        Otherwise the text is enough.
        """
        if self._starts is None or marker not in self._control:
            return True
        first, last = bisect_left(self._starts, pos), bisect_right(self._starts, pos)
        return pos + len(marker) in self._stops[first:last]

    def tokens(self, span: Span) -> Span | None:
        """Return the range of tokens that covers the characters of `span`. Return None if the
        offsets of the tokens are unknown, or if no token covers the span.
        """
        if self._starts is None:
            return None
        first, last = bisect_right(self._stops, span[0]), bisect_left(self._starts, span[1])
        return (first, last) if first < last else None

    def is_absent(self, key: object, start: int) -> bool:
        """Return True if an earlier search has shown that `key` does not occur at or after `start`.

        That search began at or before `start`, and reached the end of the finished text without a
        match.
        """
        return self._absent.get(key, len(self.text) + 1) <= start

    def set_absent(self, key: object, start: int) -> None:
        """Record that a search for `key` from `start` found nothing in the finished text."""
        self._absent[key] = min(start, self._absent.get(key, start))

    def until(
        self, start: int, markers: tuple[str, ...], add_text: Put | None = None
    ) -> Steps[tuple[int, str]]:
        """Return the position and the text of the next of `markers` at or after `start`. If there
        is none, return the end of the text and "".

        `add_text` is called with the text before the marker as soon as this text is certain.
        """
        if self.is_absent(markers, start):
            return self._ended(start, add_text)
        pattern, longest, firsts = _compiled(markers)
        pos = start
        while True:
            match = pattern.search(self.text, pos)
            while match is not None and not self.is_control_token(match.group(), match.start()):
                match = pattern.search(self.text, match.start() + 1)
            # The match may be the start of a longer marker whose end has not arrived. The match
            # counts only if more text cannot turn it into that longer marker.
            certain = (
                len(self.text) if self.closed else self._certain(pos, markers, longest, firsts)
            )
            if match is not None and match.start() < certain:
                if add_text is not None and match.start() > start:
                    add_text(self.text[start : match.start()])
                return match.start(), match.group()
            if self.closed:
                self.set_absent(markers, start)
                return self._ended(start, add_text)
            pos, match = certain, None
            if add_text is not None and pos > start:
                add_text(self.text[start:pos])
                start = pos
            yield

    def _ended(self, start: int, add_text: Put | None) -> tuple[int, str]:
        if add_text is not None and start < len(self.text):
            add_text(self.text[start:])
        return len(self.text), ""

    def _certain(
        self, pos: int, markers: tuple[str, ...], longest: int, firsts: frozenset[str]
    ) -> int:
        """Return the start of an incomplete marker at the end of the text. If there is none, return
        the end of the text.
        """
        first = max(pos, len(self.text) - longest + 1)
        end = self.text[first:]
        for index, char in enumerate(end):
            if char in firsts and any(
                len(end) - index < len(marker) and marker.startswith(end[index:])
                for marker in markers
            ):
                return first + index
        return len(self.text)

    def starts(self, pos: int, *prefixes: str, spelled: bool = False) -> Steps[str]:
        """Return the longest of `prefixes` with which the text at `pos` starts, or "".

        `spelled`: also accept a prefix that is ordinary text and not a control token.
        """
        while True:
            text = self.text[pos : pos + max(map(len, prefixes))]
            fit = [
                prefix
                for prefix in prefixes
                if text.startswith(prefix) and (spelled or self.is_control_token(prefix, pos))
            ]
            open_ones = [
                prefix for prefix in prefixes if len(prefix) > len(text) and prefix.startswith(text)
            ]
            if self.closed or not open_ones:
                return max(fit, key=len, default="")
            yield

    def skip(self, pos: int) -> Steps[int]:
        """Return the position of the first character at or after `pos` that is not white space. If
        there is none, return the end of the text.
        """
        if pos < len(self.text) and not self.text[pos].isspace():
            return pos  # the common case, and cheaper than a match
        return (yield from self.run(pos, _SPACE))

    def run(self, pos: int, pattern: re.Pattern[str]) -> Steps[int]:
        """Return the end of the match of `pattern` at `pos`. The pattern must be a repeated
        character class (`[...]*`).
        """
        while True:
            pos = pattern.match(self.text, pos).end()  # type: ignore[union-attr]
            if pos < len(self.text) or self.closed:
                return pos
            yield

    def char(self, pos: int) -> Steps[str]:
        """Return the character at `pos`, or "" after the end."""
        while pos >= len(self.text) and not self.closed:
            yield
        return self.text[pos : pos + 1]

    def closing(
        self, start: int, close: str, followers: tuple[str, ...], stops: tuple[str, ...] = ()
    ) -> Steps[Span]:
        """Return the position of the first `close` that is followed by one of `followers`, after
        optional white space, and the end of the last `close` before it that is not (`start` if
        there is none). Return (-1, -1) if there is none before the next of `stops`.

        The follower is required because a value may contain the format's own tags. If `close` is
        recognized by its control token, no follower is required.
        """
        key = (close, followers, stops)
        if self.is_absent(key, start):
            return -1, -1
        first, end, after_false_close = self._closed.get(key, (0, -1, 0))
        if first <= start <= end:  # an earlier search has been here
            return end, max(start, after_false_close)
        pos = after_false_close = start
        while True:
            pos, marker = yield from self.until(pos, (close, *stops))
            if marker != close:
                if not marker:
                    self.set_absent(key, start)
                return -1, -1
            following = yield from self.skip(pos + len(close))
            if self.exact(close) or (yield from self.starts(following, *followers)):
                self._closed[key] = start, pos, after_false_close
                return pos, after_false_close
            pos = after_false_close = pos + len(close)

    def group_between(self, pattern: re.Pattern[str], marker: str, start: int, stop: int) -> str:
        """Return the group of the first match of `pattern` in the text from `start` to `stop`, or
        "". The match starts with `marker`, which must be real (see `is_control_token`).
        """
        first, end, group = self._groups.get((pattern, stop), (0, -1, ""))
        if first <= start <= end:  # an earlier search has been here
            return group
        match = pattern.search(self.text, start, stop)
        while match is not None and not self.is_control_token(marker, match.start()):
            match = pattern.search(self.text, match.end(), stop)
        end, group = (stop, "") if match is None else (match.start(), match[1])
        self._groups[pattern, stop] = start, end, group
        return group

    def rest(self) -> Steps[int]:
        """Wait until the text ends. Return the position of its end."""
        while not self.closed:
            yield
        return len(self.text)


@lru_cache(maxsize=512)
def _compiled(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int, frozenset[str]]:
    """Return a pattern for any of `markers` (the longest first), their maximum length, and the set
    of their first characters.
    """
    ordered = sorted(markers, key=len, reverse=True)
    firsts = frozenset(marker[:1] for marker in markers)
    return re.compile("|".join(map(re.escape, ordered))), len(ordered[0]), firsts
