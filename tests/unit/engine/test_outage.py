"""An engine that dies during a run: the run waits for it, once for all, or ends in words."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from support.client import Pauses, StartingEngine, client, client_of, flaky, refusal, request
from support.episodes import agent, judge_tokens
from support.http import completion, http_server, says
from support.loop_clock import skip
from support.toy_environment import PondFactory, look

from toolroll import Action, Environment, Episode, Observation, Status, StepResult, Task, UsageError
from toolroll.agents.chat_client import ChatClient, ChatClientConfig
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.users import OpenAIUsers, UserConfig
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig, Health
from toolroll.rollout.engine.outage import Outage
from toolroll.rollout.errors import EngineError, EngineUnreachableError, UserSimulatorError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.runtime.time_limit import pausable
from toolroll.rollout.settings import RolloutArgs, RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import StopReason
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings

UP, DOWN = Health(True), Health(False, "no", down=True)


class Probe:
    """Gives `answers` in order, then repeats the last one, and counts."""

    def __init__(self, *answers: Health) -> None:
        self.answers = answers
        self.asked = 0

    async def __call__(self) -> Health:
        self.asked += 1
        await asyncio.sleep(0)
        return self.answers[min(self.asked, len(self.answers)) - 1]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def outage_of(probe: Probe, timeout: float = 600) -> tuple[Outage, Pauses]:
    pauses = Pauses()
    return Outage("the engine", probe, timeout=timeout, sleep=pauses), pauses


async def test_one_probe_for_all_who_wait(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe(*[DOWN] * 6, UP)
    outage, pauses = outage_of(probe)
    assert await asyncio.gather(*(outage.over(0, "refused") for _ in range(100))) == [True] * 100
    assert pauses == pytest.approx([1, 1, 2, 4, 8, 10], abs=0.5)
    assert (probe.asked, outage.ended) == (7, 1)
    outage.answered()
    outage.answered()
    assert [record.getMessage() for record in caplog.records] == [
        "the engine does not answer (refused): waiting for it, up to 600 s",
        "the engine answers again",
    ]
    assert await outage.over(0, "reset"), "it was sent before the outage ended"
    assert probe.asked == 7
    assert not await outage.over(1, "reset"), "it answers: the failure is the request's own"
    assert probe.asked == 8


async def test_after_its_time_all_fail_and_later_ones_too(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe(DOWN)
    outage, pauses = outage_of(probe, timeout=20)
    waiting = (outage.over(0, "refused") for _ in range(10))
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineUnreachableError] * 10
    assert str(errors[0]) == "the engine has not answered for 20 s: refused"
    assert sum(pauses) == pytest.approx(20, abs=1) and probe.asked == len(pauses) + 1
    with pytest.raises(EngineUnreachableError):
        await outage.over(1, "refused")
    assert probe.asked == len(pauses) + 2
    assert len(caplog.records) == 1
    probe.answers = (UP,)
    assert not await outage.over(2, "reset")


@pytest.mark.parametrize(
    ("answers", "limit", "expected"),
    [
        ([UP], 600, UP),
        ([DOWN] * 5 + [UP], 600, UP),
        ([DOWN, Health(False, "404")], 600, Health(False, "404")),
        ([DOWN], 0, DOWN),
    ],
)
async def test_the_start_waits_until_healthy(answers: Any, limit: float, expected: Health) -> None:
    probe = Probe(*answers)
    outage, pauses = outage_of(probe, limit)
    assert await outage.wait_until_healthy() == expected
    assert outage.started == expected.ok
    # the last check is repeated if the server had been down
    assert probe.asked == len(answers) + (len(answers) > 1)
    assert len(pauses) == len(answers) - 1


async def test_the_start_waits_no_longer_than_the_timeout() -> None:
    outage, pauses = outage_of(Probe(DOWN), timeout=20)
    with pytest.raises(EngineUnreachableError, match="the engine has not answered for 20 s: no"):
        await outage.wait_until_healthy()
    assert sum(pauses) == pytest.approx(20, abs=0.5)


async def test_an_adapter_waits_for_the_engine(tokenizer: Any, caplog: Any) -> None:
    engine = StartingEngine(tokenizer, lambda seen: "Goodbye.")
    async with engine:
        args = RolloutArgs(model="embedded", engine=engine.url, engine_timeout=0.05)
        player = EpisodePlayer(Model.from_args(args), EpisodeSettings(env="desk"))
        result = await player.play(0, {"max_new_tokens": 64})
        await player.aclose()
        assert engine.checks == 3  # down, up, and once more
    assert result.status is Status.COMPLETED
    assert [record.getMessage() for record in caplog.records if "not checked" in record.msg] == []


async def test_a_503_is_an_outage_only_until_the_first_answer() -> None:
    """An engine that is starting may refuse requests before it is healthy."""
    busy = refusal(503, {"error": "busy"})
    seen, generate = flaky(busy, completion([3]), busy, completion([3]))
    checks: list[int] = []

    async def health(http: web.Request) -> web.Response:
        checks.append(len(seen))
        return web.Response(status=503 if len(checks) < 4 else 200)

    routes = {"/generate": generate, "/health": health}
    async with client_of(routes, engine_timeout=600, retries=1) as calls:
        assert [(await calls.generate(request())).attempts for _ in range(2)] == [1, 2]
    assert (len(seen), checks) == (4, [1] * 4)


async def test_without_a_timeout_nobody_is_asked(gone: str) -> None:
    probe, pauses = Probe(DOWN), Pauses()
    assert not await Outage("the engine", probe, timeout=0).over(0, "refused")
    assert probe.asked == 0
    async with client(gone, sleep=pauses, retries=2) as calls:
        with pytest.raises(EngineError, match="after 3 attempts") as raised:
            await calls.generate(request())
    assert not isinstance(raised.value, EngineUnreachableError)
    assert len(pauses) == 2


async def test_closing_ends_the_wait(gone: str) -> None:
    asleep = asyncio.Event()

    async def sleep(seconds: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    async with client(gone, sleep=sleep, engine_timeout=600) as calls:
        waiting = asyncio.create_task(calls.generate(request()))
        await asleep.wait()
        await calls.aclose()
        with pytest.raises(EngineError, match="closed during the request"):
            await waiting


NO_WORKERS = {"error": {"code": "no_available_workers", "message": "No available workers"}}
UPSTREAM = {"error": {"code": "call_upstream_request_error", "message": "error sending request"}}


@asynccontextmanager
async def routed(handle: Any, **config: Any) -> AsyncIterator[tuple[Engine, Pauses]]:
    """A client of a router or an engine that is well itself, and says so."""
    routes, pauses = {"/generate": handle, "/health": says(b"")}, Pauses()
    async with client_of(routes, sleep=pauses, **config) as calls:
        yield calls, pauses


async def test_a_router_without_workers_is_waited_for() -> None:
    """Its workers come back after a while."""
    seen, handle = flaky(refusal(500, UPSTREAM), *[refusal(503, NO_WORKERS)] * 8, completion([3]))
    async with routed(handle, engine_timeout=600) as (calls, pauses):
        found = await calls.generate(request())
    assert (found.output_ids.tolist(), found.attempts, len(seen)) == ([3], 2, 10)
    assert pauses[1:] == pytest.approx([1, 1, 2, 4, 8, 10, 10, 10], abs=0.5)


@pytest.mark.parametrize("drops", [True, False])
async def test_a_healthy_engine_or_router_uses_up_the_attempts(drops: bool) -> None:
    """Else a request that breaks its connection each time would be sent for ever."""
    seen, broken = flaky(refusal(500, UPSTREAM))

    async def handle(http: Any) -> Any:
        answer = await broken(http)
        if drops:
            http.transport.abort()
            await asyncio.Event().wait()
        return answer

    words = "" if drops else "error sending request "
    async with routed(handle, engine_timeout=600, retries=3) as (calls, pauses):
        with pytest.raises(EngineError, match=f"{words}after 4 attempts"):
            await calls.generate(request())
    assert (len(seen), len(pauses)) == (4, 3)


async def test_an_engine_that_comes_back_with_another_model_is_refused(tokenizer: Any) -> None:
    """Else its tokens would be trained as the first one's."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EmbeddedEngine(tokenizer))
        info = says({"model_path": "another/model"})
        routes = {"/health": says(b""), "/model_info": info, "/generate": says(completion([3]))}

        async def sleep(seconds: float) -> None:
            await stack.enter_async_context(http_server(routes, port=port_of(engine.url)))

        async with client(engine.url, model_info=None, sleep=sleep, engine_timeout=600) as calls:
            await calls.generate(request())
            await engine.kill()
            with pytest.raises(UsageError, match="now serves a different model: 'another/model'"):
                await calls.generate(request())


