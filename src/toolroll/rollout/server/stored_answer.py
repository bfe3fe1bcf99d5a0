"""`StoredAnswer`: an answer that was restored from disk. A retry of its request gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolroll.rollout.session.tree import Node
from toolroll.rollout.types import Completion

TopLogprobs = Sequence[Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer with the id `id`. Its choices are `nodes`.

    `first`: the number of earlier answers to the prompt. `top`: the most likely tokens of each
    choice, if the request asked for them.
    """

    id: str
    created: int
    first: int
    nodes: tuple[Node, ...]
    sampling_params: Mapping[str, Any]
    top: tuple[TopLogprobs | None, ...]

    @property
    def completions(self) -> list[Completion]:
        """The completions that the engine sampled, one per node."""
        found = []
        for node, top in zip(self.nodes, self.top, strict=True):
            completion = node.completion
            assert completion is not None
            found.append(replace(completion, top_logprobs=top))
        return found
