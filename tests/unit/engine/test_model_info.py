"""`Engine`: model info, workers, health, plain posts, the configuration, and another model."""

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from support.client import client, client_of, embedded, request
from support.endpoints import endpoint
from support.episodes import agent
from support.http import completion, http_server, says
from support.loop_clock import skip
from support.toy_environment import PondFactory, look

from toolroll import ChatTemplate, EnvironmentOptions, Model, RolloutArgs
from toolroll.endpoint.endpoint import Endpoint
from toolroll.rollout.engine import Engine, EngineConfig, ModelInfo
from toolroll.rollout.errors import EngineError, UsageError
from toolroll.rollout.model.identity import check_identity
from toolroll.testing import EmbeddedEngine, PolicyRequest

# --- model info, workers, health, post ------------------------------------------------------------


def listing(workers: list[dict[str, str]], statuses: list[int] | None = None) -> Any:
    """A handler of `/workers` that lists what `workers` has by now, with `statuses` first."""

    async def handle(http: web.Request) -> web.StreamResponse:
        body = orjson.dumps({"workers": workers})
        return web.Response(body=body, status=statuses.pop(0) if statuses else 200)

    return handle


async def test_model_info_and_the_config_that_overrides_it(tokenizer: Any) -> None:
    async with embedded(tokenizer, context_length=2048) as (engine, _):
        async with client(engine.url, model_info=None, vocab_size=77) as calls:
            infos = await asyncio.gather(*(calls.model_info() for _ in range(5)))
        assert set(infos) == {
            ModelInfo(2048, 77, "default", "embedded", 2041, sglang_version="0.5.23+embedded")
        }
        async with client(engine.url, model_info=None, context_length=512) as calls:
            assert (await calls.model_info()).context_length == 512


async def test_our_endpoint_is_not_an_engine(tokenizer: Any) -> None:
    """Before an episode is played: each would be aborted, since there is no /generate."""
    async with (
        endpoint(tokenizer, lambda request: "Hello.") as bench,
        client(bench.url, model_info=None) as calls,
    ):
        with pytest.raises(UsageError, match="is `toolroll serve`, which has no /generate"):
            await calls.model_info()


async def test_a_router_without_workers_is_asked_again(tokenizer: Any) -> None:
    """Also for its model if the configuration sets the context length."""
    workers: list[dict[str, str]] = []
    async with (
        embedded(tokenizer) as (engine, _),
        client_of({"/workers": listing(workers)}, model_info=None, context_length=512) as calls,
    ):
        assert await calls.workers() == [calls.url]
        assert await calls.model_info() == ModelInfo(512)
        workers.append({"url": engine.url})
        assert await calls.workers() == [engine.url]
        assert (await calls.model_info()).weight_version == "default"


async def test_a_router_that_did_not_list_its_workers_is_asked_again(tokenizer: Any) -> None:
    statuses = [503, 200]
    async with embedded(tokenizer, context_length=2048) as (engine, _):
        listed = listing([{"url": engine.url}], statuses)
        async with client_of({"/workers": listed}, model_info=None) as calls:
            assert (await calls.model_info()).context_length is None
            assert (await calls.model_info()).context_length == 2048
            assert await calls.workers() == [engine.url]
    assert statuses == []


async def test_a_router_is_asked_again_for_its_workers() -> None:
    """Until it names some, the earlier ones and what it drops stay known."""
    workers = [{"url": "http://10.0.0.1:1"}]
    async with client_of({"/workers": listing(workers)}) as calls:
        assert await calls.workers() == ["http://10.0.0.1:1"]
        workers.clear()
        skip(60)
        assert await calls.workers() == ["http://10.0.0.1:1"] and await calls.dropped_params()
        workers.append({"url": "http://10.0.0.1:2"})
        skip(60)
        assert await calls.workers() == ["http://10.0.0.1:2"]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_could_not_be_asked_is_asked_again(status: int) -> None:
    """Else prompts without room would be sent."""
    paths: list[str] = []

    async def cards(http: web.Request) -> web.StreamResponse:
        paths.append(http.path)
        if len(paths) == 1:
            return web.Response(status=status)
        return web.Response(body=b'{"data": [{"max_model_len": 300}]}')

    async with client_of({"/v1/models": cards}, model_info=None) as calls:
        infos = await asyncio.gather(*(calls.model_info() for _ in range(5)))
        assert {info.context_length for info in infos} == {None}
        assert len(paths) == 1, "those who wait for one answer share it"
        assert [(await calls.model_info()).context_length for _ in range(3)] == [300] * 3
    assert len(paths) == 2