async def test_a_request_that_kills_the_engine_each_time_is_given_up() -> None:
    """Else it would be sent again whenever somebody has started the engine."""
    seen: list[int] = []
    routes = {"/health": says(b"")}

    async def die(http: Any) -> Any:
        seen.append(1)
        routes["/health"] = says(b"", status=503)
        http.transport.abort()
        await asyncio.Event().wait()

    async def health(http: web.Request) -> web.StreamResponse:
        return await routes["/health"](http)

    async def sleep(seconds: float) -> None:
        routes["/health"] = says(b"")

    served = {"/generate": die, "/health": health}
    async with client_of(served, sleep=sleep, engine_timeout=600) as calls:
        with pytest.raises(EngineError, match="went down 3 times during this request"):
            await calls.generate(request())
    assert len(seen) == 3


def served(tokenizer: Any, url: str, sleep: Any, **config: Any) -> Model:
    """A model behind `url` that waits for an engine that is gone."""
    config = {"engine_timeout": 600, **config}
    settings = EngineConfig(engine=url, vocab_size=len(tokenizer), **config)
    template = ChatTemplate(tokenizer)
    engine = Engine(settings, model_info=None, sleep=sleep)
    return Model(engine, template, get_parser("hermes", template.encoder.control))


async def run(model: Model, count: int, episodes: list[Episode], **settings: Any) -> None:
    factory = PondFactory(count)
    params = {"temperature": 1.0, "max_new_tokens": 256}
    options = RunSettings(sampling_params=params, **settings)
    play = Runner(factory, lambda: agent(model, verify="off"), options)
    await play.run(factory.tasks("test"), episodes.append)


