"""`Node`: one step of a session: the tokens that it added, observed or sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolroll.rollout.session.tree import NONE, TokenTree
from toolroll.rollout.types import Completion, IdArray, LogprobArray


@dataclass(frozen=True, slots=True)
class Node:
    """A reference to the node `index` of `tree`. References to the same node are equal."""

    tree: TokenTree
    index: int

    @property
    def parent(self) -> Node | None:
        """The node that it follows; None for a root."""
        parent = self.tree.parent(self.index)
        return None if parent == NONE else Node(self.tree, parent)

    @property
    def start(self) -> int:
        """The position of its first token in every path through it."""
        return self.tree.start(self.index)

    @property
    def stop(self) -> int:
        """The index just past its last token."""
        return self.tree.stop(self.index)

    @property
    def children(self) -> int:
        """The number of nodes that directly follow it."""
        return self.tree.children(self.index)

    @property
    def ids(self) -> IdArray:
        """Its tokens, as a read-only view, which keeps all ids of the tree in memory."""
        return self.tree.ids_of(self.index)

    @property
    def logprobs(self) -> LogprobArray | None:
        """The logprobs of its tokens; None if they were observed, or not requested."""
        return self.tree.logprobs_of(self.index)

    @property
    def sampled(self) -> bool:
        """True if the engine sampled tokens here (an abort in its queue samples none)."""
        return self.tree.sampled(self.index)

    @property
    def sampling_params(self) -> Mapping[str, Any]:
        """The parameters that were sent; empty if its tokens were observed."""
        return self.tree.sampling_params(self.index)

    @property
    def excluded(self) -> str | None:
        """The reason why it is not trained although it was sampled; else None."""
        return self.tree.excluded.get(self.index)

    @property
    def fork_reason(self) -> str | None:
        """The reason why a new path starts here; else None."""
        return self.tree.fork_reasons.get(self.index)

    @property
    def completion(self) -> Completion | None:
        """The engine's answer, without its `text`; None if the tokens were observed."""
        return self.tree.completion(self.index)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this node."""
        return [Node(self.tree, index) for index in self.tree.path(self.index)]
