"""Sessions in the engine's cache: which requests carry an id, and that nothing stays open."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.client import client, client_of, embedded, flaky, request
from support.endpoints import endpoint
from support.episodes import agent, call, serving
from support.http import completion, http_server, says
from support.loop_clock import skip
from support.toy_environment import PondFactory, look

from toolroll import Engine, RunSettings
from toolroll.rollout.engine.session_cache import SessionCache
from toolroll.rollout.runs.runner import Runner, RunStoppedError
from toolroll.testing import EmbeddedEngine, Fault, Reply, echo

PARAMS = {"temperature": 1.0, "max_new_tokens": 256}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def ids_of(engine: EmbeddedEngine, name: str = "s") -> list[str | None]:
    return [entry.session_id for entry in engine.log if entry.routing_key == name]


@asynccontextmanager
async def caching(
    tokenizer: Any, policy: Any = echo, *, setting: bool = True, **engine: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Engine]]:
    """An engine with a session cache, and a client. After it was closed, no session is open."""
    config = {"model_info": None, "session_cache": setting}
    options = {"session_cache": True, **engine}
    async with embedded(tokenizer, policy, config=config, **options) as (served, calls):
        yield served, calls
        await calls.aclose()
        assert served.open_sessions == set()


async def test_each_opening_has_one_id_of_its_own(tokenizer: Any) -> None:
    """Also two of one name at once."""
    async with caching(tokenizer) as (engine, calls):
        for _ in range(2):
            end = calls.open_session("s")
            await calls.generate(request())
            await calls.generate(request())
            end()
            end()
        await calls.generate(request())  # after the end: not marked
        first, again, second, also, late = ids_of(engine)
        await calls._sessions.settle()
        ends = []
        for _ in range(2):
            ends.append(calls.open_session("s"))
            await calls.generate(request())
        assert len(engine.open_sessions) == 2
        for end in ends:
            end()
    assert first == again != second == also
    assert first and second and late is None


@pytest.mark.parametrize(("engine_on", "setting"), [(False, True), (True, False)])
async def test_where_it_is_off_nothing_is_sent(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, engine_on: bool, setting: bool
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(EmbeddedEngine, "close_session", lambda self, name: closed.append(name))
    async with caching(tokenizer, setting=setting, session_cache=engine_on) as (engine, calls):
        end = calls.open_session("s")
        await calls.generate(request())
        end()
    assert (ids_of(engine), closed) == ([None], [])


async def test_a_session_is_closed_after_its_last_request(tokenizer: Any) -> None:
    """A request that arrives after the close would open the session again."""
    hold = asyncio.Event()
    async with caching(tokenizer, lambda seen: Reply("Hi.", hold=hold)) as (engine, calls):
        end = calls.open_session("s")
        task = asyncio.create_task(calls.generate(request()))
        await engine.until(lambda e: e.held == 1)
        end()
        await asyncio.sleep(0)
        hold.set()
        await task
    assert ids_of(engine) != [None]


Closed = list[tuple[str, str]]
SIZES: dict[str, Any] = {"model_info": None, "context_length": 1000, "vocab_size": 5000}


def worker_routes(closed: Closed, name: str = "a", status: int = 200) -> dict[str, Any]:
    """A worker that adds (`name`, session id) to `closed`, and answers with `status`. With 0, it
    breaks the connection.
    """

    async def close(http: web.Request) -> web.StreamResponse:
        closed.append((name, (await http.json())["session_id"]))
        if not status and http.transport:
            http.transport.abort()
        return web.Response(status=status or 500)

    return {"/close_session": close, "/server_info": says({"enable_session_radix_cache": True})}


@pytest.mark.parametrize(("router", "kept"), [("smg", True), ("sglang-router", False)])
async def test_a_session_is_closed_at_every_worker(router: str, kept: bool) -> None:
    """Through smg. sglang-router drops session ids, so nothing is opened."""
    closed: Closed = []
    seen, generate = flaky(completion([3]))
    more = {"runtime_type": "sglang"} if router == "smg" else {}
    async with (
        http_server(worker_routes(closed, "a")) as one,
        http_server(worker_routes(closed, "b")) as two,
        http_server(
            {
                "/workers": says({"workers": [{"url": one, **more}, {"url": two, **more}]}),
                "/generate": generate,
            }
        ) as url,
        client(url, **SIZES) as calls,
    ):
        end = calls.open_session("s")
        await calls.generate(request())
        end()
        await calls.aclose()
    [session_id] = [body.get("session_id") for body in seen]
    assert bool(session_id) == kept
    assert sorted(closed) == ([("a", session_id), ("b", session_id)] if kept else [])


async def test_a_worker_that_is_gone_does_not_keep_sessions_open(tmp_path: Path, gone: str) -> None:
    """The router no longer lists it. A session whose close failed is closed again."""
    closed: Closed = []
    async with http_server(worker_routes(closed)) as worker:
        workers = [{"url": url, "runtime_type": "sglang"} for url in (worker, gone)]

        async def listed(http: web.Request) -> web.StreamResponse:
            return web.json_response({"workers": workers})

        routes = {"/workers": listed, "/generate": says(completion([3]))}
        async with client_of(routes, **SIZES) as calls:
            calls.keep_sessions(tmp_path)
            ends = []
            for name in "ab":
                ends.append(calls.open_session(name))
                await calls.generate(request(session=name))
            del workers[1]
            for end in ends:
                end()
                await asyncio.gather(*calls._sessions._closing)
                skip(60)
            assert files(tmp_path) == [] and len(set(closed)) == 2


async def test_an_unencodable_request_leaves_nothing_open(tokenizer: Any, tmp_path: Path) -> None:
    async with caching(tokenizer) as (engine, calls):
        calls.keep_sessions(tmp_path)
        end = calls.open_session("s")
        with pytest.raises(TypeError):
            await calls.generate(request(sampling_params={"logit_bias": {5: 1.0}}))
        end()
    assert files(tmp_path) == [] and engine.log == []


# --- the file -------------------------------------------------------------------------------------


async def test_the_next_start_closes_what_a_kill_left(tokenizer: Any, tmp_path: Path) -> None:
    async with caching(tokenizer) as (engine, killed):
        killed.keep_sessions(tmp_path)
        ends = [killed.open_session(f"s{number}") for number in range(5)]
        for number in range(5):
            await killed.generate(request(session=f"s{number}"))
        ends[1]()
        await killed._sessions.settle()
        end = killed.open_session("s5")  # its id takes the line of s1
        await killed.generate(request(session="s5"))
        [file] = files(tmp_path)
        assert len(file.read_bytes()) == 5 * 33
        assert set(file.read_text().split()) == engine.open_sessions
        left = tmp_path / "left"
        left.mkdir()
        shutil.copy(file, left)  # without the lock of this process
        async with client(engine.url, model_info=None) as started:
            started.keep_sessions(left)
            await started.model_info()
            assert await started.close_left_sessions(left) == 5
            assert engine.open_sessions == set()
            assert files(left) == []
        for leave in [*ends, end]:
            leave()


KILLED = """
import asyncio, os, sys
from support.client import client, request
async def main():
    async with client(sys.argv[1], model_info=None) as calls:
        calls.open_session('s')
        await calls.generate(request())
        await asyncio.gather(*calls._sessions._closing)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
