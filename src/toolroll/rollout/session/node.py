"""`Node`: one step of a session: the tokens that it added, observed or sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolroll.rollout.session.tree import NONE, TokenTree
from toolroll.rollout.types import Completion, IdArray, LogprobArray


@dataclass(frozen=True, slots=True)
class Node:
    """The node `index` of `tree`. It holds nothing itself: two of the same place are equal."""

    tree: TokenTree
    index: int

    @property
    def parent(self) -> Node | None:
        """The node that it stands behind; None for a root."""
        parent = self.tree.parent(self.index)
        return None if parent == NONE else Node(self.tree, parent)

    @property
    def start(self) -> int:
        """The place of its first token in every path that holds it."""
        return self.tree.start(self.index)

    @property
    def stop(self) -> int:
        """The index just past its last token."""
        return self.tree.stop(self.index)

    @property
    def children(self) -> int:
        """How many nodes stand directly behind it."""
        return self.tree.children(self.index)

    @property
    def ids(self) -> IdArray:
        """Its tokens: a view that refuses to be written, and that keeps the memory of the whole
        tree's ids alive.
        """
        return self.tree.ids_of(self.index)

    @property
    def logprobs(self) -> LogprobArray | None:
        """Those of its tokens; None where they were observed, or not asked for."""
        return self.tree.logprobs_of(self.index)

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled tokens here (an abort in its queue samples none)."""
        return self.tree.sampled(self.index)

    @property
    def sampling_params(self) -> Mapping[str, Any]:
        """The effective ones; none where its tokens were observed."""
        return self.tree.sampling_params(self.index)

    @property
    def excluded(self) -> str | None:
        """Why it is not trained although it was sampled."""
        return self.tree.excluded.get(self.index)

    @property
    def fork_reason(self) -> str | None:
        """Why a path was begun anew here."""
        return self.tree.fork_reasons.get(self.index)

    @property
    def completion(self) -> Completion | None:
        """What the engine said, without its `text`; None where the tokens were observed."""
        return self.tree.completion(self.index)

    def path(self) -> list[Node]:
        """From the root to this node."""
        return [Node(self.tree, index) for index in self.tree.path(self.index)]
