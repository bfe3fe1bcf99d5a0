"""Commit an answer to its session: add it to the session's tree and, if sessions are kept on disk,
write it to the journal.

Invariants: the tree and the journal contain the answers in the same order. An answer that cannot be
saved is never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from toolroll.rollout.server.completions import TextPrompt
from toolroll.rollout.server.conversation_tree import Prompt
from toolroll.rollout.server.dialects.dialect import ParsedRequest
from toolroll.rollout.server.pending import PendingRequest
from toolroll.rollout.server.result import CompletionResult
from toolroll.rollout.server.sessions import LiveSession
from toolroll.rollout.session.tree import Node

NEW_TEXT = "another text of the same session"


def commit_chat(
    live: LiveSession,
    prompt: Prompt,
    parsed: ParsedRequest,
    result: CompletionResult,
    pending: PendingRequest[CompletionResult],
    switches: Mapping[str, Any],
) -> None:
    """Commit a reply of any dialect. `switches`: the switches that the request added to the served
    template (`TemplateCache.switches_of`).
    """
    dialect, asked = parsed.dialect, parsed.asked
    assert dialect is not None and asked is not None
    live.check()
    observed = live.tree.observe(prompt)
    source, nodes, kept = ref(pending), [], dialect.kept(asked, result)
    for choice in result.choices:
        node = live.session.sample(choice.completion, result.sampling_params, after=observed)
        live.record.add(result.prompt_ids, choice.completion)
        assert choice.reading is not None
        turn = live.tree.commit(prompt, node, choice.reading)
        turn.source = source
        live.trace.append((node, dialect.kind))
        if asked.lineage:
            live.session.label(node, asked.lineage)
        if kept is not None:
            live.responses.add(turn, kept)
        nodes.append(node)
    if prompt.preserved:
        live.mismatches["preserved"] += 1
    if live.log is not None:
        saved = live.log.chat(
            prompt, result, pending.key, nodes, switches, dialect.kind, asked.lineage, kept
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
