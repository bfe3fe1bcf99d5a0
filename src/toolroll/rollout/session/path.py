"""`SessionPath`: one path through a session's tree, as an episode follows it turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolroll.rollout.errors import TokenError
from toolroll.rollout.media import Image
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.session.session import Session, checked_ids
from toolroll.rollout.session.tree import GrowableArray, Node
from toolroll.rollout.types import Completion, IdArray


class SessionPath:
    """The current path of an episode, from a root of `session` to `head`.

    Invariant: `observe` and `sample` only append, so the prompt of turn n+1 starts with the prompt
    and the tokens of turn n (I1 in docs/guarantees.md). Only `fork` switches to another path.

    The ids and their JSON text grow with the path, so they are not rebuilt for each request.

    Example:
        path = SessionPath(Session("episode-1"))
        path.observe([1, 2, 3])  # the first prompt
        path.sample(completion, {"temperature": 1.0})
        path.observe([4, 5])  # a tool result
        path.input_ids  # the next prompt: 1, 2, 3, the sampled ids, 4, 5
    """

    __slots__ = ("_ids", "_json", "_length", "head", "images", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.head: Node | None = None
        self.images: tuple[Image, ...] = ()
        """The images in the path, in order."""
        self._ids = session.ids  # the session's own array, as long as this is its only path
        self._json, self._length = bytearray(), 0

    def observe(self, ids: Sequence[int] | IdArray, images: tuple[Image, ...] = ()) -> Node:
        """Append tokens that the environment or template wrote (mask 0). Return their node.
        `images`: the images in `ids`, with their positions there.
        """
        if images:
            images = tuple(replace(each, position=self._length + each.position) for each in images)
            self.images += images
        return self._append(self.session.observe(ids, after=self.head, images=images))

    def sample(self, completion: Completion, sampling_params: Mapping[str, Any]) -> Node:
        """Append a completion, with mask 1 and its logprobs. Its prompt must be `input_ids`.

        Raise `TokenError` if the completion has different numbers of ids and logprobs, or if there
        is no prompt yet.
        """
        if self.head is None:
            raise TokenError("a session cannot start with a completion: observe its prompt first")
        return self._append(self.session.sample(completion, sampling_params, after=self.head))

    def fork(
        self, input_ids: Sequence[int] | IdArray, reason: str, images: tuple[Image, ...] = ()
    ) -> Node:
        """Switch to a new path whose prompt is `input_ids`, with `images`. `reason` is stored with
        the new path's first node.

        The new path shares the old path's first nodes, as long as their tokens match `input_ids`.
        Turns that were sampled in shared nodes are trained in the old path only.
        """
        ids = checked_ids(input_ids)
        shared = self.session.shared_prefix(ids, self.head, images)
        stop = shared.stop if shared is not None else 0
        new = tuple(image for image in images if image.position >= stop)
        node = self.session.observe(ids[stop:], after=shared, reason=reason, images=new)
        self.head, self.images = shared, images
        self._ids = GrowableArray(np.intc)
        self._json, self._length = bytearray(), 0
        self._ids.append(ids[:stop])
        self._write(ids[:stop])
        return self._append(node)

    def _append(self, node: Node) -> Node:
        self.head, ids = node, node.ids
        if self._ids is not self.session.ids:
            self._ids.append(ids)
        elif len(self._ids) != self._length + len(ids):  # another path was extended since
            self._ids = GrowableArray(np.intc)
            self._ids.append(self.session.path_ids(node))
        self._write(ids)
        return node

    def _write(self, ids: IdArray) -> None:
        """Append `ids` to the JSON text. Each id is encoded once."""
        if len(ids):
            self._json += b"," + ids_json(ids) if self._json else ids_json(ids)
            self._length += len(ids)

    # --- reading ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    @property
    def input_ids(self) -> IdArray:
        """The ids of the path, which are the next request's prompt. This is a read-only int32 view.
        Later tokens do not change it.
        """
        return self._ids.view(0, self._length)

    @property
    def experts_end(self) -> int:
        """The first token whose experts the next completion must have."""
        return self.session.experts_end(self.head)

    @property
    def input_ids_json(self) -> bytes:
        """`input_ids` as JSON text without brackets: "1,2,3"."""
        return bytes(self._json)
