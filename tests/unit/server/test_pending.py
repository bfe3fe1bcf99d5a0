"""Requests under way: whoever follows one is woken when it ends, however it ends."""

from __future__ import annotations

import asyncio

from support.patience import PATIENCE

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.sessions.pending import PendingRequest, PendingRequests


class Request(PendingRequest):
    async def run(self) -> CompletionResult:
        raise AssertionError("it never begins")


async def test_each_choice_of_a_request_is_a_turn_until_it_is_committed() -> None:
    requests, request = PendingRequests(0.0), Request(b"key", 4)
    requests.start(request)
    assert (requests.in_flight, requests.turns) == (1, 4)
    request.committed = True
    assert (requests.in_flight, requests.turns) == (1, 0)
    request.task.cancel()


async def test_a_request_that_is_cancelled_before_it_begins_wakes_those_who_follow_it() -> None:
    request = Request(b"key", 1)
    PendingRequests(0.0).start(request)
    changed = request.changed
    request.task.cancel()
    await asyncio.wait_for(changed.wait(), PATIENCE)
    assert request.failed
