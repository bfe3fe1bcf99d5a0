"""Commit an answer to its session: add it to the session's tree and, if sessions are kept on disk,
write it to the journal.

Invariants: the tree and the journal contain the answers in the same order. An answer that cannot be
saved is never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.rollout.server.answers.result import CompletionResult
from toolroll.rollout.server.conversation.completions import TextPrompt
from toolroll.rollout.server.conversation.conversation_tree import Prompt
from toolroll.rollout.server.conversation.stored_response import KeptResponse
from toolroll.rollout.server.sessions.pending import PendingRequest
from toolroll.rollout.server.sessions.sessions import LiveSession
from toolroll.rollout.session.node import Node

NEW_TEXT = "another text of the same session"


def commit_chat(
    live: LiveSession,
    prompt: Prompt,
    result: CompletionResult,
    pending: PendingRequest[CompletionResult],
    *,
    switches: Mapping[str, Any],
    kind: str,
    lineage: Mapping[str, str],
    kept: KeptResponse | None,
) -> None:
    """Commit a reply of any dialect. `switches`: the switches that the request added to the served
    template (`TemplateCache.switches_of`). `kind`: the name of the reply's API in the trace.
    `lineage`: the client's labels. `kept`: the stored response of the Responses API, if any.
    """
    live.check()
    observed, nodes = live.tree.observe(prompt), []
    for choice in result.choices:
        node = live.session.sample(choice.completion, result.sampling_params, after=observed)
        live.record.add(result.prompt_ids, choice.completion)
        assert choice.reading is not None
        turn = live.tree.commit(prompt, node, choice.reading)
        live.requests[node.index] = pending
        live.trace.append((node, kind))
        if lineage:
            live.session.label(node, lineage)
        if kept is not None:
            live.responses.add(turn, kept)
        nodes.append(node)
    if prompt.preserved:
        live.mismatches["preserved"] += 1
    if live.log is not None:
        saved = live.log.chat(
            prompt,
            result,
            pending.key,
            nodes,
            switches=switches,
            kind=kind,
            lineage=lineage,
            kept=kept,
        )
        _wait_for(saved, live, result, nodes)


def commit_text(
    live: LiveSession,
    plan: TextPrompt,
    result: CompletionResult,
    pending: PendingRequest[CompletionResult],
) -> None:
    """Commit a text completion."""
    live.check()
    reason = NEW_TEXT if plan.parent is None and live.session.nodes else None
    observed = live.session.observe(plan.delta, after=plan.parent, reason=reason)
    nodes = []
    for choice in result.choices:
        node = live.session.sample(choice.completion, result.sampling_params, after=observed)
        live.record.add(result.prompt_ids, choice.completion)
        live.texts.append(node)
        live.trace.append((node, "text_completion"))
        nodes.append(node)
    if live.log is not None:
        saved = live.log.text(plan.parent, plan.delta, reason, result, pending.key, nodes)
        _wait_for(saved, live, result, nodes)


def _wait_for(
    saved: asyncio.Future[None],
    live: LiveSession,
    result: CompletionResult,
    nodes: Sequence[Node],
) -> None:
    """Store `saved` in `result`, so that the answer is returned only once it is on disk. If saving
    fails, exclude `nodes` from training.
    """

    def exclude(done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None:
            live.session.exclude("the answer could not be saved", nodes)

    saved.add_done_callback(exclude)
    result.saved = saved
