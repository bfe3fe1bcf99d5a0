"""Separate reasoning in tags (`<think>` and similar) from the rest of the reply.

Invariants: a tag opens reasoning only at the start of the reply. Reasoning that is never closed
ends where a tool call starts, so it does not hide the call. A tag inside a readable call does not
close reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.source import Source, Steps


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that reasoning may contain. `openers`: the markers that start a call. `skip`
    returns the position after the readable calls of an opener, given its start and its end. If they
    cannot be read, it returns the end of the opener.
    """

    openers: tuple[str, ...]
    skip: Callable[[int, int], Steps[int]]


@dataclass(frozen=True)
class Tags:
    """Reasoning between `open` and `close`.

    `implied` matters only if it is unknown whether the prompt opened the reasoning. If `implied` is
    True, the text before a `close` without an `open` is then reasoning. `others`: further pairs of
    tags, for example for different reasoning efforts.
    """

    open: str
    close: str
    implied: bool = True
    others: tuple[tuple[str, str], ...] = ()

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """All tags that open or close reasoning."""
        return (*self.openers, *self.closers)

    @cached_property
    def openers(self) -> tuple[str, ...]:
        """All tags that open reasoning."""
        return (self.open, *(first for first, _ in self.others))

    @cached_property
    def closers(self) -> tuple[str, ...]:
        """All tags that close reasoning."""
        return (self.close, *(close for _, close in self.others))

    def unclosed(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Return the position `[begin, end)` of the last tag in `text[start:]` if it opens
        reasoning, or None.
        """
        begin, tag = max((text.rfind(tag, start), tag) for tag in self.openers)
        if begin < 0 or any(text.find(close, begin) >= 0 for close in self.closers):
            return None
        return begin, begin + len(tag)

    def read(
        self, source: Source, out: Collector, calls: Calls, *, in_reasoning: bool | None
    ) -> Steps[int]:
        """Read the reasoning at the start of the reply. Return the position after it.

        `in_reasoning`: True if the prompt opened the reasoning, False if it did not, None if this
        is unknown.
        """
        lead = yield from source.skip(0)
        closes = self.closers
        opened = yield from source.starts(lead, *self.openers)
        if opened:
            start = lead + len(opened)
        elif in_reasoning:
            start = 0
        elif in_reasoning is None and self.implied:
            _, marker = yield from source.until(0, (*self.markers, *calls.openers))
            if marker not in closes:
                return 0
            start = 0
        else:
            return 0
        ends = (*closes, *calls.openers)
        pos, marker = yield from source.until(start, ends, out.reasoning)
        first = pos
        while marker and marker not in closes:
            stop = yield from calls.skip(pos, pos + len(marker))
            pos, marker = yield from source.until(stop, ends)
        if first < pos and not marker:
            return first
        out.reasoning(source.text[first:pos])
        if not marker:
            out.reasoning_closed = False
        return pos + len(marker)


THINK = Tags("<think>", "</think>")
SAID = replace(THINK, implied=False)
"""The tags for formats whose calls start without a marker. A lone `</think>` may then be text
inside a call, so the text before it does not count as reasoning.
"""

_IFM = tuple((f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think_fast", "think_faster"))
_BY_NAME: dict[str, Tags] = {
    **dict.fromkeys(
        "deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 glm45 kimi_k2 qwen3 qwen3-thinking "
        "minimax minimax-append-think "
        "nanbeige step3 step3p5 nemotron_3 granite_thinking_parser interns1 gigachat35 mimo dots "
        "poolside_v1 ling3 "
        "iquest_q1 hunyuan".split(),
        THINK,
    ),
    "k2_horizon": Tags("<ifm|think>", "</ifm|think>", others=_IFM),
    "kimi_k3": Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "kimi": Tags("◁think▷", "◁/think▷"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    # Gemma 4 sometimes writes its opening token twice.
    "gemma4": Tags(
        "<|channel>thought", "<channel|>", others=(("<|channel><|channel>thought", "<channel|>"),)
    ),
    "cohere_command4": Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    "minimax-m3": Tags("<mm:think>", "</mm:think>"),
    "apertus2509": Tags("<|inner_prefix|>", "<|inner_suffix|>"),
}

_PAIRS = {pair for tags in _BY_NAME.values() for pair in ((tags.open, tags.close), *tags.others)}
ANY_TAGS = replace(THINK, others=tuple(sorted(_PAIRS)))
"""The tags of all formats."""


def reasoning_names() -> tuple[str, ...]:
    """Return the names of reasoning formats, as in SGLang's `--reasoning-parser`.

    The reasoning formats of gpt-oss, beam, inkling and muse are part of their tool-call parsers.
    """
    return tuple(sorted(_BY_NAME))


def get_reasoning(name: str) -> Tags:
    """Return the reasoning format with this name. Raises `ValueError` if the name is unknown."""
    if name not in _BY_NAME:
        raise ValueError(
            f"there is no reasoning format named {name!r}; there are {', '.join(reasoning_names())}"
        )
    return _BY_NAME[name]
