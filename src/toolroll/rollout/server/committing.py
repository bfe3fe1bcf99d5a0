"""Commit an answer to its session: to the tree, and to the journal if the session has one.

Invariants: both have the answers in the same order; an answer that cannot be saved is never
trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from toolroll.rollout.server.completions import TextPrompt
from toolroll.rollout.server.conversation_tree import Prompt
from toolroll.rollout.server.pending import PendingRequest
from toolroll.rollout.server.result import CompletionResult
from toolroll.rollout.server.sessions import LiveSession
from toolroll.rollout.session.node import Node


def commit_chat(
    live: LiveSession,
    prompt: Prompt,
    result: CompletionResult,
    pending: PendingRequest[CompletionResult],
    switches: Mapping[str, Any],
    kind: str = "chat.completion",
) -> None:
    """Commit a chat completion. `switches`: those of the template of `prompt`. `kind`: what the
    trace calls the answer.
    """
    live.check()
    observed = live.tree.observe(prompt)
    source, nodes = ref(pending), []
    for choice in result.choices:
        node = live.session.sample(choice.completion, result.sampling_params, after=observed)
        assert choice.reading is not None
        live.tree.commit(prompt, node, choice.reading).source = source
        live.trace.append((node, kind))
        nodes.append(node)
    if prompt.preserved:
        live.mismatches["preserved"] += 1
    if live.log is not None:
        saved = live.log.chat(prompt, result, pending.key, nodes, switches, kind)
        _wait_for(saved, live, result, nodes)


def commit_text(
    live: LiveSession,
    plan: TextPrompt,
    result: CompletionResult,
    pending: PendingRequest[CompletionResult],
) -> None:
    """Commit a text completion."""
    live.check()
    observed = live.session.observe(plan.delta, after=plan.parent, reason=plan.reason)
    nodes = []
    for choice in result.choices:
        node = live.session.sample(choice.completion, result.sampling_params, after=observed)
        live.texts.append(node)
        live.trace.append((node, "text_completion"))
        nodes.append(node)
    if live.log is not None:
        saved = live.log.text(plan.parent, plan.delta, plan.reason, result, pending.key, nodes)
        _wait_for(saved, live, result, nodes)


def _wait_for(
    saved: asyncio.Future[None],
    live: LiveSession,
    result: CompletionResult,
    nodes: Sequence[Node],
) -> None:
    """Let `result` wait for `saved`, and exclude it from training if that fails."""

    def exclude(done: asyncio.Future[None]) -> None:
        if done.exception() is not None:
            live.session.exclude("the answer could not be saved", nodes)

    saved.add_done_callback(exclude)
    result.saved = saved