async def test_an_engine_that_was_not_there_yet_is_asked_again(tokenizer: Any) -> None:
    async with client("http://127.0.0.1:9", model_info=None, connect_timeout=0.5) as calls:
        assert await calls.workers() == [calls.url]
        assert await calls.model_info() == ModelInfo()
        assert calls._control_plane._workers is None and calls._control_plane._model_info is None


NO_WORKERS = {"code": "no_available_workers", "message": "all circuits open"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "no /health: this is not an SGLang engine or router"),
        (says({"error": {"message": "starting"}}, status=503), "answers 503: starting"),
        (says({"error": NO_WORKERS}, status=503), "--disable-circuit-breaker"),
        (says(b"", status=500), "answers 500: without a message"),
    ],
)
async def test_health_says_why_not(answer: Any, words: str) -> None:
    async with client_of({"/health": answer} if answer else {}) as calls:
        health = await calls.health()
    assert not health.ok and words in health.why


async def test_post_gives_the_json_or_an_engine_error() -> None:
    routes = {"/x": says({"a": 1}), "/bad": says({"error": "no"}, status=422)}
    async with client_of(routes) as calls:
        url = calls.url
        assert await calls.post(f"{url}/x", {"b": np.arange(2)}) == {"a": 1}
        with pytest.raises(EngineError, match="no") as raised:
            await calls.post(f"{url}/bad", {})
        assert raised.value.status == 422
    async with client(url) as calls:
        with pytest.raises(EngineError, match="no answer from the engine"):
            await calls.post(f"{url}/x", {})


@pytest.mark.parametrize(
    "listed",
    [
        "http://h:1",
        {"workers": True},
        {"workers": {"url": "http://h:1"}},
        {"workers": [{"url": 7}, {"url": "ftp://h"}, {"url": "http://[h"}, {"url": True}, 5]},
    ],
)
async def test_a_list_of_workers_that_is_none_is_not_used(listed: Any) -> None:
    async with client_of({"/workers": says(listed)}, model_info=None) as calls:
        assert await calls.workers() == [calls.url]
        assert (await calls.model_info()).context_length is None


@pytest.mark.parametrize("position", [0, 1])
async def test_a_silent_worker_costs_one_time_limit(tokenizer: Any, position: int) -> None:
    """Also if it is the second one: then it is not asked to encode."""
    paths: list[str] = []

    async def silent(http: web.Request) -> web.StreamResponse:
        paths.append(http.path)
        return await asyncio.get_running_loop().create_future()

    routes = ("/model_info", "/server_info", "/v1/models", "/tokenize", "/v1/loads")
    async with (
        embedded(tokenizer) as (engine, _),
        http_server(dict.fromkeys(routes, silent)) as worker,
    ):
        workers = [{"url": engine.url}]
        workers.insert(position, {"url": worker})
        limit: Any = {"model_info": None, "connect_timeout": 0.2}
        async with client_of({"/workers": listing(workers)}, **limit) as calls:
            if position == 0:
                for _ in range(3):
                    await calls.model_info()
                assert await calls.workers() == [engine.url]
            template = ChatTemplate(tokenizer)
            assert await check_identity(calls, template, name="embedded") == []
    assert paths == ["/model_info"]


# --- an engine that restarted with another model --------------------------------------------------


CHANGED = "now serves a different model: 'b' instead of 'a'"


