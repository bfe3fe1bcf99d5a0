"""A radix tree of the sequences that the embedded engine has computed. It determines
`cached_tokens`, and the forward passes from which cached tokens have their experts.

Invariants: `match` finds the longest prefix that is shared with an inserted sequence and was not
evicted. A prefix that several sequences share is stored once, with the passes of the first of them.
Locked prefixes are not evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int32]


class _Node:
    __slots__ = ("children", "ids", "locks", "parent", "passes", "used")

    def __init__(self, ids: _Ids, passes: _Ids, parent: _Node | None = None) -> None:
        self.ids = ids
        self.passes = passes
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.locks = 0
        self.used = 0


class PrefixCache:
    """A prefix cache for tests and benchmarks. As in SGLang, the leaves that were not used for the
    longest time are evicted first.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._root = _Node(*np.zeros((2, 0), dtype=np.int32))
        self._clock = count(1)

    def match(self, ids: _Ids) -> _Ids:
        """Return the passes of the longest prefix that `ids` shares with an inserted sequence."""
        return np.concatenate([self._root.passes, *(node.passes for node in self._path(ids))])

    def lock(self, ids: _Ids, change: int) -> None:
        """Add `change` to the number of running requests that use `ids`, a cached prefix."""
        for node in self._path(ids):
            node.locks += change

    @property
    def locked(self) -> int:
        """The number of tokens in locked prefixes."""
        return sum(len(node.ids) for node in self._nodes() if node.locks)

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

    def evict(self, size: float) -> None:
        """Evict leaves until at most `size` tokens are left, or only locked prefixes."""
        if self.tokens <= size:
            return
        leaves = [
            (node.used, id(node), node)
            for node in self._nodes()
            if not node.children and not node.locks
        ]
        heapq.heapify(leaves)
        while leaves and self.tokens > size:
            *_, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.ids[0])]
            self.tokens -= len(node.ids)
            if not parent.children and not parent.locks and parent is not self._root:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

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
    parent = node.parent
    assert parent is not None
    head = _Node(node.ids[:length], node.passes[:length], parent)
    head.locks, head.used = node.locks, node.used
    node.ids, node.passes, node.parent = node.ids[length:], node.passes[length:], head
    head.children[int(node.ids[0])] = node
    parent.children[int(head.ids[0])] = head
    return head


def common_length(a: _Ids, b: _Ids) -> int:
    """Return the length of the longest common prefix."""
    differs = a[: len(b)] != b[: len(a)]
    return int(differs.argmax()) if differs.any() else len(differs)
