"""`HeadCache`: the ids of beginnings that many prompts share (system text and tools), so that a known one is encoded once.

Tokenising the head is nearly the whole cost of a first prompt. Invariants: a head ends where a control token begins, which no BPE
merge crosses; each was compared, when it was learned, with the encoding of a whole prompt; at most `limit` are kept, the least
recently used goes first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from toolroll.rollout.template.encode import Encoder, Span
from toolroll.rollout.types import IdArray

_SHORTEST = 1000  # characters; below that the look-up is not worth it
_REMEMBERED = 8  # prompts that a new one is compared with: the tasks of a batch come interleaved


class HeadCache:
    """Encodes prompts with `encoder`, known beginnings from memory."""

    def __init__(self, encoder: Encoder, *, limit: int = 64) -> None:
        self._encoder = encoder
        self._limit = limit
        self._heads: OrderedDict[tuple[str, tuple[Span, ...]], IdArray] = OrderedDict()
        self._recent: deque[tuple[str, tuple[Span, ...]]] = deque(maxlen=_REMEMBERED)

    def encode(self, text: str, bodies: Sequence[Span] = ()) -> IdArray:
        """As `Encoder.encode`, as int32."""
        spans = tuple(bodies)
        known = max((head for head in self._heads if _begins(text, spans, head)), key=lambda head: len(head[0]), default=None)
        if known is None:
            ids = self._encoder.encode_known(text, spans)
        else:
            self._heads.move_to_end(known)
            ids = np.concatenate([self._heads[known], self._rest(text, spans, known)])
        if known is None or len(text) - len(known[0]) > len(known[0]):
            self._learn(text, spans)
        return ids

    def _rest(self, text: str, spans: tuple[Span, ...], head: tuple[str, tuple[Span, ...]]) -> IdArray:
        cut = len(head[0])
        behind = [(start - cut, stop - cut) for start, stop in spans[len(head[1]) :]]
        return self._encoder.encode_known(text[cut:], behind)

    def _learn(self, text: str, spans: tuple[Span, ...]) -> None:
        """Keep the longest beginning that this prompt shares with a recent one, if it is long."""
        cut = max((self._cut(text, spans, _common(text, other)) for other, _ in self._recent), default=0)
        if all(other != text for other, _ in self._recent):
            self._recent.append((text, spans))
        if cut < _SHORTEST:
            return
        head = (text[:cut], tuple(span for span in spans if span[1] <= cut))
        begun = self._encoder.encode_known(*head)
        if head not in self._heads and np.array_equal(
            np.concatenate([begun, self._rest(text, spans, head)]), self._encoder.encode(text, spans)
        ):
            self._heads[head] = begun
            if len(self._heads) > self._limit:
                self._heads.popitem(last=False)

    def _cut(self, text: str, spans: tuple[Span, ...], common: int) -> int:
        """The last place up to `common` where a control token of the template's own begins; 0 for none."""
        cut = 0
        for match in self._encoder.pattern.finditer(text, 0, common):
            at = match.start()
            inside = any(start < at < stop or (start == at and match.end() <= stop) for start, stop in spans)
            if not inside and not self._encoder.eats_left(match.group()):
                cut = at
        return cut


def _begins(text: str, spans: tuple[Span, ...], head: tuple[str, tuple[Span, ...]]) -> bool:
    """Whether the prompt begins with this head, and has the same bodies in it."""
    begun, inside = head
    if not text.startswith(begun) or spans[: len(inside)] != inside:
        return False
    return len(spans) == len(inside) or spans[len(inside)][0] >= len(begun)


def _common(one: str, other: str) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
