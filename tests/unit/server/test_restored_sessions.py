"""`serve --out`: what is on the disk restores every session as it was, whenever the server ends.

A kill is a copy of the folder: what it has at that moment is all that a killed server leaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.endpoints import Bench, endpoint, streamed
from support.episodes import call
from support.listed_environment import TOOL
from support.recorded import CHAT, USER, ask, policy

from toolroll.endpoint import Endpoint
from toolroll.endpoint.conversation.conversation_tree import NEW_ROOT
from toolroll.endpoint.replies import NEW_TEXT
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.session_store import (
    JOURNAL_NAME,
    SessionStore,
    store_settings,
)
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.episode_file import read_episodes, to_line
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.testing import PolicyRequest, Reply

TEXT = "/sessions/{}/v1/completions"


async def respond(bench: Bench, text: str, **more: Any) -> str:
    """Return the id of a stored response."""
    body = {"input": text, "client_metadata": {"thread_id": text}, **more}
    status, answer = await bench.post("/sessions/s/v1/responses", body)
    assert status == 200, answer
    return str(answer["id"])


async def grown(bench: Bench) -> list[list[Any]]:
    """A session with every kind of line, and with routed experts; return the conversations that can
    be continued.
    """
    engine: Any = bench.served.engine
    engine.config = engine.config.model_copy(update={"return_routed_experts": True})
    await bench.post("/sessions", {"session_id": "s", "sampling_params": {"temperature": 0.5}})
    main = [USER]
    for _ in range(4):
        main = await ask(bench, main, logprobs=True, top_logprobs=2)
    pair = await ask(bench, [{"role": "system", "content": "S"}, USER], n=2)
    edited = [*main[:3], {"role": "assistant", "content": "Edited"}, USER]
    edited = await ask(bench, edited, temperature=0.9)
    switched = await ask(bench, main, chat_template_kwargs={"enable_thinking": False})
    given = [USER, {"role": "assistant", "content": "Well,"}]
    prefilled = await ask(bench, given, continue_final_message=True)
    other = await ask(bench, main, tools=[])
    _, text = await bench.post(TEXT.format("s"), {"prompt": "Once", "n": 2})
    await bench.post(TEXT.format("s"), {"prompt": "Once" + text["choices"][0]["text"] + " more"})
    await respond(bench, "first")
    await respond(bench, "second", previous_response_id=await respond(bench, "again"))
    await bench.post("/sessions/s/reward", {"reward": 0.5, "info": {"why": "half"}})
    return [main, pair, edited, switched, [*prefilled[:1], *prefilled[2:]], other]


def state(live: LiveSession) -> dict[str, Any]:
    """Everything of a session that later requests and the trainer see, bit by bit."""
    session = live.session
    nodes = [session.node(at) for at in range(session.nodes)]
    return {
        "nodes": [
            (
                None if node.parent is None else node.parent.index,
                node.ids.tobytes(),
                None
                if node.completion is None or node.completion.logprobs is None
                else node.completion.logprobs.tobytes(),
                session._tree.fork_reasons.get(node.index),
                node.excluded,
                node.completion and session._tree.turn(node.index, excluded=None).sampling_params,
                None if node.completion is None else repr(node.completion),
            )
            for node in nodes
        ],
        "lineages": dict(session._tree.lineages),
        "experts": {
            at: (rows.dtype, rows.shape, rows.tobytes())
            for at, rows in session._tree.routed_experts.items()
        },
        "responses": {
            name: (stored.turn and stored.turn.node.index, stored.instructions, stored.body)
            for name, stored in live.responses._responses.items()
        },
        "trace": [(node.index, kind) for node, kind in live.trace],
        "turns": sorted(
            (
                turn.node.index,
                None if turn.parent is None else turn.parent.node.index,
                turn.digest,
                json.dumps(turn.messages()),
                turn.sampled,
                turn.tools.text,
                turn.prefill,
                turn.prefill_size,
                turn.continues,
                turn.preserved,
            )
            for same in live.tree._turns.values()
            for turn in same
        ),
        "forks": live.tree.forks,
        "reward": (live.reward, live.info, dict(live.sampling_params), live.created),
        "answers": dict(live.answers),
    }


@asynccontextmanager
async def restarted(tokenizer: Any, folder: Path, **options: Any) -> AsyncIterator[Bench]:
    """The server that is started on a copy of `folder`."""
    copy = folder.with_name(f"{folder.name}-again")
    shutil.copytree(folder, copy)
    async with endpoint(tokenizer, policy, out=copy, **options) as bench:
        yield bench


async def test_a_killed_session_is_restored_bit_by_bit_and_goes_on_as_if_it_had_not_been(
    tokenizer: Any, tmp_path: Path
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        talks = await grown(bench)
        live = bench.endpoint.sessions.find("s")
        async with restarted(tokenizer, tmp_path / "out") as again:
            restored = again.endpoint.sessions.find("s")
            assert state(restored) == state(live)
            assert len(set(live.tree.forks)) > 2
            assert len(state(live)["experts"]) > 20
            for at, talk in enumerate(talks):
                for one in (bench, again):
                    await ask(one, talk, tools=[] if at == 5 else [TOOL])
            assert restored.tree.forks == live.tree.forks
            assert restored.session.nodes == live.session.nodes
            ids = [node.ids.tobytes() for node, _ in restored.trace[: -len(talks)]]
            assert ids == [node.ids.tobytes() for node, _ in live.trace[: -len(talks)]]
            for node, _ in restored.trace:
                same = live.session.node(node.index).parent
                assert node.parent is not None and same is not None
                assert np.array_equal(node.parent.ids, same.ids)
            found = await again.get("/sessions/s/trajectories")
            assert found["mismatches"] == {}
            assert found["reward"] == 0.5


async def test_text_that_the_history_does_not_show_is_counted_also_after_a_restart(
    tokenizer: Any, tmp_path: Path
) -> None:
    said = call(at="it").replace(', "arg', ', "why": "because", "arg')
    async with endpoint(tokenizer, lambda _: said, out=tmp_path / "out") as bench:
        talk = await ask(bench, await ask(bench, [USER]))
        async with restarted(tokenizer, tmp_path / "out") as again:
            for one, unshown in ((bench, 1), (again, 1), (again, 2)):
                found = await one.get("/sessions/s/trajectories")
                assert (found["mismatches"], found["forks"]) == ({"unshown": unshown}, [])
                assert all(
                    turn["excluded"] is None
                    for trajectory in found["trajectories"]
                    for turn in trajectory["turns"]
                )
                if one is again and unshown == 1:
                    await ask(again, talk)


async def test_a_restored_session_goes_on_after_an_id_above_the_vocabulary(
    tokenizer: Any, tmp_path: Path
) -> None:
    """A model has more embedding rows than its tokenizer has tokens."""
    rows = Reply(output_ids=[len(tokenizer) + 7, tokenizer.eos_token_id])
    size = len(tokenizer) + 64
    async with endpoint(tokenizer, lambda _: rows, out=tmp_path / "out", vocab_size=size) as bench:
        talk = await ask(bench, [USER])
        async with restarted(tokenizer, tmp_path / "out", vocab_size=size) as again:
            for one in (bench, again):
                await ask(one, talk)
                prompt = one.engine.log[-1].input_ids
                assert len(tokenizer) + 7 in list(prompt)


@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_first_requests_at_the_same_time_are_forks_but_one_and_so_they_are_restored(
    tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    both = asyncio.Event()

    async def together(request: PolicyRequest) -> str:
        if request.index == 1:
            both.set()
        await both.wait()
        return "Hello."

    async with endpoint(tokenizer, together, out=tmp_path / "out") as bench:
        if kind == "chat":
            await asyncio.gather(*(ask(bench, [{**USER, "content": x}]) for x in ("One", "Two")))
        else:
            prompts = ({"prompt": x} for x in ("One", "Two"))
            await asyncio.gather(*(bench.post(TEXT.format("s"), body) for body in prompts))
        reasons = [one["fork_reason"] for one in await bench.trajectories()]
        assert reasons == [None, NEW_ROOT if kind == "chat" else NEW_TEXT]
        found = await bench.get("/sessions/s/trajectories")
        assert found["forks"] == ([NEW_ROOT] if kind == "chat" else [])
        live = bench.endpoint.sessions.find("s")
        async with restarted(tokenizer, tmp_path / "out") as again:
            assert state(again.endpoint.sessions.find("s")) == state(live)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "tools": [TOOL], "logprobs": True, "top_logprobs": 3, "n": 2}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "So"}, USER]}),
        (CHAT, {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"x": 1}}),
        (TEXT, {"prompt": "Once", "logprobs": 2, "return_token_ids": True}),
    ],
)
async def test_a_retry_after_a_restart_gets_the_same_bytes_and_samples_nothing(
    tokenizer: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async def send(bench: Bench, retry: int) -> bytes:
        headers = {"x-stainless-retry-count": str(retry)}
        async with bench.http.post(
            bench.url + path.format("s"), json=body, headers=headers
        ) as response:
            assert response.status == 200
            return await response.read()

    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        await ask(bench, [USER, USER])
        given = await send(bench, 0)
        live = bench.endpoint.sessions.find("s")
        async with restarted(tokenizer, tmp_path / "out") as again:
            restored = again.endpoint.sessions.find("s")
            assert await send(again, 1) == given
            assert await send(again, 2) == given
            assert again.engine.log == []
            assert state(restored) == state(live)
            assert await send(again, 0) != given  # a new request


async def test_a_stream_that_is_retried_after_a_restart_has_the_same_answer(
    tokenizer: Any, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [TOOL], "n": 3}
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        given = await streamed(bench.client(), **asked)
        async with restarted(tokenizer, tmp_path / "out") as again:
            retry = {"x-stainless-retry-count": "1"}
            same = await streamed(again.client(), **asked, extra_headers=retry)
            assert [one.model_dump() for one in same.choices] == [
                one.model_dump() for one in given.choices
            ]
            assert again.engine.log == []


def hold_the_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[threading.Event, threading.Event]:
    """Hold each answer that is being saved in `folder`. Return the event that one is held, and the
    event that lets them go on.
    """
    fdatasync = os.fdatasync
    held, reached = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        if b'"chat"' in (folder / JOURNAL_NAME).read_bytes():
            reached.set()
            held.wait()
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    return reached, held


async def test_an_answer_that_is_being_saved_is_counted_once_against_the_limit(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: Any = {"messages": [USER]}
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        await bench.post("/sessions", {"session_id": "s"})
        bench.endpoint.sessions.find("s").max_turns = 3
        reached, held = hold_the_disk(monkeypatch, tmp_path / "out")
        two = asyncio.create_task(bench.post(CHAT.format("s"), {**body, "n": 2}))
        try:
            await asyncio.to_thread(reached.wait)
            status, answer = await bench.post(CHAT.format("s"), {**body, "n": 2})
            assert (status, answer["error"]["code"]) == (409, "turn_limit")
            one = asyncio.create_task(bench.post(CHAT.format("s"), body))
            sampled = asyncio.create_task(bench.engine.until(lambda engine: len(engine.log) == 3))
            await asyncio.wait((one, sampled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            held.set()
        assert [status for status, _ in await asyncio.gather(two, one)] == [200, 200]
        await sampled


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_of_an_answer_waits_for_the_disk(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        reached, held = hold_the_disk(monkeypatch, tmp_path / "out")
        received = bytearray()

        async def read() -> None:
            body = {"messages": [USER], "stream": stream}
            async with bench.http.post(bench.url + CHAT.format("s"), json=body) as response:
                async for part in response.content.iter_any():
                    received.extend(part)

        asking = asyncio.create_task(read())
        try:
            await asyncio.to_thread(reached.wait)
            await bench.get("/health")  # whatever the endpoint has sent has arrived
            assert not asking.done()
            assert b'finish_reason":"' not in received
            assert b"[DONE]" not in received
        finally:
            held.set()
        await asking
        assert b'finish_reason":"stop"' in received


async def test_a_torn_line_loses_only_itself(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        talk = await ask(bench, [USER])
        before = state(bench.endpoint.sessions.find("s"))
        await ask(bench, talk)
    journal = tmp_path / "out" / JOURNAL_NAME
    whole = journal.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for at in (start, start + 1, (start + len(whole)) // 2, len(whole) - 1):
        journal.write_bytes(whole[:at])
        async with restarted(tokenizer, tmp_path / "out") as again:
            assert state(again.endpoint.sessions.find("s")) == before
            await ask(again, talk)
        shutil.rmtree(tmp_path / "out-again")


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], b"{}\n", *lines[1:]],
        lambda lines: [lines[0], b"\n", *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[1][:-3] + b"\n", *lines[2:]],
    ],
)
async def test_a_damaged_line_in_the_middle_is_refused_by_its_number(
    tokenizer: Any, tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        await ask(bench, await ask(bench, [USER]))
    journal = tmp_path / "out" / JOURNAL_NAME
    journal.write_bytes(b"".join(damage(journal.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UsageError, match=rf"{JOURNAL_NAME}, line 2, cannot be restored"):
        async with endpoint(tokenizer, policy, out=tmp_path / "out"):
            pass


@pytest.mark.parametrize(
    ("line", "damage"),
    [
        (1, {"tools": 1.5}),
        (1, {"sampling_params": None}),
        (2, {"turn": 55}),
        (2, {"parent": 55}),
        (2, {"switches": {"messages": 1}}),
        (2, {"switches": 5}),
        (3, {"kept": ["x", "y", 5]}),
    ],
)
async def test_a_line_that_refers_to_nothing_is_refused_by_its_number(
    tokenizer: Any, tmp_path: Path, line: int, damage: dict[str, Any]
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await ask(bench, await ask(bench, [USER]))
        await respond(bench, "first")
    path = tmp_path / JOURNAL_NAME
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    rows[line] |= damage
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(UsageError, match=rf"line {line + 1}, cannot be restored"):
        async with endpoint(tokenizer, policy, out=tmp_path):
            pass


async def test_a_store_that_could_not_be_opened_is_not_open(tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with endpoint(tokenizer, policy, out=out) as bench:
        await ask(bench, [USER])
    whole = (out / JOURNAL_NAME).read_bytes()
    (out / JOURNAL_NAME).write_bytes(b"{}\n" + whole)
    async with endpoint(tokenizer, policy) as bench:
        core = Endpoint(
            bench.served, store=SessionStore(out, store_settings(bench.served, "embedded"))
        )
        for _ in range(2):
            with pytest.raises(UsageError, match="line 1, cannot be restored"):
                await core.start()
        (out / JOURNAL_NAME).write_bytes(whole)
        async with core:
            assert [live.id for live in core.sessions.all()] == ["s"]


async def test_another_model_or_a_second_server_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as bench:
        with pytest.raises(UsageError, match="another process is writing into"):
            async with endpoint(tokenizer, policy, out=tmp_path / "out"):
                pass
        await ask(bench, [USER])
        facts = store_settings(bench.served, "embedded")
    for name in ("model", "tokenizer_sha256", "template_sha256", "history", "parser"):
        store = SessionStore(tmp_path / "out", {**facts, name: "other"})
        with pytest.raises(UsageError, match=f"other settings for serve:\n  {name}: recorded"):
            await store.open(bench.endpoint.sessions, bench.endpoint.templates, _nothing)
    async with endpoint(tokenizer, policy, out=tmp_path / "out") as again:
        assert len(again.endpoint.sessions) == 1


async def _nothing(live: LiveSession) -> None: ...


async def test_finished_sessions_are_episodes_and_the_others_go_on(
    tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    async with endpoint(tokenizer, policy, out=out) as bench:
        for name in ("a", "b", "c", "empty"):
            await bench.post("/sessions", {"session_id": name})
        for name in ("a", "b", "c"):
            await ask(bench, await ask(bench, [USER], name), name)
        await bench.post("/sessions/a/reward", {"reward": 1.0, "info": {"note": "good"}})
        expected = (await bench.get("/sessions/a/trajectories"))["trajectories"]
        journal = (out / JOURNAL_NAME).read_bytes()
        for name in ("a", "b", "empty"):
            async with bench.http.delete(f"{bench.url}/sessions/{name}") as response:
                assert (await response.json())["deleted"] is True
        await ask(bench, [USER], "a")  # another session of that name
    found = list(read_episodes(out))
    assert [(one.env, one.task_id, one.sample) for one in found] == [
        ("serve", "a", 0),
        ("serve", "b", 0),
    ]
    line = json.loads(to_line(found[0]))
    assert [to_json(one) for one in found[0].result.trajectories] == expected
    assert (line["reward"], line["info"]["note"], line["status"]) == (1.0, "good", "completed")
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "user", "assistant"]
    assert line["tools"] == [TOOL]
    assert found[1].result.reward is None
    summary = json.loads((out / "summary.json").read_bytes())["environments"]["serve"]
    assert (summary["episodes"], summary["graded"]) == (2, 1)
    # killed after a session was written as an episode, and before the journal said so
    shutil.copytree(out, tmp_path / "early")
    (tmp_path / "early" / JOURNAL_NAME).write_bytes(journal)
    for folder, names in ((out, ["c", "a"]), (tmp_path / "early", ["c", "empty"])):
        async with endpoint(tokenizer, policy, out=folder) as bench:
            lives = bench.endpoint.sessions.all()
            assert sorted(live.id for live in lives) == sorted(names)
            await ask(bench, [USER], "a")
            async with bench.http.delete(f"{bench.url}/sessions/a") as response:
                assert (await response.json())["sample"] == 1
        assert [one.sample for one in read_episodes(folder)] == [0, 0, 1]


async def test_idle_sessions_and_those_of_a_server_that_was_interrupted_are_finished(
    tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    async with endpoint(tokenizer, policy, out=out) as bench:
        for name in ("old", "new"):
            await ask(bench, [USER], name)
        bench.endpoint.sessions.find("new")
        old = bench.endpoint.sessions.get("old")
        assert old is not None
        old.used -= 3600.0
        bench.endpoint.sessions.drop_idle()
        assert [live.id for live in bench.endpoint.sessions.all()] == ["new"]
        assert bench.endpoint.store is not None
        bench.endpoint.store.finish_at_end = True
    assert [one.task_id for one in read_episodes(out)] == ["old", "new"]
    assert [one.result.metrics["turns"] for one in read_episodes(out)] == [1, 1]
    async with endpoint(tokenizer, policy, out=out) as bench:
        assert len(bench.endpoint.sessions) == 0


async def test_the_journal_is_compacted_when_sessions_finish(
    tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    async with endpoint(tokenizer, policy, out=out) as bench:
        bench.endpoint.store._most_stale = 0  # type: ignore[union-attr]
        for name in ("a", "b"):
            await ask(bench, await ask(bench, [USER], name), name)
        kept = state(bench.endpoint.sessions.find("b"))
        size = (out / JOURNAL_NAME).stat().st_size
        async with bench.http.delete(f"{bench.url}/sessions/a") as response:
            assert response.status == 200
        await bench.endpoint.store.journal.flush()  # type: ignore[union-attr]
        data = (out / JOURNAL_NAME).read_bytes()
        assert b'"s":"a"' not in data
        assert len(data) < size
    async with endpoint(tokenizer, policy, out=out) as again:
        assert state(again.endpoint.sessions.find("b")) == kept
        assert [live.id for live in again.endpoint.sessions.all()] == ["b"]


async def test_an_answer_that_cannot_be_saved_is_not_returned_and_not_trained(
    tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    async with endpoint(tokenizer, policy, out=out) as bench:
        talk = await ask(bench, [USER])
        before = state(bench.endpoint.sessions.find("s"))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((out / JOURNAL_NAME).stat().st_size + 100, limit[1])
        )
        try:
            for retry in ("0", "1"):
                status, answer = await bench.post(
                    CHAT.format("s"),
                    {"messages": talk, "tools": [TOOL]},
                    **{"x-stainless-retry-count": retry},
                )
                assert (status, answer["error"]["code"]) == (503, "storage_failed")
            assert "File too large" in answer["error"]["message"]
            sampled = len(bench.engine.log)
            status, _ = await bench.post(CHAT.format("s"), {"messages": [USER, USER]})
            assert status == 503
            assert len(bench.engine.log) == sampled  # nothing is sampled that cannot be kept
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        await bench.trajectories(refused=1)
    async with endpoint(tokenizer, policy, out=out) as again:
        assert state(again.endpoint.sessions.find("s")) == before
        await ask(again, talk)


async def test_an_answer_that_was_not_committed_is_returned_to_nobody(
    tokenizer: Any, tmp_path: Path
) -> None:
    go_on, body = asyncio.Event(), {"messages": [USER]}

    def held(request: PolicyRequest) -> Reply:
        return Reply(f"Reply {request.index}.", hold=go_on, hold_after=1)

    async with endpoint(tokenizer, held, out=tmp_path) as bench:

        async def send(retry: int) -> tuple[int, Any]:
            headers = {"x-stainless-retry-count": str(retry)}
            return await bench.post(CHAT.format("s"), body, **headers)

        first = asyncio.create_task(send(0))
        await bench.engine.until(lambda core: core.held == 1)
        joined = asyncio.create_task(send(1))
        await bench.joined("s", retry=1)
        journal = bench.endpoint.store.journal  # type: ignore[union-attr]
        journal._failure = "the disk is full"
        go_on.set()
        for status, answer in await asyncio.gather(first, joined):
            assert (status, answer["error"]["code"]) == (503, "storage_failed")
        journal._failure = None
        status, answer = await send(2)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "Reply 1."
        await bench.trajectories(refused=1)
        assert len((await bench.get("/sessions/s/trace"))["trace"]) == 1
