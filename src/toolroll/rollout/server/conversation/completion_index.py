"""`CompletionIndex`: finds the text completion that a prompt continues. The prompt is ids or text.

Invariants: each text is decoded once, and only its length and digest are kept. A lookup by text
reads the prompt once, however many texts there are.
"""

from __future__ import annotations

from hashlib import blake2b

from toolroll.rollout.session.node import Node
from toolroll.rollout.session.session import Session
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import IdArray


class CompletionIndex:
    """The nodes of `session` that were returned as text completions."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._nodes: list[Node] = []
        self._decoded = 0
        self._by_text: dict[int, dict[bytes, list[Node]]] = {}

    def append(self, node: Node) -> None:
        """Add a sampled node."""
        self._nodes.append(node)

    def before_ids(self, ids: IdArray) -> Node | None:
        """Return the node whose sequence (the ids from the root to the node) is the longest prefix
        of `ids`. If several sequences have this length, return the node that was added first.
        """
        fitting = [
            node
            for node in self._nodes
            if node.stop <= len(ids) and self.session.shared_prefix(ids, node) == node
        ]
        return max(fitting, key=lambda node: node.stop, default=None)

    def before_text(self, prompt: str, encoder: Encoder) -> list[tuple[Node, int]]:
        """Return the nodes whose whole text is a prefix of `prompt`, each with the length of its
        text in characters. The node with the most tokens comes first.
        """
        self._decode_new(encoder)
        found: list[tuple[Node, int]] = []
        read, digest = 0, blake2b(digest_size=16)
        for length in sorted(self._by_text):
            if length > len(prompt):
                break
            digest.update(_bytes(prompt[read:length]))
            read = length
            found += [(node, length) for node in self._by_text[length].get(digest.digest(), ())]
        return sorted(found, key=lambda item: -item[0].stop)

    def _decode_new(self, encoder: Encoder) -> None:
        known = len(self._nodes)  # more may be appended while a thread decodes these
        for node in self._nodes[self._decoded : known]:
            text = encoder.decode(self.session.path_ids(node))
            same = self._by_text.setdefault(len(text), {})
            same.setdefault(blake2b(_bytes(text), digest_size=16).digest(), []).append(node)
        self._decoded = known


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
