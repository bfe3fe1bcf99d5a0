"""`StoredAnswer`: an answer of an earlier process, for the retry of its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolroll.rollout.session.node import Node
from toolroll.rollout.types import Completion

TopLogprobs = Sequence[Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer `id`, whose choices are `nodes`.

    `first`: the number of earlier answers to the prompt. `top`: the likeliest tokens of each
    choice, if they were requested.
    """

    id: str
    created: int
    first: int
    nodes: tuple[Node, ...]
    sampling_params: Mapping[str, Any]
    top: tuple[TopLogprobs | None, ...]

    @property
    def completions(self) -> list[Completion]:
        """The completions that the engine sampled, one for each node."""
        found = []
        for node, top in zip(self.nodes, self.top, strict=True):
            completion = node.completion
            assert completion is not None
            found.append(replace(completion, top_logprobs=top))
        return found
