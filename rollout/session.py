"""`Session`: the token tree of one episode, and the single writer of ids, loss mask and logprobs.

Invariants: tokens are only ever appended (`observe`: mask 0; `sample`: mask 1) or a new path is begun (`fork`), so the prompt of
turn n+1 begins with all tokens of turn n (I1); a node that was sampled is trained in the first path that holds it and is context
in every later one (I2, I5); nodes hold only the tokens they add. `grow` and `grow_sampled` write at any node of the tree, for
conversations that branch, and leave the current path alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from toolroll.rollout.errors import TokenError
from toolroll.rollout.node import Node, packed
from toolroll.rollout.token_buffer import TokenBuffer
from toolroll.rollout.types import (
    Completion,
    IdArray,
    LogprobArray,
    MaskArray,
    Trajectory,
    Turn,
    WeightVersion,
)

CONTEXT = "context"
"""`Turn.excluded` of a sampled turn that an earlier path trains."""


class Session:
    """One episode's tokens. `session_id` is the routing key: all its requests go to one worker and its prefix cache."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._nodes: list[Node] = []
        self._head: Node | None = None
        self._buffer = TokenBuffer()
        self._observed: dict[tuple[int, bytes], Node] = {}
        self._params: Mapping[str, Any] = {}

    # --- writing -----------------------------------------------------------------------------------------------------

    def observe(self, ids: Sequence[int] | IdArray) -> Node:
        """Append tokens that the environment or the template wrote: mask 0."""
        return self._append(np.asarray(ids, dtype=np.int32))

    def sample(self, completion: Completion, sampling_params: Mapping[str, Any]) -> Node:
        """Append what the engine sampled from exactly `input_ids`: mask 1, with its logprobs.

        Raises `TokenError` where the completion's logprobs do not belong to its ids.
        """
        _check_logprobs(completion)
        if self._head is None:
            raise TokenError("a completion cannot be the first of a session: observe its prompt before it")
        return self._append(completion.output_ids, completion, sampling_params)

    def fork(self, input_ids: Sequence[int] | IdArray, reason: str) -> Node:
        """Begin a second path whose prompt is `input_ids`, sharing what it has in common with the current path.

        The shared nodes are whole ones; what was sampled in them stays trained in the first path.
        """
        ids = np.asarray(input_ids, dtype=np.int32)
        shared = self.shared_prefix(ids)
        self._move_to(shared)
        node = self._append(ids[shared.stop if shared else 0 :])
        node.fork_reason = reason
        return node

    def exclude(self, reason: str, nodes: Sequence[Node] | None = None) -> None:
        """Take sampled nodes (default: all) out of training, with the reason; their tokens stay where they are."""
        for node in self._nodes if nodes is None else nodes:
            if node.said is not None and node.excluded is None:
                node.excluded = reason

    def _append(self, ids: IdArray, completion: Completion | None = None, sampling_params: Mapping[str, Any] | None = None) -> Node:
        node = self._add(self._head, ids, completion, sampling_params)
        self._head = node
        self._buffer.append(ids)
        return node

    def _add(
        self,
        parent: Node | None,
        ids: IdArray,
        completion: Completion | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> Node:
        node = Node(parent, parent.stop if parent is not None else 0, ids)
        if completion is not None:
            node.said, node.logprobs = packed(completion), completion.logprobs
            node.sampling_params = self._shared(sampling_params or {})
            if completion.routed_experts is not None:
                _drop_experts(parent)
                node.routed_experts = completion.routed_experts
        if parent is not None:
            parent.children += 1
        self._nodes.append(node)
        return node

    def _shared(self, sampling_params: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of `sampling_params`; the last one where they are the same, as they are for nearly every turn."""
        if self._params != sampling_params:
            self._params = dict(sampling_params)
        return self._params

    # --- writing anywhere in the tree ------------------------------------------------------------------------------------

    def grow(self, parent: Node | None, ids: Sequence[int] | IdArray, *, reason: str | None = None) -> Node:
        """Add tokens with mask 0 behind `parent` (None: as a new root). Where the same tokens were added there before, that node is
        given back: several answers to one prompt are siblings behind one node. `reason`: why a path is begun anew here."""
        added = np.array(ids, dtype=np.int32)
        key = (id(parent), blake2b(added.tobytes(), digest_size=16).digest())
        node = self._observed.get(key)
        if node is None:
            node = self._observed[key] = self._add(parent, added)
            node.fork_reason = reason
        return node

    def grow_sampled(self, parent: Node, completion: Completion, sampling_params: Mapping[str, Any]) -> Node:
        """Add what the engine sampled from exactly the path to `parent`: mask 1. Raises `TokenError` as `sample` does."""
        _check_logprobs(completion)
        return self._add(parent, completion.output_ids, completion, sampling_params)

    def _move_to(self, node: Node | None) -> None:
        self._head = node
        self._buffer = TokenBuffer()
        for step in node.path() if node else ():
            self._buffer.append(step.ids)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._buffer)

    @property
    def head(self) -> Node | None:
        """The last node of the current path."""
        return self._head

    @property
    def input_ids(self) -> IdArray:
        """The current path's ids: the next request's prompt. A view that refuses to be written, and that never changes."""
        return self._buffer.ids

    @property
    def highest_id(self) -> int:
        """The highest of them, as an unsigned number; 0 for none."""
        return self._buffer.highest

    @property
    def input_ids_json(self) -> bytes:
        """The same ids as JSON text without brackets, kept as they grow: a request costs O(new tokens) to encode."""
        return self._buffer.json

    @property
    def nodes(self) -> int:
        """How many nodes the tree has."""
        return len(self._nodes)

    @property
    def tokens(self) -> int:
        """How many tokens the nodes hold, each counted once."""
        return sum(len(node.ids) for node in self._nodes)

    def path_ids(self, node: Node | None) -> IdArray:
        """The ids from the root to the end of `node`."""
        return np.concatenate([step.ids for step in node.path()]) if node is not None else np.zeros(0, dtype=np.int32)

    def shared_prefix(self, ids: IdArray, end: Node | None = None) -> Node | None:
        """The last node of the path to `end` (default: the current path) up to which `ids` agree with it token for token; None for
        no whole node."""
        shared: Node | None = None
        end = end if end is not None else self._head
        for node in end.path() if end is not None else ():
            if node.stop > len(ids) or not np.array_equal(node.ids, ids[node.start : node.stop]):
                break
            shared = node
        return shared

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Every path from a root to a leaf, in the order in which they were begun.

        Tokens behind the last sampled one are left out: nothing was sampled from them. A path on which nothing was sampled is
        given only if the session has no other.
        """
        leaves = [node for node in self._nodes if node.children == 0]
        paths = _maximal([path for path in (_trimmed(leaf.path()) for leaf in leaves) if path])
        if not paths and leaves:
            paths = [leaves[0].path()]
        trained: set[int] = set()
        return tuple(_trajectory(path, trained) for path in paths)


def _drop_experts(node: Node | None) -> None:
    """Forget the experts that were given with the turns up to `node`: those of a later turn hold them too."""
    for step in node.path() if node is not None else ():
        step.routed_experts = None


def _check_logprobs(completion: Completion) -> None:
    logprobs = completion.logprobs
    if logprobs is not None and len(logprobs) != len(completion.output_ids):
        raise TokenError(f"{len(completion.output_ids)} sampled ids came with {len(logprobs)} logprobs")


def _maximal(paths: list[list[Node]]) -> list[list[Node]]:
    """`paths` without those that are the beginning of another one, and without doubles (a path of which only a prompt that was
    never answered is cut off)."""
    inner = {id(node) for path in paths for node in path[:-1]}
    kept = {id(path[-1]): path for path in reversed(paths) if id(path[-1]) not in inner}
    return list(kept.values())[::-1]


def _trimmed(path: list[Node]) -> list[Node]:
    while path and not path[-1].sampled:
        path.pop()
    return path


def _trajectory(path: list[Node], trained: set[int]) -> Trajectory:
    """The arrays of `path`; nodes in `trained` are context, and those it trains are added to it."""
    length = path[-1].stop
    input_ids = np.concatenate([node.ids for node in path]).astype(np.int32, copy=False)
    loss_mask: MaskArray = np.zeros(length, dtype=np.uint8)
    logprobs: LogprobArray = np.full(length, np.nan, dtype=np.float32)
    turns: list[Turn] = []
    for node in path:
        completion = node.completion
        if completion is None or not node.sampled:
            continue
        excluded = CONTEXT if id(node) in trained else node.excluded
        trained.add(id(node))
        if excluded is None:
            loss_mask[node.start : node.stop] = 1
        if completion.logprobs is not None:
            logprobs[node.start : node.stop] = completion.logprobs
        turns.append(_turn(node, completion, excluded))
    first = next((turn.start for turn in turns if turn.excluded != CONTEXT), turns[0].start if turns else length)
    fork_reason = next((node.fork_reason for node in reversed(path) if node.fork_reason), None)
    return Trajectory(
        input_ids, loss_mask, logprobs, tuple(turns), first, fork_reason=fork_reason, routed_experts=path[-1].routed_experts
    )


def _turn(node: Node, completion: Completion, excluded: str | None) -> Turn:
    return Turn(
        start=node.start,
        stop=node.stop,
        finish_reason=completion.finish_reason,
        matched=completion.matched,
        weight_versions=tuple(
            WeightVersion(span.version, node.start + span.start, node.start + span.stop) for span in completion.weight_versions
        ),
        sampling_params=node.sampling_params,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        latency=completion.latency,
        excluded=excluded,
    )
