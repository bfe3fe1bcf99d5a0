"""Requests under way: whoever follows one is woken when it ends, however it ends."""

from __future__ import annotations

import asyncio

from support.patience import PATIENCE

from toolroll.rollout.server.sessions.pending import PendingRequest, PendingRequests


async def test_a_work_that_is_cancelled_before_it_begins_wakes_those_who_follow_it() -> None:
    async def run(work: PendingRequest[int]) -> int:
        raise AssertionError("it never begins")

    work = PendingRequests[int](0.0).start(b"key", 1, run)
    changed = work.changed
    work.task.cancel()
    await asyncio.wait_for(changed.wait(), PATIENCE)
    assert work.failed