"""A process that opens a session, keeps no folder, and is killed."""


async def test_without_a_folder_the_next_process_closes_what_was_left(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed open for ever. The sessions of a live process stay open."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    async with (
        caching(tokenizer) as (engine, alive),
        client(engine.url, model_info=None) as started,
    ):
        end = alive.open_session("s")
        await alive.generate(request())
        for _ in range(2):
            start = asyncio.create_subprocess_exec
            process = await start(sys.executable, "-c", KILLED, engine.url, env=env)
            assert await process.wait() == -9
        of_alive, killed, also = ids_of(engine)
        assert engine.open_sessions == {of_alive, also}  # the second one closed the first one's
        started.keep_sessions(tmp_path)
        end_of_started = started.open_session("t")
        await started.generate(request(session="t"))
        await started._sessions.settle()
        assert engine.open_sessions == {of_alive, *ids_of(engine, "t")}
        assert await started.close_left_sessions(tmp_path) == 0  # its own are not left
        end()
        end_of_started()
        assert killed != also
    assert files(tmp_path) == []


@pytest.mark.parametrize(("status", "kept"), [(200, False), (404, False), (503, True), (0, True)])
async def test_an_id_is_kept_for_a_later_close(tmp_path: Path, status: int, kept: bool) -> None:
    """If so, it is closed once more at the end. Also if there is no answer: the status 0."""
    closed: Closed = []
    routes = {**worker_routes(closed, status=status), "/generate": says(completion([3]))}
    async with client_of(routes, **SIZES) as calls:
        calls.keep_sessions(tmp_path)
        assert files(tmp_path) == []
        end = calls.open_session("s")
        await calls.generate(request())
        assert len(files(tmp_path)) == 1
        end()
        await calls.aclose()
    assert [file.read_text().split() for file in files(tmp_path)] == [[closed[0][1]]] * kept
    assert len(closed) == 1 + kept


