"""`TokenTree`: the tokens of a session, each stored once, and the completions that they come from.
`Node` is a reference to one node of a tree.

Invariants: nodes are added (after any existing node) and never removed. A node stores only the
tokens that it adds to its parent's path.

A live session is a few arrays instead of many objects, because each pass of the garbage collector
visits every container object: of 10,000 sessions with 41 nodes, a full pass takes 90 ms if a node
is an object with slots, and 0.4 ms if it is a row of an array. So a node is a row of integers. The
other fields of a completion are one flat tuple of numbers and strings, which the collector stops
tracking.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.errors import TokenError
from toolroll.rollout.media import Image
from toolroll.rollout.types import (
    Completion,
    ExpertArray,
    IdArray,
    LogprobArray,
    Turn,
    WeightVersion,
)

NONE = -1
"""Represents a missing node or index."""
# A row: the node before it; the position of its first token in the path; how many tokens; where
# they start in `ids`; the index of its completion in `_answers` and `_params`; where its logprobs
# start; how many nodes follow it.
_PARENT, _START, _LENGTH, _IDS, _ANSWER, _LOGPROBS, _CHILDREN = range(7)
_WIDTH = 7
_ROOM = 256


class GrowableArray:
    """An array of `dtype` that starts empty and grows by `append`.

    Invariant: a value never changes after it is appended, so a view of the array does not need a
    copy.
    """

    __slots__ = ("_data", "_length")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.empty(0, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: npt.NDArray[Any]) -> int:
        """Append the one-dimensional array `values`. Return where they start."""
        start = self._length
        stop = start + len(values)
        if stop > len(self._data):
            grown = np.empty(stop + stop // 8 + _ROOM, dtype=self._data.dtype)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:stop] = values
        self._length = stop
        return start

    def view(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Return a read-only view of [start, stop), by default of all values."""
        view = self._data[start : self._length if stop is None else stop]
        view.flags.writeable = False
        return view


