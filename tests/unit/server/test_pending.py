"""Requests under way: whoever follows one is woken when it ends, however it ends."""

from __future__ import annotations

import asyncio

from support.patience import PATIENCE

from toolroll.rollout.server.answers.result import CompletionResult
from toolroll.rollout.server.sessions.pending import PendingRequest, PendingRequests


class Request(PendingRequest):
    async def run(self) -> CompletionResult:
        raise AssertionError("it never begins")


async def test_a_request_that_is_cancelled_before_it_begins_wakes_those_who_follow_it() -> None:
    request = Request(b"key", 1)
    PendingRequests(0.0).start(request)
    changed = request.changed
    request.task.cancel()
    await asyncio.wait_for(changed.wait(), PATIENCE)
    assert request.failed
