"""`Session`: the tokens of one session. It is the only class that writes ids, loss masks and
logprobs.

Invariants:

- Tokens are only appended, and may follow any node of the tree. `observe` appends them with mask 0,
  and `sample` with mask 1.
- A sampled node is trained in the first path that contains it, unless it was excluded. In every
  later path it is context (mask 0).
- A node stores only the tokens that it adds to its parent's path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.errors import TokenError
from toolroll.rollout.media import Image
from toolroll.rollout.session.tree import NONE, GrowableArray, Node, TokenTree
from toolroll.rollout.types import Completion, IdArray, LogprobArray, MaskArray, Trajectory, Turn

_INT32 = np.iinfo(np.int32)
CONTEXT = "context"
"""The value of `Turn.excluded` if an earlier trajectory already contains the turn."""


class Session:
    """The tokens of one episode, as a tree. `session_id` is the routing key: all requests of a
    session go to the same worker and use its prefix cache.

    Methods raise `TokenError`, without writing anything, if token ids are invalid or if a node
    belongs to another session.

    Example:
        session = Session("episode-1")
        prompt = session.observe([1, 2, 3], after=None)
        turn = session.sample(completion, {"temperature": 1.0}, after=prompt)
        session.observe([4, 5], after=turn)  # a tool result
        session.trajectories()[0].loss_mask  # 0 for 1, 2, 3; 1 for `completion.output_ids`
    """

    __slots__ = ("__weakref__", "_observed", "_params", "_tree", "session_id")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._tree = TokenTree()
        self._observed: dict[tuple[int, bytes], int] = {}
        self._params: Mapping[str, Any] = {}

    # --- writing ----------------------------------------------------------------------------------

    def observe(
        self,
        ids: Sequence[int] | IdArray,
        *,
        after: Node | None,
        reason: str | None = None,
        images: tuple[Image, ...] = (),
    ) -> Node:
        """Add tokens that the environment or the template wrote, with mask 0.

        Args:
            ids: The tokens. If the same tokens were already observed after the same node, their
                node is returned, so that several completions of one prompt share its node.
            after: The node that the tokens follow; None starts a new root.
            reason: The reason for the fork, if a fork starts with these tokens.
            images: The images in these tokens. Their positions count from the root.
        """
        added, parent = checked_ids(ids), self._index(after)
        digest = blake2b(added.tobytes(), digest_size=16).digest()
        key = (parent, digest + repr(images).encode() if images else digest)
        index = self._observed.get(key)
        if index is None:
            index = self._observed[key] = self._tree.add(parent, added)
            if reason:
                self._tree.fork_reasons[index] = reason
            if images:
                self._tree.images[index] = images
        return Node(self._tree, index)

    def sample(
        self, completion: Completion, sampling_params: Mapping[str, Any], *, after: Node
    ) -> Node:
        """Add a completion, with mask 1 and its logprobs. Its prompt must be exactly the tokens
        from the root to `after`.

        Raise `TokenError` if the completion has different numbers of ids and logprobs.
        """
        ids, parent = _checked_ids_of(completion), self._index(after)
        params = self._shared(sampling_params)
        return Node(self._tree, self._tree.add_sampled(parent, ids, completion, params))

    def label(self, node: Node, lineage: Mapping[str, str]) -> None:
        """Attach a client's labels `lineage` to a sampled node. They become the `lineage` of the
        trajectory that ends with this node.
        """
        self._tree.lineages[self._index(node)] = lineage

    def exclude(self, reason: str, nodes: Sequence[Node] | None = None) -> None:
        """Exclude sampled nodes (default: all) from training, for `reason`. Their tokens stay in
        the tree.
        """
        for index in range(len(self._tree)) if nodes is None else map(self._index, nodes):
            if self._tree.completed(index):
                self._tree.excluded.setdefault(index, reason)

    def _shared(self, sampling_params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `sampling_params`. If they equal the previous turn's, as in nearly every
        turn, return the previous copy.
        """
        if self._params != sampling_params:
            self._params = dict(sampling_params)
        return self._params

    def _index(self, node: Node | None) -> int:
        """Return the index of `node` in the tree, or `NONE` if `node` is None."""
        if node is None:
            return NONE
        if node.tree is not self._tree:
            raise TokenError(f"this node belongs to another session, not to {self.session_id!r}")
        return node.index

    # --- reading ----------------------------------------------------------------------------------

    @property
    def ids(self) -> GrowableArray:
        """The tokens of all nodes, in the order in which they were added."""
        return self._tree.ids

    @property
    def nodes(self) -> int:
        """The number of nodes in the tree."""
        return len(self._tree)

    @property
    def tokens(self) -> int:
        """The number of tokens in the tree, each counted once."""
        return len(self._tree.ids)

    def node(self, index: int) -> Node:
        """Return the node with the number `index`. Raise `TokenError` if it does not exist."""
        if not 0 <= index < len(self._tree):
            raise TokenError(f"there is no node {index} in the session {self.session_id!r}")
        return Node(self._tree, index)

    def path_ids(self, node: Node | None) -> IdArray:
        """Return the ids from the root to the end of `node`."""
        return self._tree.ids_along(self._tree.path(self._index(node)))

    def path_images(self, node: Node | None) -> tuple[Image, ...]:
        """Return the images in the tokens from the root to the end of `node`."""
        path, images = self._tree.path(self._index(node)), self._tree.images
        return tuple(image for index in path for image in images.get(index, ()))

    def experts_end(self, node: Node | None) -> int:
        """Return the number of tokens from the root to `node` whose experts are known, or cannot
        become known because their turn came without experts.
        """
        return self._tree.experts_end(self._index(node))

    def shared_prefix(
        self, ids: IdArray, end: Node | None, images: Sequence[Image] = ()
    ) -> Node | None:
        """Return the last node on the path to `end` that matches: its tokens and images, with all
        those before it, are a prefix of `ids` and `images`. Return None if no node matches.
        """
        tree, shared = self._tree, NONE
        for index in tree.path(self._index(end)):
            start, stop = tree.start(index), tree.stop(index)
            within = tuple(image for image in images if start <= image.position < stop)
            if (
                stop > len(ids)
                or not np.array_equal(tree.ids_of(index), ids[start:stop])
                or within != tree.images.get(index, ())
            ):
                break
            shared = index
        return None if shared == NONE else Node(tree, shared)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return every path from a root to a leaf, in the order in which the leaves were added.

        Tokens after the last sampled token are left out, because nothing was sampled from them. A
        path without sampled tokens is returned only if the session has no other path.
        """
        tree = self._tree
        leaves = tree.leaves()
        ends = [_trimmed(tree, tree.path(leaf)) for leaf in leaves]
        paths = _maximal([path for path in ends if path])
        if not paths and leaves:
            paths = [tree.path(leaves[0])]
        trained: set[int] = set()
        return tuple(_trajectory(tree, path, trained) for path in paths)


def checked_ids(values: Sequence[int] | IdArray) -> IdArray:
    """Return `values` as int32. Raise `TokenError` unless it is a flat list of token ids."""
    try:
        ids = np.asarray(values)
    except ValueError as error:  # nested lists of different lengths
        raise TokenError(f"token ids must be one list of integers: {error}") from error
    if ids.ndim != 1:
        raise TokenError(
            f"token ids must be one list of integers: these have the shape {ids.shape}"
        )
    if ids.dtype == np.int32 or not ids.size:
        return ids.astype(np.int32, copy=False)
    if ids.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers: these are {ids.dtype}")
    if ids.min() < _INT32.min or ids.max() > _INT32.max:
        raise TokenError(f"token ids must fit in 32 bits: these go from {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def check_trained_logprobs(logprobs: npt.NDArray[np.floating[Any]], mask: npt.NDArray[Any]) -> None:
    """Raise `TokenError` if a token with mask 1 has no logprob (NaN).

    `logprobs` and `mask` cover the same tokens, both [n]. A filler in place of the logprob would
    give the token a wrong importance ratio, and nobody would notice.
    """
    missing = np.flatnonzero(np.isnan(logprobs) & (mask != 0))
    if len(missing):
        raise TokenError(
            f"{len(missing)} trained tokens have no logprob, the first at position {missing[0]}: "
            "the engine must return the logprob of each token that it samples"
        )


def _checked_ids_of(completion: Completion) -> IdArray:
    ids, logprobs = checked_ids(completion.output_ids), completion.logprobs
    if logprobs is not None and np.shape(logprobs) != ids.shape:
        raise TokenError(
            f"{len(ids)} sampled ids came with {len(logprobs)} logprobs of the shape "
            f"{np.shape(logprobs)}"
        )
    return ids


def _maximal(paths: list[list[int]]) -> list[list[int]]:
    """Return `paths` without duplicates, and without paths that are prefixes of others.

    Two paths that differ only in an unanswered prompt are duplicates after `_trimmed`.
    """
    inner = {index for path in paths for index in path[:-1]}
    by_leaf = {path[-1]: path for path in reversed(paths) if path[-1] not in inner}
    return list(by_leaf.values())[::-1]


def _trimmed(tree: TokenTree, path: list[int]) -> list[int]:
    while path and not tree.sampled(path[-1]):
        path.pop()
    return path


def _trajectory(tree: TokenTree, path: list[int], trained: set[int]) -> Trajectory:
    """Return `path` as a trajectory. A sampled node that is already in `trained` gets mask 0. Every
    other sampled node of the path is added to `trained`.
    """
    length = tree.stop(path[-1])
    loss_mask: MaskArray = np.zeros(length, dtype=np.int32)
    logprobs: LogprobArray = np.full(length, np.nan, dtype=np.float32)
    turns: list[Turn] = []
    for index in path:
        if not tree.sampled(index):
            continue
        excluded = CONTEXT if index in trained else tree.excluded.get(index)
        trained.add(index)
        turn = tree.turn(index, excluded=excluded)
        if excluded is None:
            loss_mask[turn.start : turn.stop] = 1
        turn_logprobs = tree.logprobs_of(index)
        if turn_logprobs is not None:
            logprobs[turn.start : turn.stop] = turn_logprobs
        turns.append(turn)
    first = next(
        (turn.start for turn in turns if turn.excluded != CONTEXT),
        turns[0].start if turns else length,
    )
    return Trajectory(
        tree.ids_along(path),
        loss_mask,
        logprobs,
        tuple(turns),
        first,
        fork_reason=next(
            (tree.fork_reasons[index] for index in reversed(path) if index in tree.fork_reasons),
            None,
        ),
        routed_experts=tree.experts_along(path),
        lineage=tree.lineages.get(path[-1], {}),
        media=tuple(image for index in path for image in tree.images.get(index, ())),
    )
