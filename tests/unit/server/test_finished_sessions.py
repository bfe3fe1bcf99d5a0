"""`serve --out`: how sessions end, and what is in the episode file then. If the server stops, each
answer is in its session once, or its client is told to ask again.
"""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.episodes import call
from support.listed_environment import TOOL
from support.recorded import ask, break_the_end, finished, hold_calls, policy, state_of
from support.served import CHAT, JSON, TEXT, USER, ServedBench, in_session, serve, user

from toolroll.cli.export import export
from toolroll.cli.view import view
from toolroll.endpoint.replies import Reply as EndpointReply
from toolroll.endpoint.requests.received import Received
from toolroll.endpoint.sessions.session_store import JOURNAL_NAME
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes, to_line
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.testing import Reply

BODY = {"messages": [USER]}


async def test_an_older_session_of_a_name_is_finished_at_the_restart(tmp_path: Path) -> None:
    """The server was killed while it finished a session whose name was used again."""
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with serve(policy, out=out) as bench:
        talk = await ask(bench, [USER])
        reached, go_on = hold_calls(bench.store, "_settle")
        deleting = asyncio.create_task(bench.delete())
        await reached.wait()
        await ask(bench, talk)
        shutil.copytree(out, killed)
        go_on.set()
        assert await deleting == 200
    async with serve(policy, out=killed) as again:
        [live] = again.endpoint.sessions.all()
        assert (live.sample, len(live.trace)) == (1, 1)
        again.store.finish_at_end = True
    assert [episode.sample for episode in read_episodes(killed)] == [0, 1]


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/export")])
async def test_a_lost_client_does_not_stop_the_end(tmp_path: Path, method: str, path: str) -> None:
    async with serve(policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        reached, go_on = hold_calls(bench.store, "_settle")
        request = bench.http.request(method, f"{bench.url}/sessions/s{path}")
        asking = asyncio.create_task(request.__aenter__())
        await reached.wait()
        asking.cancel()
        metrics = ""
        while 'status="499"' not in metrics:  # until the server noticed the closed connection
            async with bench.http.get(f"{bench.url}/metrics") as response:
                metrics = await response.text()
        go_on.set()
    assert finished(tmp_path) == ["s"]


async def test_finished_sessions_are_episodes_and_the_others_go_on(tmp_path: Path) -> None:
    out, early = tmp_path / "out", tmp_path / "early"
    async with serve(policy, out=out) as bench:
        for name in ("a", "b", "c", "empty"):
            await bench.create(name)
        for name in ("a", "b", "c"):
            await ask(bench, await ask(bench, [USER], name), name)
        await bench.send("/sessions/a/reward", {"reward": 1.0, "info": {"note": "good"}})
        expected = (await bench.get("/sessions/a/trajectories"))["trajectories"]
        journal = (out / JOURNAL_NAME).read_bytes()
        assert [await bench.delete(name) for name in ("a", "b", "empty")] == [200] * 3
        await ask(bench, [USER], "a")  # another session of that name
    first, second = read_episodes(out)
    assert (first.env, first.task_id, first.sample) == ("serve", "a", 0)
    assert (second.task_id, second.sample, second.result.reward) == ("b", 0, None)
    line = json.loads(to_line(first))
    assert [to_json(each) for each in first.result.trajectories] == expected
    assert (line["reward"], line["info"]["note"], line["status"]) == (1.0, "good", "completed")
    assert [each["role"] for each in line["messages"]] == ["user", "assistant"] * 2
    assert line["tools"] == [TOOL]
    summary = json.loads((out / "summary.json").read_bytes())["environments"]["serve"]
    assert (summary["episodes"], summary["graded"]) == (2, 1)
    with (out / JOURNAL_NAME).open("ab") as lines:  # after the end of its session
        lines.write(b'{"s":"b","k":0,"kind":"reward","reward":1.0,"info":{}}\n')
    # killed after a session was written as an episode, and before the journal said so
    shutil.copytree(out, early)
    (early / JOURNAL_NAME).write_bytes(journal)
    for folder, names in ((out, ["a", "c"]), (early, ["c", "empty"])):
        async with serve(policy, out=folder) as bench:
            assert sorted(bench.ids()) == names
            await ask(bench, [USER], "a")
            assert await bench.delete("a") == 200
        samples = [(episode.task_id, episode.sample) for episode in read_episodes(folder)]
        assert samples == [("a", 0), ("b", 0), ("a", 1)]


async def test_idle_and_interrupted_sessions_are_finished(tmp_path: Path) -> None:
    async with serve(call(at="x") + call(at="y"), out=tmp_path) as bench:
        for name in ("old", "new"):
            await ask(bench, [USER], name)
        bench.endpoint.sessions.all()[0].used -= 3600.0
        bench.endpoint.sessions.drop_idle()
        assert bench.ids() == ["new"]
        bench.store.finish_at_end = True
    results = [(each.task_id, each.result.metrics) for each in read_episodes(tmp_path)]
    counts = [(name, counts["turns"], counts["tool_calls"]) for name, counts in results]
    assert counts == [("old", 1, 2), ("new", 1, 2)]
    async with serve(policy, out=tmp_path) as bench:
        assert bench.ids() == []


async def test_the_journal_is_compacted_when_sessions_finish(tmp_path: Path) -> None:
    async with serve(policy, out=tmp_path) as bench:
        bench.store._most_stale = 0
        for name in ("a", "b"):
            await ask(bench, await ask(bench, [USER], name), name)
        kept = state_of(bench, "b")
        size = (tmp_path / JOURNAL_NAME).stat().st_size
        assert await bench.delete("a") == 200
        await bench.store.journal.flush()
        data = (tmp_path / JOURNAL_NAME).read_bytes()
        assert b'"s":"a"' not in data
        assert len(data) < size
    async with serve(policy, out=tmp_path) as again:
        assert state_of(again, "b") == kept
        assert again.ids() == ["b"]


# --- sessions that cannot be finished -------------------------------------------------------------


async def test_failed_ends_stop_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(policy, out=tmp_path) as bench:
        for name in "abc":
            await ask(bench, [USER], name)
        break_the_end(bench, "a", "b")
        bench.endpoint.sessions.discard("a")  # in the background
        bench.store.finish_at_end = True
    assert "the session a could not be finished" in caplog.text
    assert "the session b could not be finished" in caplog.text
    assert finished(tmp_path) == ["c"]
    async with serve(policy, out=tmp_path) as again:
        assert sorted(again.ids()) == ["a", "b"]


async def test_requests_get_no_session_that_could_not_be_added_again() -> None:
    async with serve(policy) as bench:
        sessions = bench.endpoint.sessions
        older, newer = sessions.empty("s"), sessions.create("s")
        sessions.put_back(older)
        assert sessions.find("s") is newer
        assert sessions.current(older) is newer


async def test_no_unsaved_answer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving, fail, sync = threading.Event(), threading.Event(), os.fdatasync
    async with serve(policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        live, file = bench.endpoint.sessions.find("s"), bench.store.journal._file.fileno()

        def failing(descriptor: int) -> None:
            if descriptor == file:
                saving.set()
                fail.wait()
                raise OSError(5, "Input/output error")
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", failing)
        asking = asyncio.create_task(bench.refusal(in_session(CHAT), BODY))
        await asyncio.to_thread(saving.wait)
        assert len(live.trace) == 2
        deleting = asyncio.create_task(bench.delete())
        while live.log is not None and not live.log.ended:
            await bench.get("/health")
        fail.set()
        assert (await deleting, (await asking)[0]) == (503, 503)
        assert await bench.delete() == 503  # not 404: the session is not finished
        trajectories = (await bench.get("/sessions/s/trajectories"))["trajectories"]
        assert sorted(any(each["loss_mask"]) for each in trajectories) == [False, True]
    monkeypatch.undo()
    assert finished(tmp_path) == []


# --- sessions that are not finished ---------------------------------------------------------------


async def test_view_and_export_say_how_many_sessions_are_not_finished(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"

    def viewed(folder: Path) -> tuple[int, list[str]]:
        _, count, messages, _ = view(folder, out=None, tokenizer=None, tokens=0)
        return count, [line for line in messages if "unfinished" in line]

    async with serve(policy, out=out) as bench:
        for name in "abc":
            await ask(bench, [USER], name)
            await bench.send(f"/sessions/{name}/reward", {"reward": 1.0})
        for name in ("c", "text"):
            await bench.send(in_session(TEXT, name), {"prompt": "Once"})
        await bench.create("empty")
        count, [line] = viewed(out)
        assert (count, line.partition(".")[0]) == (0, "left out: 4 unfinished sessions")
        assert "DELETE /sessions/ID" in line and "Ctrl-C" in line and str(out) in line
        with pytest.raises(UsageError, match="no episodes\nleft out: 4 unfinished"):
            export(out, "atif", tmp_path / "x", "serve")
        before = (out / JOURNAL_NAME).read_bytes()
        assert await bench.delete("a") == 200
        fewer = line.replace("4 unfinished", "3 unfinished")
        assert fewer in export(out, "atif", tmp_path / "one", None)
        await ask(bench, [USER], "a")  # another session of this name
        count, [line] = viewed(out)
        assert (count, line.partition(".")[0]) == (1, "left out: 4 unfinished sessions")
        assert [await bench.delete(name) for name in ("a", "b", "c")] == [200] * 3
        assert viewed(out)[1][0].startswith("left out: 1 unfinished session. ")
        assert await bench.delete("text") == 200
        assert viewed(out) == (5, [])
    # killed after the sessions were written as episodes, with lines that cannot be read
    shutil.copytree(out, killed)
    junk = b'{"s": ["x"], "k": 0, "kind": "chat"}\n[]\n{"kind": "end"}\n\xff\n'
    (killed / JOURNAL_NAME).write_bytes(before + junk + b'{"s": "y", "k": 0, "kind": "chat"}')
    assert viewed(killed) == (5, [])


async def test_a_stream_that_its_client_still_reads_is_in_flight(tmp_path: Path) -> None:
    async with serve(policy, out=tmp_path) as bench:
        core, body = bench.endpoint, {**BODY, "stream": True}
        await ask(bench, [USER])
        reply = await core.start_reply(core.chat, core.sessions.of("s"), Received(body))
        live = reply.live
        live.pending.join(reply)
        await asyncio.wait([reply.task])
        lines = reply.event_lines()
        await anext(lines)
        refusal = await bench.refusal("/sessions/s/export", {})
        assert refusal[:2] == (409, "requests_in_flight")
        live.used -= 7200.0
        core.sessions.drop_idle()
        assert core.sessions.get("s") is live
        assert [line async for line in lines][-1] == b"data: [DONE]\n\n"
        live.pending.leave(reply)
        assert (await bench.send("/sessions/s/export", {}))["turns"] == 2


@pytest.mark.parametrize("out", [True, False], ids=["on disk", "in memory"])
async def test_a_refused_first_request_creates_the_session(tmp_path: Path, out: bool) -> None:
    long = {"messages": [user("word " * 800)]}
    async with serve(policy, out=tmp_path if out else None, context_length=600) as bench:
        for name in ("s", "t"):
            refusal = await bench.refusal(in_session(CHAT, name), long)
            assert refusal[:2] == (400, "context_length_exceeded")
            await bench.send(f"/sessions/{name}/reward", {"reward": 0.0})
            assert (await bench.get(f"/sessions/{name}/trajectories"))["trajectories"] == []
        await ask(bench, [USER])
        sessions = (await bench.get("/sessions"))["data"]
        listed = sorted((each["session_id"], each["sample"], each["turns"]) for each in sessions)
        assert listed == [("s", 0, 1), ("t", 0, 0)]
        assert [await bench.delete(name) for name in "st"] == [200, 200]
    if out:
        [episode] = read_episodes(tmp_path)
        assert (episode.task_id, episode.sample, episode.result.reward) == ("s", 0, 0.0)


async def test_a_reward_after_the_end_of_its_session_is_refused(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    async with serve(policy, out=tmp_path) as bench:
        await ask(bench, [USER])

        async def body() -> AsyncIterator[bytes]:
            yield b'{"rew'
            begun.set()
            await go_on.wait()
            yield b'ard":1.0}'

        async def reward() -> tuple[int, str]:
            url = f"{bench.url}/sessions/s/reward"
            async with bench.http.post(url, data=body(), headers=JSON) as response:
                return response.status, (await response.json())["error"]["code"]

        rewarding = asyncio.create_task(reward())
        await begun.wait()
        await bench.get("/health")
        assert await bench.delete() == 200
        go_on.set()
        assert await rewarding == (404, "session_not_found")
    assert [episode.result.reward for episode in read_episodes(tmp_path)] == [None]


async def test_a_check_canceled_before_it_starts_is_started_again(tmp_path: Path) -> None:
    """A DELETE in the same round of the event loop as the commit of an answer."""
    async with serve(policy, out=tmp_path) as bench:
        await ask(bench, [USER])
        live = bench.endpoint.sessions.find("s")
        live.start_checks()  # as the commit of an answer does with --verify always
        await live.end()  # the first step of a DELETE
        deleted = await bench.endpoint.sessions.drop("s")
        assert deleted is not None and deleted["turns"] == 1
        assert finished(tmp_path) == ["s"]


# --- a server that stops --------------------------------------------------------------------------

STOPPING = (503, "server_stopping", "true")


async def send(bench: ServedBench, method: str, path: str, body: Any = None) -> Any:
    """Return the status, the answer or the code of the error, and `x-should-retry`."""
    async with bench.http.request(method, bench.url + path, json=body) as response:
        answer = await response.json()
        code = answer["error"]["code"] if "error" in answer else answer
        return response.status, code, response.headers.get("x-should-retry")


async def say(bench: ServedBench, session: str = "s", *messages: Any) -> Any:
    return await send(bench, "POST", in_session(CHAT, session), {"messages": [USER, *messages]})


@pytest.mark.parametrize("finish", [False, True])
async def test_agents_that_ask_again_change_no_session(tmp_path: Path, finish: bool) -> None:
    names, never = [f"s{number}" for number in range(10)], asyncio.Event()
    held = Reply("Well.", hold=never, hold_after=1)
    policy = lambda request: held if request.call else "Hello."
    async with serve(policy, out=tmp_path) as bench:
        bench.store.finish_at_end = finish

        async def agent(name: str) -> list[Any]:
            _, answer, _ = await say(bench, name)
            talk = [answer["choices"][0]["message"], USER]
            return [await say(bench, name, *talk) for _ in range(4)]

        agents = [asyncio.create_task(agent(name)) for name in names]
        await bench.engine.until(lambda engine: engine.held == len(names))
        _, go_on = hold_calls(bench.store, "aclose")
        stopping = asyncio.create_task(bench.endpoint.aclose())
        for answers in await asyncio.gather(*agents):
            assert answers == [STOPPING] * 4
        go_on.set()
        await stopping
    async with serve(policy, out=tmp_path) as again:
        lives = [(live.id, len(live.trace)) for live in again.endpoint.sessions.all()]
        assert sorted(again.store._logs) == ([] if finish else [(name, 0) for name in names])
    assert sorted(lives) == ([] if finish else [(name, 1) for name in names])
    assert sorted(finished(tmp_path)) == (names if finish else [])


async def test_every_route_of_a_session_says_that_the_server_stops(tmp_path: Path) -> None:
    async with serve(out=tmp_path) as bench:
        await say(bench)
        await bench.send("/sessions/s/export", {})  # a finished session of that name
        await say(bench)
        ended, go_on = hold_calls(bench.store, "aclose")
        stopping = asyncio.create_task(bench.endpoint.aclose())
        await ended.wait()
        for method, path, body in (
            ("POST", in_session(CHAT), BODY),
            ("POST", in_session(CHAT, "new"), BODY),
            ("POST", CHAT, BODY),
            ("POST", in_session(TEXT), {"prompt": "Once"}),
            ("POST", "/sessions", {}),
            ("POST", "/sessions/s/reward", {"reward": 1.0}),
            ("POST", "/sessions/s/export", None),
            ("GET", "/sessions/s/trace", None),
            ("GET", "/sessions/s/trajectories", None),
            ("DELETE", "/sessions/s", None),
        ):
            assert await send(bench, method, path, body) == STOPPING, path
        assert bench.ids() == ["s"]
        go_on.set()
        await stopping


async def test_a_late_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer exists when the server stops, but is committed only after the store closed."""
    async with serve(out=tmp_path) as bench:
        ended, go_on = hold_calls(bench.store, "aclose")
        journal = bench.store.journal
        deliver, reached = EndpointReply.deliver, asyncio.Event()

        async def late(reply: EndpointReply) -> None:
            reached.set()
            await go_on.wait()
            await journal.flush()
            while not journal._closed:
                await asyncio.sleep(0)
            await deliver(reply)

        monkeypatch.setattr(EndpointReply, "deliver", late)
        asking = asyncio.create_task(say(bench))
        await reached.wait()
        stopping = asyncio.create_task(bench.endpoint.aclose())
        await ended.wait()
        go_on.set()
        assert await asking == STOPPING
        await stopping
    async with serve(out=tmp_path) as again:
        [live] = again.endpoint.sessions.all()
        assert live.trace == []
