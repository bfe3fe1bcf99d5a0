"""`TokenTree`: the tokens of a session, each held once, with who sampled them.

Invariants: nodes are only ever added, behind any node that is there, and hold only the tokens they
add; a live episode is a handful of arrays, not objects: the garbage collector visits every object
that can refer to another, and all that those refer to. So a node is a row of numbers, and what the
engine said beside its tokens is one flat tuple of atoms, which the collector leaves alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toolroll.rollout.session.growable_array import GrowableArray
from toolroll.rollout.types import Completion, IdArray, LogprobArray, Turn, WeightVersion

NONE = -1
"""In place of a row or a place that is not there."""
_PARENT, _START, _LENGTH, _IDS, _SAID, _LOGPROBS, _CHILDREN = range(7)
_WIDTH = 7


class TokenTree:
    """Empty at first. Its nodes are numbered from 0 in the order in which they were added.

    `ids` are the tokens of all nodes in that order. `excluded`, `fork_reasons` and `routed_experts`
    are by node, where there is one.
    """

    __slots__ = (
        "_logprobs",
        "_params",
        "_rows",
        "_said",
        "excluded",
        "fork_reasons",
        "ids",
        "routed_experts",
    )

    def __init__(self) -> None:
        self.ids = GrowableArray(np.intc)
        self.excluded: dict[int, str] = {}
        self.fork_reasons: dict[int, str] = {}
        self.routed_experts: dict[int, Any] = {}
        # _WIDTH numbers a node: parent, first place in the path, tokens, where ids, `said`,
        # logprobs are
        self._rows = array("i")
        self._logprobs = GrowableArray(np.float32)
        self._said: list[tuple[Any, ...]] = []
        self._params: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows) // _WIDTH

    # --- writing ----------------------------------------------------------------------------------

    def add(self, parent: int, ids: IdArray) -> int:
        """A node of observed tokens behind `parent` (`NONE`: a root)."""
        return self._add(parent, ids, NONE, NONE)

    def add_sampled(
        self, parent: int, ids: IdArray, completion: Completion, sampling_params: Mapping[str, Any]
    ) -> int:
        """A node of sampled tokens behind `parent`: the ids of `completion`, and what the engine
        said beside them; its `text` is not kept, since the ids are the record. `sampling_params`
        are kept as they are: nobody may change them behind."""
        said, logprobs = len(self._said), NONE
        if completion.logprobs is not None:
            logprobs = len(self._logprobs)
            self._logprobs.append(completion.logprobs)
        self._said.append(_packed(completion))
        self._params.append(sampling_params)
        node = self._add(parent, ids, said, logprobs)
        if completion.routed_experts is not None:
            # the experts of a later turn hold those of the turns before it
            for before in self.upwards(parent):
                self.routed_experts.pop(before, None)
            self.routed_experts[node] = completion.routed_experts
        return node

    def _add(self, parent: int, ids: IdArray, said: int, logprobs: int) -> int:
        node, first = len(self), len(self.ids)
        self.ids.append(ids)  # before the row, so that what cannot be kept leaves no node
        self._rows.extend(
            (
                parent,
                self.stop(parent) if parent != NONE else 0,
                len(self.ids) - first,
                first,
                said,
                logprobs,
                0,
            )
        )
        if parent != NONE:
            self._rows[parent * _WIDTH + _CHILDREN] += 1
        return node

    # --- reading ----------------------------------------------------------------------------------

    def parent(self, node: int) -> int:
        """The node that it stands behind; `NONE` for a root."""
        return self._rows[node * _WIDTH + _PARENT]

    def start(self, node: int) -> int:
        """The place of its first token in every path that holds it."""
        return self._rows[node * _WIDTH + _START]

    def stop(self, node: int) -> int:
        """The index just past its last token."""
        at = node * _WIDTH
        return self._rows[at + _START] + self._rows[at + _LENGTH]

    def children(self, node: int) -> int:
        """How many nodes stand directly behind it."""
        return self._rows[node * _WIDTH + _CHILDREN]

    def ids_of(self, node: int) -> IdArray:
        """Its tokens: a view that refuses to be written."""
        at = node * _WIDTH
        first = self._rows[at + _IDS]
        return self.ids.view(first, first + self._rows[at + _LENGTH])

    def logprobs_of(self, node: int) -> LogprobArray | None:
        """Their logprobs: a view that refuses to be written; None where there are none."""
        at = node * _WIDTH
        first = self._rows[at + _LOGPROBS]
        return (
            None if first == NONE else self._logprobs.view(first, first + self._rows[at + _LENGTH])
        )

    def completed(self, node: int) -> bool:
        """Whether it is what the engine answered."""
        return self._rows[node * _WIDTH + _SAID] != NONE

    def sampled(self, node: int) -> bool:
        """Whether the engine sampled tokens here (an abort in its queue samples none)."""
        return self.completed(node) and self._rows[node * _WIDTH + _LENGTH] > 0

    def sampling_params(self, node: int) -> Mapping[str, Any]:
        """Those that it was sampled with; none where its tokens were observed."""
        at = self._rows[node * _WIDTH + _SAID]
        return {} if at == NONE else self._params[at]

    def completion(self, node: int) -> Completion | None:
        """What the engine said, without its `text`; None where its tokens were observed."""
        at = self._rows[node * _WIDTH + _SAID]
        if at == NONE:
            return None
        finish_reason, matched, prompt_tokens, cached_tokens, latency, attempts, rid, *spans = (
            self._said[at]
        )
        return Completion(
            output_ids=self.ids_of(node),
            logprobs=self.logprobs_of(node),
            finish_reason=finish_reason,
            matched=matched,
            weight_versions=_versions(spans, 0),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            latency=latency,
            attempts=attempts,
            rid=rid,
            routed_experts=self.routed_experts.get(node),
        )

    def turn(self, node: int, *, excluded: str | None) -> Turn:
        """A sampled node as a turn of the sequences that hold it."""
        start, at = self.start(node), self._rows[node * _WIDTH + _SAID]
        finish_reason, matched, prompt_tokens, cached_tokens, latency, _, _, *spans = self._said[at]
        return Turn(
            start=start,
            stop=self.stop(node),
            finish_reason=finish_reason,
            matched=matched,
            weight_versions=_versions(spans, start),
            sampling_params=self._params[at],
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            latency=latency,
            excluded=excluded,
        )

    def upwards(self, node: int) -> Iterator[int]:
        """From `node` to its root; nothing for `NONE`."""
        while node != NONE:
            yield node
            node = self.parent(node)

    def path(self, node: int) -> list[int]:
        """From its root to `node`; empty for `NONE`."""
        return list(self.upwards(node))[::-1]

    def ids_along(self, path: list[int]) -> IdArray:
        """The tokens of nodes that follow each other in a path, as an array of its own: what was
        added together is copied together.
        """
        pieces: list[IdArray] = []
        first = stop = 0
        for node in path:
            at = node * _WIDTH
            begin = self._rows[at + _IDS]
            if begin != stop:
                pieces.append(self.ids.view(first, stop))
                first = begin
            stop = begin + self._rows[at + _LENGTH]
        return np.concatenate([*pieces, self.ids.view(first, stop)])


def _packed(completion: Completion) -> tuple[Any, ...]:
    spans = (
        atom
        for span in completion.weight_versions
        for atom in (span.version, span.start, span.stop)
    )
    return (
        completion.finish_reason,
        completion.matched,
        completion.prompt_tokens,
        completion.cached_tokens,
        completion.latency,
        completion.attempts,
        completion.rid,
        *spans,
    )


def _versions(spans: Sequence[Any], shift: int) -> tuple[WeightVersion, ...]:
    """The weight versions that `_packed` laid down as atoms, moved by `shift` tokens."""
    return tuple(
        WeightVersion(spans[at], spans[at + 1] + shift, spans[at + 2] + shift)
        for at in range(0, len(spans), 3)
    )
