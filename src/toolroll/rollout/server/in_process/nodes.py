"""`SequenceNode`: a token sequence in Atropos' form. Masked tokens are -100, and prompt tokens have
the logprob 1.0.

Invariants: a token without loss in this node is masked and has the logprob 1.0. Such a token
belongs to a prompt, or to a reply that is excluded from training or trained in another node. A
token with loss has the engine's logprob. If the engine gave none, `TokenError` is raised. A sampled
token that is not excluded from training is unmasked in exactly one node of a state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from toolroll.rollout.session.session import Session, check_trained_logprobs
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import IdArray, Trajectory

MASKED = -100
PROMPT_LOGPROB = 1.0


class SequenceNode(BaseModel):
    """One sequence. All lists have the same length."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None


def trajectory_node(trajectory: Trajectory, encoder: Encoder) -> SequenceNode:
    """Return `trajectory` as one node."""
    trained = trajectory.loss_mask.astype(bool)
    last = trajectory.turns[-1] if trajectory.turns else None
    metadata = {
        "finish_reason": last.finish_reason if last is not None else None,
        "turns": len(trajectory.turns),
        "fork_reason": trajectory.fork_reason,
    }
    logprobs = np.where(trained, trajectory.logprobs, PROMPT_LOGPROB)
    text = encoder.decode(trajectory.input_ids)
    return _node(text, trajectory.input_ids, trained, logprobs, metadata)


def tree_nodes(
    session: Session, sampled: Sequence[Node], encoder: Encoder
) -> dict[str, SequenceNode]:
    """Return one sequence for each node in `sampled`: the tokens from the root to the node. The key
    is the text of the sequence. If several sequences have the same text (identical answers to one
    prompt), the keys of the later ones get the suffix "#2", "#3" and so on.

    `metadata["parent"]` is the key of the last sampled node on the path to this node, or None.
    """
    keys: dict[Node, str] = {}
    nodes: dict[str, SequenceNode] = {}
    for node in sampled:
        ids = session.path_ids(node)
        text = encoder.decode(ids)
        key = keys[node] = new_key(text, nodes)
        completion = node.completion
        assert completion is not None
        trained = np.zeros(len(ids), dtype=bool)
        trained[node.start :] = node.excluded is None
        logprobs = np.full(len(ids), PROMPT_LOGPROB)
        if node.excluded is None:
            sampled_logprobs = completion.logprobs
            logprobs[node.start :] = np.nan if sampled_logprobs is None else sampled_logprobs
        parent = next((keys[step] for step in reversed(node.path()[:-1]) if step in keys), None)
        metadata = {"finish_reason": completion.finish_reason, "parent": parent}
        nodes[key] = _node(text, ids, trained, logprobs, metadata)
    return nodes


def new_key(text: str, taken: Collection[str]) -> str:
    """Return `text`. If it is in `taken`, add the first suffix "#2", "#3" ... that makes it new."""
    names = (text, *(f"{text}#{number}" for number in range(2, len(taken) + 2)))
    return next(name for name in names if name not in taken)


def _node(
    text: str,
    ids: IdArray,
    trained: npt.NDArray[np.bool_],
    logprobs: npt.NDArray[np.floating],
    metadata: Mapping[str, Any],
) -> SequenceNode:
    check_trained_logprobs(logprobs, trained)
    return SequenceNode(
        full_text=text,
        tokens=ids.tolist(),
        masked_tokens=np.where(trained, ids, MASKED).tolist(),
        logprobs=logprobs.tolist(),
        metadata={"trainable": bool(trained.any()), **metadata},
    )
