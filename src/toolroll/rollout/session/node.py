"""`Node`: one step of a session, and the observed or sampled tokens that it added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolroll.rollout.session.tree import NONE, TokenTree
from toolroll.rollout.types import Completion, IdArray


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
    def sampling_params(self) -> Mapping[str, Any]:
        """The sampling parameters of the node's request. Empty if the tokens were observed."""
        return self.tree.sampling_params(self.index)

    @property
    def excluded(self) -> str | None:
        """The reason why this sampled node is not trained. None if it is trained."""
        return self.tree.excluded.get(self.index)

    @property
    def fork_reason(self) -> str | None:
        """The reason why a fork starts at this node. None if no fork starts here."""
        return self.tree.fork_reasons.get(self.index)

    @property
    def completion(self) -> Completion | None:
        """The node's completion without its `text` and `routed_experts`, or None if the tokens were
        observed.
        """
        return self.tree.completion(self.index)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this node."""
        return [Node(self.tree, index) for index in self.tree.path(self.index)]
