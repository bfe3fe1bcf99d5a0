"""A radix tree of the sequences that the embedded engine has computed. It determines
`cached_tokens`, and the forward passes from which cached tokens have their experts.

Invariants: `match` finds the longest prefix that is shared with an inserted sequence and was not
evicted. A prefix that several sequences share is stored once, with the passes of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import inf

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int32]


class _Node:
    __slots__ = ("children", "ids", "parent", "passes", "used")

    def __init__(self, ids: _Ids, passes: _Ids, parent: _Node | None) -> None:
        self.ids = ids
        self.passes = passes
        self.parent = parent or self  # of the root: itself
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixCache:
    """A prefix cache for tests and benchmarks. If it has more than `size` tokens, the leaves that
    were not used for the longest time are evicted, as in SGLang.
    """

    def __init__(self, size: float = inf) -> None:
        self.size = size
        self.tokens = 0
        self.computed = 0
        """The number of prompt tokens that were not cached, for the engine to count."""
        self._root = _Node(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32), None)
        self._clock = count(1)

    def match(self, ids: _Ids) -> _Ids:
        """Return the passes of the longest prefix that `ids` shares with an inserted sequence."""
        return np.concatenate([self._root.passes, *(node.passes for node in self._path(ids))])

    def insert(self, ids: _Ids, passes: _Ids) -> None:
        """Add one sequence. `passes`: the number of the forward pass of each token."""
        path = self._path(ids)
        position = sum(len(node.ids) for node in path)
        if position < len(ids):
            parent = path[-1] if path else self._root
            # a view would keep the whole sequence alive
            node = _Node(ids[position:].copy(), passes[position:].copy(), parent)
            node.used = parent.used
            parent.children[int(ids[position])] = node
            self.tokens += len(node.ids)
        self.evict(self.size)

    def evict(self, size: float) -> None:
        """Evict leaves until at most `size` tokens are left."""
        while self.tokens > size:
            leaves = (node for node in self._nodes() if not node.children)
            leaf = min(leaves, key=lambda node: node.used)
            del leaf.parent.children[int(leaf.ids[0])]
            self.tokens -= len(leaf.ids)

    def _path(self, ids: _Ids) -> list[_Node]:
        """Return the nodes of the longest cached prefix of `ids`, which are then the last used. A
        node that has more tokens than the prefix is split.
        """
        node, position, used = self._root, 0, next(self._clock)
        path: list[_Node] = []
        node.used = used
        while position < len(ids) and (child := node.children.get(int(ids[position]))):
            common = common_length(child.ids, ids[position:])
            node = _split(child, common) if common < len(child.ids) else child
            node.used = used
            path.append(node)
            position += common
        return path

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def _split(node: _Node, length: int) -> _Node:
    """Split `node` after `length` tokens. Return the first part."""
    first = _Node(node.ids[:length], node.passes[:length], node.parent)
    first.used = node.used
    first.parent.children[int(first.ids[0])] = first
    node.ids, node.passes, node.parent = node.ids[length:], node.passes[length:], first
    first.children[int(node.ids[0])] = node
    return first


def common_length(a: _Ids, b: _Ids) -> int:
    """Return the length of the longest common prefix."""
    differs = a[: len(b)] != b[: len(a)]
    return int(differs.argmax()) if differs.any() else len(differs)
