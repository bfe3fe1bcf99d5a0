"""An engine that is another model's since its connections broke: its tokens are not accepted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from support.client import client, request
from support.http import completion, http_server, says
from support.processes import free_ports

from toolroll.rollout.engine import Engine, EngineConfig, ModelInfo
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.types import Completion
from toolroll.testing import load_embedded_tokenizer

CHANGED = "now serves a different model: 'b' instead of 'a'"


class ModelRoutes:
    """The routes of an engine with one answer; `info` is its `/model_info`, a status if it
    fails.
    """

    def __init__(self, info: Any) -> None:
        self.info = info
        self.asked: Counter[str] = Counter()
        self.all_there = asyncio.Event()
        self.together = 0
        """So many requests are answered at once, at the end."""
        self.connections: set[Any] = set()
        self.busy = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.routes = {
            "/generate": self.generate,
            "/model_info": self.model_info,
            "/abort_request": says({}),
        }

    async def until(self, count: int) -> None:
        """Wait for so many requests, and for what their answers lead to."""
        while self.asked["generate"] < count:
            await asyncio.sleep(0.001)
        for _ in range(3):
            await asyncio.sleep(0.001)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        self.asked["generate"] += 1
        self.connections.add(http.transport)
        body = await http.json()
        if self.asked["generate"] >= self.together:
            self.all_there.set()
        await self.all_there.wait()
        answer = web.json_response(completion([3], id=body["rid"]))
        if not body["stream"]:
            return answer
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await events.prepare(http)
        await events.write(b"data: " + (answer.body or b"") + b"\n\ndata: [DONE]\n\n")  # type: ignore[operator]
        return events

    async def model_info(self, http: web.Request) -> web.StreamResponse:
        self.asked["model_info"] += 1
        info = self.info
        self.busy.set()
        await self.go.wait()
        return web.Response(status=info) if isinstance(info, int) else web.json_response(info)


async def play_twice(
    first: Any, second: Any, *, progress: Any = None, **config: Any
) -> ModelRoutes:
    """Sample from an engine, start it again as another one, and sample from that."""
    before, after = ModelRoutes(first), ModelRoutes(second)
    async with http_server(before.routes) as url:
        engine = Engine(EngineConfig(engine=url, **config))
        assert (await engine.generate(request())).output_ids.tolist() == [3]
    port = int(url.rpartition(":")[2])
    async with engine, http_server(after.routes, port=port):
        found = await engine.generate(request(), progress=progress)
        assert found.output_ids.tolist() == [3]
    return after


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_that_nobody_saw_restart_is_refused(streamed: bool) -> None:
    """Without an `engine_timeout`, and no request was in flight."""
    sampled: list[int] = []
    with pytest.raises(UsageError, match=CHANGED):
        progress = sampled.extend if streamed else None
        await play_twice({"model_path": "a"}, {"model_path": "b"}, progress=progress)
    assert sampled == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model_path": "a"}, {"model_path": "a"}),
        ({"model_path": "a"}, 404),
        ({"model_path": "a"}, 500),
        ({"model_path": "a"}, {}),
        (404, {"model_path": "b"}),
        # SGLang's /update_weights_from_disk changes the path
        ({"model_path": "a", "tokenizer_path": "t"}, {"model_path": "b", "tokenizer_path": "t"}),
    ],
)
async def test_one_that_may_be_the_same_is_not(first: Any, second: Any) -> None:
    assert (await play_twice(first, second)).asked["model_info"] == 1


async def test_a_model_that_could_not_be_asked_for_is_asked_for_by_the_next_answer() -> None:
    model = ModelRoutes({"model_path": "a"})
    async with http_server(model.routes) as url, client(url, model_info=None) as engine:
        await engine.generate(request())
        model.info = 500
        await asyncio.gather(*(engine.generate(request(session=str(at))) for at in range(4)))
        model.info = {"model_path": "b", "tokenizer_path": "b"}
        with pytest.raises(UsageError, match=CHANGED):
            await engine.generate(request())


async def test_a_mismatch_that_is_allowed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await play_twice({"model_path": "a"}, {"model_path": "b"}, allow_model_mismatch=True)
    assert [record.getMessage()[-len(CHANGED) :] for record in caplog.records] == [CHANGED]


def test_the_setting_reaches_the_client() -> None:
    args = RolloutArgs(model="embedded", allow_model_mismatch=True, pace_gc=False)
    engine = Model.from_args(args, tokenizer=load_embedded_tokenizer()).engine
    assert isinstance(engine, Engine)
    assert engine.config.allow_model_mismatch


async def test_a_thousand_episodes_at_once_ask_a_handful_of_times() -> None:
    model = ModelRoutes({"model_path": "a"})
    model.together = 1024
    async with http_server(model.routes) as url, client(url, model_info=None) as engine:
        waiting = (engine.generate(request(session=str(at))) for at in range(1024))
        await asyncio.gather(*waiting)
        at_first = model.asked["model_info"]
        for _ in range(3):
            await engine.generate(request())
    assert len(model.connections) >= 1024
    assert at_first < 5
    assert model.asked == {"generate": 1027, "model_info": at_first}, "no new connection"


async def test_a_question_that_was_under_way_does_not_count() -> None:
    """It may have been answered before the engine was started again."""
    model = ModelRoutes({"model_path": "a"})
    async with held(model) as (first, engine):
        model.info = {"model_path": "b"}
        late = [asyncio.create_task(engine.generate(request())) for _ in range(8)]
        await model.until(9)
        model.go.set()
        found = await asyncio.gather(first, *late, return_exceptions=True)
    assert [type(one) for one in found] == [Completion] + 8 * [UsageError]
    assert model.asked["model_info"] == 2


async def test_if_the_one_who_asks_is_cancelled_another_does() -> None:
    model = ModelRoutes({"model_path": "b"})
    async with held(model) as (first, engine):
        others = [asyncio.create_task(engine.generate(request())) for _ in range(8)]
        await model.until(9)
        first.cancel()
        await asyncio.wait([first])
        model.go.set()
        found = await asyncio.gather(*others, return_exceptions=True)
    assert [type(one) for one in found] == 8 * [UsageError]
    assert model.asked["model_info"] == 2


@asynccontextmanager
async def held(model: ModelRoutes) -> AsyncIterator[tuple[asyncio.Task[Completion], Engine]]:
    """Give a request whose question for the model has arrived, and its client, which knows "a"."""
    info = ModelInfo(context_length=1000, vocab_size=5000, model_path="a")
    model.go.clear()
    async with http_server(model.routes) as url, client(url, model_info=info) as engine:
        first = asyncio.create_task(engine.generate(request()))
        await model.busy.wait()
        yield first, engine


def test_another_event_loop_asks_again() -> None:
    """Also if many requests waited for the answer in the first one."""
    config: dict[str, Any] = {"context_length": 100, "vocab_size": 1000}

    async def play(engine: Engine, model: ModelRoutes, port: int) -> None:
        model.all_there, model.busy, model.go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        model.go.set()
        async with http_server(model.routes, port=port):
            await asyncio.gather(*(engine.generate(request()) for _ in range(8)))

    port = free_ports(1)[0]
    engine = Engine(EngineConfig(engine=f"http://127.0.0.1:{port}", **config))
    for _ in range(2):
        model = ModelRoutes({"model_path": "a"})
        model.together = 8
        asyncio.run(play(engine, model, port))
        assert model.asked["generate"] == 8 and model.asked["model_info"] >= 1
