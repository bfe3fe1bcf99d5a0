"""`Node`: the tokens that one step of a session added.

Invariant: a live episode is a handful of arrays and few objects, since the garbage collector visits every object that can refer to
another: what the engine said beside its tokens is kept as one flat tuple of atoms, which the collector leaves alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolroll.rollout.types import Completion, IdArray, LogprobArray, WeightVersion

_NOTHING: Mapping[str, Any] = {}


@dataclass(slots=True, eq=False)
class Node:
    """The tokens that one step added: observed, or sampled. `start` is the place of its first token in every path that holds it.

    `said`: None where the tokens were observed, else what `packed` made of the completion.
    """

    parent: Node | None
    start: int
    ids: IdArray
    said: tuple[Any, ...] | None = None
    logprobs: LogprobArray | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    routed_experts: Any = None
    excluded: str | None = None
    fork_reason: str | None = None
    children: int = 0

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + len(self.ids)

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled tokens here (an abort in its queue samples none)."""
        return self.said is not None and len(self.ids) > 0

    @property
    def completion(self) -> Completion | None:
        """What the engine said, without its `text`; None where the tokens were observed."""
        if self.said is None:
            return None
        finish_reason, matched, prompt_tokens, cached_tokens, latency, attempts, rid, *spans = self.said
        versions = tuple(WeightVersion(*spans[at : at + 3]) for at in range(0, len(spans), 3))
        return Completion(
            output_ids=self.ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            matched=matched,
            weight_versions=versions,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            latency=latency,
            attempts=attempts,
            rid=rid,
            routed_experts=self.routed_experts,
        )

    def path(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def packed(completion: Completion) -> tuple[Any, ...]:
    """What a completion says beside its arrays, as a flat tuple; its `text` is not kept, since the ids are the record."""
    spans = (atom for span in completion.weight_versions for atom in (span.version, span.start, span.stop))
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
