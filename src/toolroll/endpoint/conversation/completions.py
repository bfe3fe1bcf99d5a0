"""Find the sampled node that the prompt of a text completion continues. The prompt is text or ids.

Invariants: the node with the longest sequence (the ids from the root to the node) wins. A prompt of
ids extends a node if it starts with the node's sequence. A prompt of text extends a node only if it
starts with the node's whole text, and if the tokenizer does not merge tokens across the end of this
text. For example, "42" does not extend "4" if the tokenizer has one token for "42". Each text is
decoded once, and only its length and digest are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from toolroll.endpoint.errors import invalid
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import IdArray

_SEAM = 8
"""The number of a node's last tokens that are encoded again, together with the rest of the prompt,
to check that the tokenizer does not merge tokens across the end of the node.
"""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The prompt of a text completion, with its place in the session's tree.

    `input_ids` is the whole prompt, `parent` is the node that it extends (None: a new root), and
    `delta` is the ids after that node.
    """

    input_ids: IdArray
    parent: Node | None
    delta: IdArray


def check_prompt(
    prompt: str | list[int], vocab_size: int | None, placeholders: Mapping[int, str]
) -> None:
    """Raise `ApiError` if `prompt` is empty, or contains an id that is not in the vocabulary or a
    token that stands for an image. `placeholders`: the texts of these tokens by id.
    """
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    for index, text in placeholders.items():
        if text in prompt if isinstance(prompt, str) else index in prompt:
            problem = f"the prompt contains {text} (id {index}), which stands for an image, a video"
            raise invalid("prompt", f"{problem} or audio: this endpoint serves text only")
    limit = vocab_size if vocab_size is not None else 2**31
    if not isinstance(prompt, str) and not all(0 <= index < limit for index in prompt):
        problem = f"the prompt contains an id outside the vocabulary of {limit} tokens"
        raise invalid("prompt", problem)


def plan_text(index: CompletionIndex, prompt: str | list[int], encoder: Encoder) -> TextPrompt:
    """Find the node in `index` that `prompt` extends, and return the prompt with its exact ids.
    The session does not change. `check_prompt` must have accepted `prompt`.
    """
    if isinstance(prompt, str):
        extended = _extended_text(index, prompt, encoder)
        if extended is not None:
            return extended
        ids = np.array(encoder.encode(prompt), dtype=np.int32)
        return TextPrompt(ids, None, ids)
    ids = np.array(prompt, dtype=np.int32)
    node = index.before_ids(ids)
    return TextPrompt(ids, node, ids[node.stop if node else 0 :])


def _extended_text(index: CompletionIndex, prompt: str, encoder: Encoder) -> TextPrompt | None:
    for node, length in index.before_text(prompt, encoder):
        before, behind = index.session.path_ids(node), prompt[length:]
        new_ids = encoder.encode(behind, previous=int(before[-1]))
        seam = before[-_SEAM:].tolist()
        seam_text = encoder.decode(seam)
        if encoder.encode(seam_text + behind) == [*encoder.encode(seam_text), *new_ids]:
            delta = np.array(new_ids, dtype=np.int32)
            return TextPrompt(np.concatenate([before, delta]), node, delta)
    return None


# --- the index ------------------------------------------------------------------------------------


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
        prefixes: list[tuple[Node, int]] = []
        read, digest = 0, blake2b(digest_size=16)
        for length in sorted(self._by_text):
            if length > len(prompt):
                break
            digest.update(_bytes(prompt[read:length]))
            read = length
            prefixes += [(node, length) for node in self._by_text[length].get(digest.digest(), ())]
        return sorted(prefixes, key=lambda item: -item[0].stop)

    def _decode_new(self, encoder: Encoder) -> None:
        count = len(self._nodes)  # more may be appended while a thread decodes these
        for node in self._nodes[self._decoded : count]:
            text = encoder.decode(self.session.path_ids(node))
            same = self._by_text.setdefault(len(text), {})
            same.setdefault(blake2b(_bytes(text), digest_size=16).digest(), []).append(node)
        self._decoded = count


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
