"""Time in which a server is waited for is no part of an episode's or a step's time."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from support.client import client_of, request
from support.http import completion, says
from support.loop_clock import skip

from toolroll.rollout.runtime.time_limit import not_counted, pausable


@pytest.mark.parametrize("first_out", [0, 1])
async def test_two_at_once_in_one_episode_pause_it_until_both_are_over(first_out: int) -> None:
    go = [asyncio.Event(), asyncio.Event()]

    async def wait(at: int) -> None:
        with not_counted(), not_counted():
            await go[at].wait()

    async with asyncio.timeout(600) as limit:
        end = limit.when()
        assert end is not None
        with pausable(limit):
            waiting = [asyncio.create_task(wait(at)) for at in range(2)]
            await asyncio.sleep(0)
            skip(601)
            go[first_out].set()
            await waiting[first_out]
            assert limit.when() is None
            skip(601)
            go[1 - first_out].set()
            await waiting[1 - first_out]
            now = limit.when()
            assert now is not None
            assert now - end == pytest.approx(1202, abs=10)
            with not_counted():
                skip(601)
            await asyncio.sleep(0)
    assert limit.when() == pytest.approx(end + 1803, abs=10)


async def test_a_limit_that_is_over_stays_over() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600) as limit:
            with pausable(limit):
                skip(601)
                try:
                    await asyncio.sleep(10)
                finally:
                    with not_counted():
                        assert limit.expired()


async def test_an_abort_after_a_broken_connection_takes_no_time() -> None:
    asked: list[str] = []

    async def generate(http: web.Request) -> web.StreamResponse:
        asked.append(http.path)
        if len(asked) == 1:
            assert http.transport is not None
            http.transport.abort()
        return web.json_response(completion([3]))

    async def abort(http: web.Request) -> web.StreamResponse:
        asked.append(http.path)
        skip(601)
        return await says({})(http)

    routes = {"/generate": generate, "/abort_request": abort}
    async with client_of(routes, abort_timeout=10_000) as engine:
        async with asyncio.timeout(600) as limit:
            with pausable(limit):
                found = await engine.generate(request())
    assert asked == ["/generate", "/abort_request", "/generate"]
    assert found.output_ids.tolist() == [3]