async def test_a_killed_engine_that_comes_back_costs_no_episode(tokenizer: Any) -> None:
    engines: list[EmbeddedEngine] = []
    pauses: list[float] = []
    async with AsyncExitStack() as stack:

        async def start(port: int = 0) -> EmbeddedEngine:
            engine = EmbeddedEngine(tokenizer, look, port=port, latency=0.001)
            engines.append(await stack.enter_async_context(engine))
            return engine

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) % 3 == 0:
                await start(port_of(engines[0].url))

        async def kill() -> None:
            for arrivals in (60, 90):
                while len(engines) < 1 + (arrivals == 90):
                    await asyncio.sleep(0)
                await engines[-1].until(lambda engine, at=arrivals: len(engine.log) >= at)  # type: ignore[misc]
                await engines[-1].kill()

        await start()
        episodes: list[Episode] = []
        async with served(tokenizer, engines[0].url, sleep, retries=0) as model:
            await asyncio.gather(run(model, 200, episodes, concurrency=16), kill())
    assert (len(engines), len(pauses)) == (3, 6), "one waits for all"
    assert len({episode.task_id for episode in episodes}) == 200 == len(episodes)
    assert {episode.result.status for episode in episodes} == {Status.COMPLETED}
    assert {episode.result.metrics["reruns"] for episode in episodes} == {0.0}
    log = [entry for engine in engines for entry in engine.log]
    assert len({entry.rid for entry in log}) == len(log)
    oracle: Any = SimpleNamespace(log=log, killed=0)
    for episode in episodes:
        name = f"pond/{episode.task_id}#0"
        answered = [entry for entry in log if entry.routing_key == name and entry.status == 200]
        trained = sum(len(path.turns) for path in episode.result.trajectories)
        judge_tokens(episode.result.trajectories, oracle, name, refused=len(answered) - trained)