class TokenTree:
    """A tree that is empty at first. Nodes are numbered from 0 in the order in which they are
    added.

    `ids` are the tokens of all nodes in that order. `excluded`, `fork_reasons`, `images`,
    `lineages` and `routed_experts` map a node's number to its value. Most nodes have no value.

    A node's `routed_experts` are those of the passes that predicted its tokens: the rows of the
    token before its first one (a root has none) up to its last token but one. They come from the
    first completion whose path contains the node, and never change. So along a path, nodes with
    rows come before nodes without.
    """

    __slots__ = (
        "_answers",
        "_logprobs",
        "_params",
        "_rows",
        "excluded",
        "fork_reasons",
        "ids",
        "images",
        "lineages",
        "routed_experts",
    )

    def __init__(self) -> None:
        self.ids = GrowableArray(np.intc)
        self.excluded: dict[int, str] = {}
        self.fork_reasons: dict[int, str] = {}
        self.images: dict[int, tuple[Image, ...]] = {}
        self.lineages: dict[int, Mapping[str, str]] = {}
        self.routed_experts: dict[int, ExpertArray] = {}
        self._rows = array("i")
        self._logprobs = GrowableArray(np.float32)
        self._answers: list[tuple[Any, ...]] = []
        self._params: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows) // _WIDTH

    # --- writing ----------------------------------------------------------------------------------

    def add(self, parent: int, ids: IdArray) -> int:
        """Add observed tokens after `parent` (`NONE`: as a root). Return the node."""
        return self._add(parent, ids, NONE, NONE)

    def add_sampled(
        self, parent: int, ids: IdArray, completion: Completion, sampling_params: Mapping[str, Any]
    ) -> int:
        """Add the tokens of `completion` after `parent`. Return the node.

        The completion's `text` is not stored, and its `routed_experts` are stored only for nodes
        of the path that have none. `sampling_params` are not copied, so the caller must not change
        them. Raise `TokenError` if there are too few `routed_experts`.
        """
        rows = self._new_experts(parent, ids, completion)
        answer, logprobs = len(self._answers), NONE
        if completion.logprobs is not None:
            logprobs = self._logprobs.append(completion.logprobs)
        self._answers.append(_packed(completion))
        self._params.append(sampling_params)
        node = self._add(parent, ids, answer, logprobs)
        if rows is not None:
            self._add_experts(node, rows)
        return node

    def _new_experts(self, parent: int, ids: IdArray, completion: Completion) -> ExpertArray | None:
        """Return the completion's experts without those that the path to `parent` has already.
        The request may have computed these again, with other experts than those that sampled the
        earlier turns.
        """
        rows = completion.routed_experts
        if rows is None or not len(ids):
            return None
        end = len(ids) - 1 + (self.stop(parent) if parent != NONE else 0)
        covered, first = self.experts_end(parent), end - len(rows)
        if not 0 <= first <= covered:
            raise TokenError(
                f"the completion has the experts of {len(rows)} tokens, expected those of the "
                f"tokens from {covered} to {end}"
            )
        return rows[covered - first :].copy() if first < covered else rows

    def _add_experts(self, node: int, rows: ExpertArray) -> None:
        """Store `rows` for `node`, which they end with, and for the nodes before it."""
        end = len(rows)
        while end:
            first = end - (self.stop(node) - (self.start(node) or 1))
            self.routed_experts[node] = rows[first:end]
            node, end = self.parent(node), first

    def _add(self, parent: int, ids: IdArray, answer: int, logprobs: int) -> int:
        node, first = len(self), self.ids.append(ids)  # before the row: a failure adds no node
        start = self.stop(parent) if parent != NONE else 0
        self._rows.extend((parent, start, len(ids), first, answer, logprobs, 0))
        if parent != NONE:
            self._rows[parent * _WIDTH + _CHILDREN] += 1
        return node

    # --- reading ----------------------------------------------------------------------------------

    def parent(self, node: int) -> int:
        """Return the node that `node` follows, or `NONE` if `node` is a root."""
        return self._rows[node * _WIDTH + _PARENT]

    def start(self, node: int) -> int:
        """Return the position of the node's first token. It is the same in every path."""
        return self._rows[node * _WIDTH + _START]

    def stop(self, node: int) -> int:
        """Return the position just past the node's last token."""
        pos = node * _WIDTH
        return self._rows[pos + _START] + self._rows[pos + _LENGTH]

    def children(self, node: int) -> int:
        """Return the number of the node's direct children."""
        return self._rows[node * _WIDTH + _CHILDREN]

    def leaves(self) -> list[int]:
        """Return the nodes without children."""
        counts = self._rows[_CHILDREN::_WIDTH]
        return [node for node, children in enumerate(counts) if not children]

    def ids_of(self, node: int) -> IdArray:
        """Return the node's tokens as a read-only view."""
        pos = node * _WIDTH
        first = self._rows[pos + _IDS]
        return self.ids.view(first, first + self._rows[pos + _LENGTH])

    def logprobs_of(self, node: int) -> LogprobArray | None:
        """Return the logprobs of the node's tokens as a read-only view, or None."""
        pos = node * _WIDTH
        first = self._rows[pos + _LOGPROBS]
        return (
            None if first == NONE else self._logprobs.view(first, first + self._rows[pos + _LENGTH])
        )

    def completed(self, node: int) -> bool:
        """Return True if the node is a completion, even one without tokens."""
        return self._rows[node * _WIDTH + _ANSWER] != NONE

    def sampled(self, node: int) -> bool:
        """Return True if the node has sampled tokens. A completion has no tokens if its request
        was aborted in the engine's queue.
        """
        pos = node * _WIDTH
        return self._rows[pos + _ANSWER] != NONE and self._rows[pos + _LENGTH] > 0

    def completion(self, node: int) -> Completion | None:
        """Return the node's completion without `text` and `routed_experts`, or None if its tokens
        were observed.
        """
        pos = self._rows[node * _WIDTH + _ANSWER]
        if pos == NONE:
            return None
        finish_reason, matched, prompt_tokens, cached_tokens, latency, attempts, rid, *spans = (
            self._answers[pos]
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
        )

    def turn(self, node: int, *, excluded: str | None) -> Turn:
        """Return a sampled node as a `Turn`. `excluded` is the reason if it is not trained."""
        _, start, length, _, pos, _, _ = self._rows[node * _WIDTH : (node + 1) * _WIDTH]
        finish_reason, matched, prompt_tokens, cached_tokens, latency, _, _, *spans = self._answers[
            pos
        ]
        return Turn(
            start=start,
            stop=start + length,
            finish_reason=finish_reason,
            matched=matched,
            weight_versions=_versions(spans, start),
            sampling_params=self._params[pos],
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            latency=latency,
            excluded=excluded,
        )

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`. Return an empty list for `NONE`."""
        path = []
        while node != NONE:
            path.append(node)
            node = self._rows[node * _WIDTH + _PARENT]
        return path[::-1]

    def ids_along(self, path: list[int]) -> IdArray:
        """Return a copy of the tokens of consecutive nodes of a path. Tokens that are adjacent in
        `ids` are copied as one slice.
        """
        pieces: list[IdArray] = []
        first = stop = 0
        for node in path:
            pos = node * _WIDTH
            begin = self._rows[pos + _IDS]
            if begin != stop:
                pieces.append(self.ids.view(first, stop))
                first = begin
            stop = begin + self._rows[pos + _LENGTH]
        return np.concatenate([*pieces, self.ids.view(first, stop)])

    def experts_end(self, node: int) -> int:
        """Return the position just past the last token of the path to `node` whose experts are
        known, or cannot become known because their turn came without experts.
        """
        while node != NONE:
            if node in self.routed_experts or self.sampled(node):
                return self.stop(node) - 1
            node = self.parent(node)
        return 0

    def experts_along(self, path: list[int]) -> ExpertArray | None:
        """Return the experts of the path's tokens except the last, each row from the turn that
        processed the token first. Return None if any is not known.
        """
        parts = [self.routed_experts[node] for node in path if node in self.routed_experts]
        if sum(map(len, parts)) != self.stop(path[-1]) - 1 or not parts:
            return None
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Node:
    """A reference to the node `index` of `tree`. References to the same node compare equal."""

    tree: TokenTree
    index: int

    @property
    def parent(self) -> Node | None:
        """The node before this one, or None if this node is a root."""
        parent = self.tree.parent(self.index)
        return None if parent == NONE else Node(self.tree, parent)

    @property
    def start(self) -> int:
        """The position of the node's first token. It is the same in every path."""
        return self.tree.start(self.index)

    @property
    def stop(self) -> int:
        """The position just past the node's last token."""
        return self.tree.stop(self.index)

    @property
    def children(self) -> int:
        """The number of direct children."""
        return self.tree.children(self.index)

    @property
    def ids(self) -> IdArray:
        """The node's tokens as a read-only view. The view keeps all ids of the tree in memory."""
        return self.tree.ids_of(self.index)

    @property
    def excluded(self) -> str | None:
        """The reason why this sampled node is not trained. None if it is trained."""
        return self.tree.excluded.get(self.index)

    @property
    def completion(self) -> Completion | None:
        """The node's completion without its `text` and `routed_experts`, or None if the tokens were
        observed.
        """
        return self.tree.completion(self.index)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this node."""
        return [Node(self.tree, index) for index in self.tree.path(self.index)]


def _packed(completion: Completion) -> tuple[Any, ...]:
    spans = [
        atom
        for span in completion.weight_versions
        for atom in (span.version, span.start, span.stop)
    ]
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
    """Return the weight versions that `_packed` stored as a flat tuple, with their positions moved
    by `shift` tokens.
    """
    triples = zip(spans[::3], spans[1::3], spans[2::3], strict=True)
    return tuple(
        [WeightVersion(name, first + shift, last + shift) for name, first, last in triples]
    )
