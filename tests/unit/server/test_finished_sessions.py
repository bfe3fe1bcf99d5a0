"""`serve --out`: how sessions end, and what is in the episode file then."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import Bench, endpoint
from support.recorded import CHAT, USER, ask, delete, hold_the_end, policy

from toolroll.cli.export import export
from toolroll.cli.view import view
from toolroll.endpoint.requests.received import Received
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.session_store import JOURNAL_NAME
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import Reply


async def test_an_older_session_of_a_name_is_finished_by_the_next_server(
    tokenizer: Any, tmp_path: Path
) -> None:
    """The server was killed while it finished a session whose name was used again."""
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with endpoint(tokenizer, policy, out=out) as bench:
        talk = await ask(bench, [USER])
        reached, go_on = hold_the_end(bench)
        deleting = asyncio.create_task(delete(bench, "s"))
        await reached.wait()
        await ask(bench, talk)
        shutil.copytree(out, killed)
        go_on.set()
        assert await deleting == 200
    async with endpoint(tokenizer, policy, out=killed) as again:
        [live] = again.endpoint.sessions.all()
        assert (live.sample, len(live.trace)) == (1, 1)
        assert again.endpoint.store is not None
        again.endpoint.store.finish_at_end = True
    assert [one.sample for one in read_episodes(killed)] == [0, 1]


@pytest.mark.parametrize("path", ["/sessions/s", "/sessions/s/export"])
async def test_a_client_that_disconnects_does_not_stop_the_end_of_its_session(
    tokenizer: Any, tmp_path: Path, path: str
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        reached, go_on = hold_the_end(bench)
        method = "POST" if path.endswith("export") else "DELETE"
        asking = asyncio.create_task(bench.http.request(method, bench.url + path).__aenter__())
        await reached.wait()
        asking.cancel()
        await closed_connection(bench)
        go_on.set()
    assert [one.task_id for one in read_episodes(tmp_path)] == ["s"]


async def closed_connection(bench: Bench) -> None:
    """Wait until the server noticed that a client closed its connection."""
    noticed = ""
    while 'status="499"' not in noticed:
        async with bench.http.get(f"{bench.url}/metrics") as response:
            noticed = await response.text()


async def test_a_session_that_cannot_be_finished_does_not_stop_the_others(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        for name in "abc":
            await ask(bench, [USER], name)
        store = bench.endpoint.store
        assert store is not None
        settle = store._settle

        async def broken(live: LiveSession) -> None:
            if live.id != "c":
                raise RuntimeError("broken")
            await settle(live)

        store._settle = broken
        bench.endpoint.sessions.discard("a")  # in the background
        store.finish_at_end = True
    assert "the session a could not be finished" in caplog.text
    assert "the session b could not be finished" in caplog.text
    assert [one.task_id for one in read_episodes(tmp_path)] == ["c"]
    async with endpoint(tokenizer, policy, out=tmp_path) as again:
        assert sorted(live.id for live in again.endpoint.sessions.all()) == ["a", "b"]


async def test_a_session_that_could_not_be_finished_can_be_finished_later(
    tokenizer: Any, tmp_path: Path
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        store, sessions = bench.endpoint.store, bench.endpoint.sessions
        assert store is not None
        settle = store._settle

        async def broken(live: LiveSession) -> None:
            raise RuntimeError("broken")

        store._settle = broken
        assert await delete(bench, "s") == 500
        live = sessions.find("s")
        for _ in range(2):  # the session is idle, and still cannot be finished
            live.used -= 7200.0
            sessions.drop_idle()
            await asyncio.wait(store._finishing)
            assert sessions.get("s") is live
        store._settle = settle
        assert await delete(bench, "s") == 200
    assert [one.task_id for one in read_episodes(tmp_path)] == ["s"]


async def test_view_and_export_say_how_many_sessions_are_not_finished(
    tokenizer: Any, tmp_path: Path
) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"

    def said(folder: Path) -> tuple[int, list[str]]:
        _, count, messages = view(folder, out=None, tokenizer=None, tokens=0)
        return count, [line for line in messages if "unfinished" in line]

    async with endpoint(tokenizer, policy, out=out) as bench:
        for name in "abc":
            await ask(bench, [USER], name)
            await bench.post(f"/sessions/{name}/reward", {"reward": 1.0})
        await bench.post("/sessions/c/v1/completions", {"prompt": "Once"})
        await bench.post("/sessions/text/v1/completions", {"prompt": "Once"})
        await bench.post("/sessions", {"session_id": "empty"})
        count, [line] = said(out)
        assert (count, line.partition(".")[0]) == (0, "left out: 4 unfinished sessions")
        assert "DELETE /sessions/ID" in line and "Ctrl-C" in line and str(out) in line
        if find_spec("pyarrow"):  # `make test` installs none
            with pytest.raises(UsageError) as refused:
                export(out, "parquet", tmp_path / "x", None)
            assert "nothing to train on" in str(refused.value) and line in str(refused.value)
        with pytest.raises(UsageError, match="no episodes\nleft out: 4 unfinished"):
            export(out, "atif", tmp_path / "x", "serve")
        before = (out / JOURNAL_NAME).read_bytes()
        assert await delete(bench, "a") == 200
        fewer = line.replace("4 unfinished", "3 unfinished")
        assert fewer in export(out, "atif", tmp_path / "one", None)
        await ask(bench, [USER], "a")  # another session of this name
        count, [line] = said(out)
        assert (count, line.partition(".")[0]) == (1, "left out: 4 unfinished sessions")
        for name in ("a", "b", "c", "text"):
            assert await delete(bench, name) == 200
        assert said(out) == (5, [])
    # killed after the sessions were written as episodes, with lines that cannot be read
    shutil.copytree(out, killed)
    junk = b'{"s": ["x"], "k": 0, "kind": "chat"}\n[]\n{"kind": "end"}\n\xff\n'
    (killed / JOURNAL_NAME).write_bytes(before + junk + b'{"s": "y", "k": 0, "kind": "chat"}')
    assert said(killed) == (5, [])
    (killed / JOURNAL_NAME).unlink()
    assert said(killed) == (5, [])


async def test_a_stream_that_its_client_still_reads_is_in_flight(
    tokenizer: Any, tmp_path: Path
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        core, body = bench.endpoint, {"messages": [USER], "stream": True}
        await ask(bench, [USER])
        reply = await core.start_reply(core.chat, core.sessions.of("s"), Received(body))
        live = reply.live
        live.pending.join(reply)
        await asyncio.wait([reply.task])
        lines = reply.event_lines()
        await anext(lines)
        status, answer = await bench.post("/sessions/s/export", {})
        assert (status, answer["error"]["code"]) == (409, "requests_in_flight")
        live.used -= 7200.0
        core.sessions.drop_idle()
        assert core.sessions.get("s") is live
        assert [line async for line in lines][-1] == b"data: [DONE]\n\n"
        live.pending.leave(reply)
        status, answer = await bench.post("/sessions/s/export", {})
        assert (status, answer["turns"]) == (200, 2)


@pytest.mark.parametrize("out", [True, False])
async def test_a_first_request_that_is_refused_creates_the_session(
    tokenizer: Any, tmp_path: Path, out: bool
) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 800}]}
    folder = tmp_path if out else None
    async with endpoint(tokenizer, policy, out=folder, context_length=600) as bench:
        for name in ("s", "t"):
            status, answer = await bench.post(CHAT.format(name), long)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert (await bench.post(f"/sessions/{name}/reward", {"reward": 0.0}))[0] == 200
            assert (await bench.get(f"/sessions/{name}/trajectories"))["trajectories"] == []
        await ask(bench, [USER])
        found = {one["session_id"]: one for one in (await bench.get("/sessions"))["data"]}
        assert {name: (one["sample"], one["turns"]) for name, one in found.items()} == {
            "s": (0, 1),
            "t": (0, 0),
        }
        assert [await delete(bench, name) for name in "st"] == [200, 200]
    if out:
        [episode] = read_episodes(tmp_path)
        assert (episode.task_id, episode.sample, episode.result.reward) == ("s", 0, 0.0)


async def test_requests_get_no_session_that_could_not_be_added_again(tokenizer: Any) -> None:
    async with endpoint(tokenizer, policy) as bench:
        sessions = bench.endpoint.sessions
        older, newer = sessions.empty("s"), sessions.create("s")
        sessions.put_back(older)
        assert sessions.find("s") is newer
        assert sessions.current(older) is newer


async def test_a_reward_that_arrives_after_the_end_of_its_session_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, [USER])

        async def body() -> AsyncIterator[bytes]:
            yield b'{"rew'
            begun.set()
            await go_on.wait()
            yield b'ard":1.0}'

        async def reward() -> tuple[int, str]:
            headers = {"Content-Type": "application/json"}
            url = f"{bench.url}/sessions/s/reward"
            async with bench.http.post(url, data=body(), headers=headers) as response:
                return response.status, (await response.json())["error"]["code"]

        rewarding = asyncio.create_task(reward())
        await begun.wait()
        await bench.get("/health")
        assert await delete(bench, "s") == 200
        go_on.set()
        assert await rewarding == (404, "session_not_found")
    assert [one.result.reward for one in read_episodes(tmp_path)] == [None]


async def test_no_line_after_its_end_restores_a_session(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        assert await delete(bench, "s") == 200
    with (tmp_path / JOURNAL_NAME).open("ab") as journal:
        journal.write(b'{"s":"s","k":0,"kind":"reward","reward":1.0,"info":{}}\n')
    async with endpoint(tokenizer, policy, out=tmp_path) as again:
        assert again.endpoint.sessions.all() == []


async def test_the_idle_time_starts_at_the_end_of_a_request(tokenizer: Any) -> None:
    go_on = asyncio.Event()
    settings = {"idle": 3600.0}
    async with endpoint(
        tokenizer, lambda request: Reply("Hello.", hold=go_on, hold_after=1), settings=settings
    ) as bench:
        asking = asyncio.create_task(ask(bench, [USER]))
        await bench.engine.until(lambda core: core.held == 1)
        live = bench.endpoint.sessions.get("s")
        assert live is not None
        live.used -= 7200.0  # a long answer
        go_on.set()
        await asking
        bench.endpoint.sessions.drop_idle()
        assert bench.endpoint.sessions.get("s") is live


async def test_a_verification_that_is_cancelled_before_it_starts_is_started_again(
    tokenizer: Any, tmp_path: Path
) -> None:
    """A DELETE in the same round of the event loop as the commit of an answer."""
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        live = bench.endpoint.sessions.find("s")
        live.start_checks()  # as the commit of an answer does with --verify always
        await live.end()  # the first step of a DELETE
        deleted = await bench.endpoint.sessions.drop("s")
        assert deleted is not None and deleted["turns"] == 1
        assert [one.task_id for one in read_episodes(tmp_path)] == ["s"]


async def test_an_answer_that_cannot_be_saved_is_not_in_the_episode_of_its_deleted_session(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, fail, sync = threading.Event(), threading.Event(), os.fdatasync
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        live, store = bench.endpoint.sessions.find("s"), bench.endpoint.store
        assert store is not None
        file = store.journal._file.fileno()

        def failing(number: int) -> None:
            if number == file:
                saving.set()
                fail.wait()
                raise OSError(5, "Input/output error")
            sync(number)

        monkeypatch.setattr(os, "fdatasync", failing)
        asking = asyncio.create_task(bench.post(CHAT.format("s"), {"messages": [USER]}))
        await asyncio.to_thread(saving.wait)
        assert len(live.trace) == 2
        deleting = asyncio.create_task(delete(bench, "s"))
        while live.log is not None and not live.log.ended:
            await bench.get("/health")
        fail.set()
        assert await deleting == 503
        assert (await asking)[0] == 503
        assert await delete(bench, "s") == 503  # not 404: the session is not finished
        found = (await bench.get("/sessions/s/trajectories"))["trajectories"]
        assert sorted(any(one["loss_mask"]) for one in found) == [False, True]
    monkeypatch.undo()
    assert not list(read_episodes(tmp_path))