async def test_the_wait_is_no_part_of_an_episodes_time(tokenizer: Any) -> None:
    """Nor is it given back: what was left of the limit is left when the engine is back."""
    dead, hold, late = asyncio.Event(), asyncio.Event(), asyncio.Event()
    engines: list[EmbeddedEngine] = []

    def holds(seen: PolicyRequest) -> Reply:
        late.set()
        return Reply("Goodbye.", hold=hold)

    async with AsyncExitStack() as stack:
        engines.append(await stack.enter_async_context(EmbeddedEngine(tokenizer, look)))
        port = port_of(engines[0].url)

        async def sleep(seconds: float) -> None:
            if not dead.is_set():
                dead.set()
                skip(5000)
                return
            await stack.enter_async_context(EmbeddedEngine(tokenizer, holds, port=port))

        async with served(tokenizer, engines[0].url, sleep) as model:
            await model.engine.model_info()
            await engines[0].kill()
            episodes: list[Episode] = []
            playing = asyncio.create_task(run(model, 1, episodes, episode_timeout=600))
            await late.wait()
            assert dead.is_set() and not playing.done()
            skip(601)
            await playing
    assert [episode.result.stop_reason for episode in episodes] == [StopReason.TIME_LIMIT]


# --- whoever else is asked ----------------------------------------------------------------------


HELLO = {"choices": [{"message": {"content": "Hello."}, "finish_reason": "stop"}]}
USERS = {"/v1/chat/completions": says(HELLO), "/v1/models": says({})}


async def test_the_users_server_is_waited_for(caplog: pytest.LogCaptureFixture, gone: str) -> None:
    """That is no part of a step's time."""
    pauses: list[float] = []
    async with AsyncExitStack() as stack:

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                skip(5000)
                await asyncio.sleep(0)
                await stack.enter_async_context(http_server(USERS, port=port_of(gone)))

        config = UserConfig(base_url=f"{gone}/v1", model="m", engine_timeout=600, retries=0)
        async with OpenAIUsers(config, client=ChatClient(config, sleep=sleep)) as users:
            user = users.make()

            class Talk(Environment):
                async def reset(self, task: Task, seed: int) -> Observation:
                    text = await user.reset("Buy milk.")
                    return Observation([{"role": "user", "content": text}], [])

                def step(self, action: Action) -> StepResult:
                    raise AssertionError("only the beginning is played")

            world = EnvironmentRunner(Talk(), Task("t", 0), 0, asyncio.to_thread, time_limit=600)
            async with asyncio.timeout(700) as episode:
                with pausable(episode):
                    observed = await world.reset()
            assert user.metrics()["user_retries"] == 0
    assert observed.messages[0]["content"] == "Hello."
    assert f"the endpoint {gone}/v1 answers again" in caplog.text
    assert pauses == pytest.approx([1, 1, 2], abs=0.5)


async def test_the_users_and_the_baselines_server_may_be_unreachable(gone: str) -> None:
    config = UserConfig(base_url=f"{gone}/v1", model="m", engine_timeout=1e-9)
    async with OpenAIUsers(config) as users:
        with pytest.raises(EngineUnreachableError, match=f"the endpoint {gone}/v1 has not"):
            await users.make().reset("Buy milk.")
    url = gone.replace("://", "://me:secret@")
    endpoint = ChatClient(ChatClientConfig(base_url=url, model="m", engine_timeout=1e-9))
    with pytest.raises(EngineUnreachableError, match=f"the endpoint {gone} has not"):
        await endpoint.complete({})
    await endpoint.aclose()


async def test_credentials_of_other_servers_are_sent_and_not_shown() -> None:
    heads: list[str | None] = []

    async def refuse(http: web.Request) -> web.StreamResponse:
        heads.append(http.headers.get("Authorization"))
        return web.Response(status=403)

    async with http_server({"/v1/chat/completions": refuse}) as url:
        config = UserConfig(base_url=f"{url}/v1".replace("://", "://me:secret@"), model="m")
        async with OpenAIUsers(config) as users:
            with pytest.raises(UserSimulatorError) as of_user:
                await users.make().reset("Buy milk.")
        endpoint = ChatClient(config)
        with pytest.raises(EngineError) as of_baseline:
            await endpoint.complete({})
        await endpoint.aclose()
    assert heads == ["Basic bWU6c2VjcmV0"] * 2
    assert "secret" not in f"{of_user.value} {of_baseline.value}"
    assert f"{url}/v1/chat/completions" in str(of_user.value)