# --- episodes and sessions ------------------------------------------------------------------------


async def test_episodes_leave_nothing_open(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished, or failed and played again."""
    monkeypatch.setattr("toolroll.rollout.runs.runner._FIRST_PAUSE", 0.0)
    factory = PondFactory(6)

    def faults(seen: Any) -> Fault | None:
        return Fault(status=400) if seen.index % 5 == 4 else None

    async with serving(tokenizer, look, session_cache=True, faults=faults) as (engine, served):
        settings = RunSettings(sampling_params=PARAMS, samples=2, reruns=1)
        played: list[Any] = []
        runner = Runner(factory, lambda: agent(served), settings)
        await runner.run(factory.tasks("test"), played.append)
        assert any(episode.result.metrics["reruns"] for episode in played)
        tagged = [entry.session_id for entry in engine.log]
        assert all(tagged)
        attempts = sum(1 + episode.result.metrics["reruns"] for episode in played)
        assert len(set(tagged)) == attempts  # a new id for each attempt
        await served.engine.aclose()
        assert engine.open_sessions == set()


async def test_endpoint_sessions_are_closed_when_they_are_dropped(tokenizer: Any) -> None:
    async with endpoint(tokenizer, echo, session_cache=True) as bench:
        calls = bench.served.engine
        assert isinstance(calls, Engine)
        chat = {"messages": [{"role": "user", "content": "Hi."}]}
        for path in ("/sessions/a/v1", "/sessions/a/v1", "/sessions/b/v1", "/v1"):
            assert (await bench.post(f"{path}/chat/completions", chat))[0] == 200
        first, again, other, alone = [entry.session_id for entry in bench.engine.log]
        assert first == again != other
        assert alone not in (None, first, other)  # an unnamed session, which may be continued
        assert bench.engine.open_sessions == {first, other, alone}
        async with bench.http.get(f"{bench.url}/metrics") as response:
            assert "toolroll_session_cache 1" in await response.text()
        async with bench.http.delete(f"{bench.url}/sessions/a") as response:
            assert response.status == 200
        await calls._sessions.settle()
        assert bench.engine.open_sessions == {other, alone}
        await bench.endpoint.aclose()
        await calls._sessions.settle()
        assert bench.engine.open_sessions == set()


@pytest.mark.parametrize(
    "before", [b"\0" * 33, b"3f", b"\xff\xfe\n"], ids=["hole", "torn", "bytes"]
)
async def test_an_id_is_read_from_a_damaged_file(tmp_path: Path, before: bytes) -> None:
    """A disk that was full leaves holes."""
    closed: list[str] = []

    async def close(session_id: str) -> bool:
        closed.append(session_id)
        return True

    (tmp_path / ".open-sessions-1-0a").write_bytes(before + b"ab" * 16 + b"\n")
    assert await SessionCache(close, "http://e").close_left(tmp_path) == 1
    assert closed == ["ab" * 16] and not files(tmp_path)


async def test_ids_that_could_not_be_closed_are_kept(tmp_path: Path) -> None:
    """A few are closed at a time, until one fails; a file that cannot be read stops nothing."""
    running = most = 0
    ids = [f"{number:032x}" for number in range(100)]

    async def close(session_id: str) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return session_id != ids[40]

    (tmp_path / ".open-sessions-0-0a").mkdir()
    file = tmp_path / ".open-sessions-1-0a"
    file.write_text("".join(f"{session_id}\n" for session_id in ids))
    cache = SessionCache(close, "http://e")
    assert await cache.close_left(tmp_path) == 63 and most == 32
    assert file.read_text().split() == [*ids[64:], ids[40]]
    assert await cache.close_left(tmp_path) == 36
    assert file.read_text().split() == [ids[40]]


async def test_an_episode_out_of_time_leaves_nothing_open(tokenizer: Any) -> None:
    factory, hold = PondFactory(2), asyncio.Event()

    def policy(seen: Any) -> Any:
        return call(at="a") if seen.call == 0 else Reply("...", hold=hold)

    async with serving(tokenizer, policy, session_cache=True) as (engine, served):
        settings = RunSettings(sampling_params=PARAMS, episode_timeout=600, give_up_after=2)
        runner = Runner(factory, lambda: agent(served), settings)
        running = asyncio.create_task(runner.run(factory.tasks("test"), lambda episode: None))
        await engine.until(lambda e: e.held == 2)
        assert len(engine.open_sessions) == 2
        skip(601)
        with pytest.raises(RunStoppedError):
            await running
        await served.engine.aclose()
        assert engine.open_sessions == set()