async def restarted(first: Any, second: Any, **config: Any) -> None:
    """Sample from an engine, start it again as another one, sample from that, and compare.

    `first` and `second`: the answers to `/model_info`, a status if it fails.
    """
    async with http_server(routes(first)) as url:
        engine = Engine(EngineConfig(engine=url, **config))
        assert (await engine.generate(request())).output_ids.tolist() == [3]
        await engine.check_model()
    async with engine, http_server(routes(second), port=int(url.rpartition(":")[2])):
        assert (await engine.generate(request())).output_ids.tolist() == [3]
        await engine.check_model()


def routes(info: Any) -> dict[str, Any]:
    model_info = says({}, status=info) if isinstance(info, int) else says(info)
    return {"/generate": says(completion([3])), "/model_info": model_info}


async def test_one_that_nobody_saw_restart_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Without an `engine_timeout`, and no request was in flight. If it is allowed, that is a
    warning.
    """
    with pytest.raises(UsageError, match=CHANGED):
        await restarted({"model_path": "a"}, {"model_path": "b"})
    await restarted({"model_path": "a"}, {"model_path": "b"}, allow_model_mismatch=True)
    assert [record.getMessage()[-len(CHANGED) :] for record in caplog.records] == [CHANGED]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"model_path": "a"}, {"model_path": "a"}),
        ({"model_path": "a"}, 404),
        ({"model_path": "a"}, {}),
        (404, {"model_path": "b"}),
        # SGLang's /update_weights_from_disk changes the path
        ({"model_path": "a", "tokenizer_path": "t"}, {"model_path": "b", "tokenizer_path": "t"}),
    ],
)
async def test_one_that_may_be_the_same_is_not(first: Any, second: Any) -> None:
    await restarted(first, second)


async def test_a_model_that_could_not_be_asked_for_is_asked_for_again() -> None:
    served = routes({"model_path": "a"})

    async def model_info(http: web.Request) -> web.StreamResponse:
        return await served["/model_info"](http)

    async with client_of({**served, "/model_info": model_info}, model_info=None) as engine:
        await engine.generate(request())
        served |= routes(500)
        await engine.check_model()
        served |= routes({"model_path": "b", "tokenizer_path": "b"})
        for _ in range(2):
            with pytest.raises(UsageError, match=CHANGED):
                await engine.check_model()


class Restarting(EmbeddedEngine):
    """Reports another model after `restart`."""

    other = ""

    @property
    def model_name(self) -> str:
        return self.other or super().model_name

    def restart(self) -> None:
        self.other = self.model_path = "other"


async def test_an_episode_is_compared_once_after_its_last_turn(tokenizer: Any) -> None:
    """The engine restarts between two turns, and no request fails."""
    asked: list[int] = []
    turns: list[PolicyRequest] = []

    def policy(seen: PolicyRequest) -> str:
        turns.append(seen)
        if len(turns) == 2:
            engine.restart()
        return look(seen)

    class Watched(Engine):
        async def check_model(self) -> None:
            asked.append(len(turns))
            await super().check_model()

    factory = PondFactory(4)
    engine = Restarting(tokenizer, policy)
    async with engine:
        args = RolloutArgs(model="embedded", engine=engine.url, pace_gc=False)
        async with Model.from_args(args, tokenizer=tokenizer, engine=Watched) as model:
            task = factory.tasks("test")[3]
            with pytest.raises(UsageError, match="now serves a different model: 'other'"):
                await agent(model).asolve(factory.make(EnvironmentOptions()), task=task)
    assert len(turns) > 2
    assert asked == [len(turns)]


async def test_the_endpoint_compares_before_it_returns_tokens(tokenizer: Any) -> None:
    engine = Restarting(tokenizer, look)
    async with engine:
        args = RolloutArgs(model="embedded", engine=engine.url, pace_gc=False)
        async with Model.from_args(args, tokenizer=tokenizer) as model, Endpoint(model) as endpoint:
            live = endpoint.sessions.create("s")
            await endpoint.settle(live)
            engine.restart()
            with pytest.raises(UsageError, match="now serves a different model: 'other'"):
                await endpoint.settle(live)
