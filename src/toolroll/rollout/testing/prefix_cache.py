"""A radix tree of the sequences that the embedded engine has computed. It determines
`cached_tokens`, and the forward passes from which cached tokens have their experts.

Invariants: `match` finds the longest prefix that is shared with an inserted sequence. A prefix that
several sequences share is stored once, with the passes of the first of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Ids = npt.NDArray[np.int32]


class _Node:
    __slots__ = ("children", "ids", "passes")

    def __init__(self, ids: _Ids, passes: _Ids) -> None:
        self.ids = ids
        self.passes = passes
        self.children: dict[int, _Node] = {}


class PrefixCache:
    """A prefix cache without a size limit, for tests and benchmarks."""

    def __init__(self) -> None:
        self._root = _Node(*np.zeros((2, 0), dtype=np.int32))

    def match(self, ids: _Ids) -> _Ids:
        """Return the passes of the longest prefix that `ids` shares with an inserted sequence."""
        node, position = self._root, 0
        passes = [node.passes]
        while position < len(ids):
            child = node.children.get(int(ids[position]))
            if child is None:
                break
            common = common_length(child.ids, ids[position:])
            position += common
            passes.append(child.passes[:common])
            if common < len(child.ids):
                break
            node = child
        return np.concatenate(passes)

    def insert(self, ids: _Ids, passes: _Ids) -> None:
        """Add one sequence. `passes`: the number of the forward pass of each token."""
        node, position = self._root, 0
        while position < len(ids):
            first = int(ids[position])
            child = node.children.get(first)
            if child is None:
                # a view would keep the whole sequence alive
                node.children[first] = _Node(ids[position:].copy(), passes[position:].copy())
                return
            common = common_length(child.ids, ids[position:])
            if common < len(child.ids):
                head = _Node(child.ids[:common], child.passes[:common])
                child.ids, child.passes = child.ids[common:], child.passes[common:]
                head.children[int(child.ids[0])] = child
                node.children[first] = head
                child = head
            position += common
            node = child


def common_length(a: _Ids, b: _Ids) -> int:
    """Return the length of the longest common prefix."""
    differs = a[: len(b)] != b[: len(a)]
    return int(differs.argmax()) if differs.any() else len(differs)
