"""An engine that restarted with another model: its tokens are refused at the episode's end."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from support.client import client_of, request
from support.episodes import agent
from support.http import completion, http_server, says
from support.toy_environment import PondFactory, look

from toolroll.endpoint.endpoint import Endpoint
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.environment import EnvironmentOptions
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.settings import RolloutArgs
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer

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


async def test_one_that_nobody_saw_restart_is_refused() -> None:
    """Without an `engine_timeout`, and no request was in flight."""
    with pytest.raises(UsageError, match=CHANGED):
        await restarted({"model_path": "a"}, {"model_path": "b"})


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


async def test_a_mismatch_that_is_allowed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await restarted({"model_path": "a"}, {"model_path": "b"}, allow_model_mismatch=True)
    assert [record.getMessage()[-len(CHANGED) :] for record in caplog.records] == [CHANGED]


def test_the_setting_reaches_the_client() -> None:
    args = RolloutArgs(model="embedded", allow_model_mismatch=True, pace_gc=False)
    engine = Model.from_args(args, tokenizer=load_embedded_tokenizer()).engine
    assert isinstance(engine, Engine)
    assert engine.config.allow_model_mismatch
