"""`serve --out`: what is on the disk restores every session as it was, whenever the server ends.

A kill is a copy of the folder: what it has at that moment is all that a killed server leaves.
"""

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
from support.endpoints import streamed
from support.episodes import call
from support.listed_environment import TOOL
from support.patience import held
from support.recorded import ask, policy, state_of
from support.served import (
    CHAT,
    RESPONSES,
    RETRY,
    TEXT,
    USER,
    ServedBench,
    assistant,
    in_session,
    serve,
    system,
    user,
)

from toolroll.endpoint import Endpoint
from toolroll.endpoint.conversation.conversation_tree import NEW_ROOT
from toolroll.endpoint.replies import NEW_TEXT
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.session_store import JOURNAL_NAME, SessionStore, store_settings
from toolroll.rollout.errors import UsageError
from toolroll.testing import PolicyRequest, Reply

CHAT_IN_S, TEXT_IN_S = in_session(CHAT), in_session(TEXT)
BODY = {"messages": [USER]}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of the sessions."""
    return tmp_path / "out"


@asynccontextmanager
async def restarted(out: Path, **options: Any) -> AsyncIterator[ServedBench]:
    """The server that is started on a copy of `out`."""
    copy = out.with_name(f"{out.name}-again")
    shutil.copytree(out, copy)
    async with serve(policy, out=copy, **options) as bench:
        yield bench


async def respond(bench: ServedBench, text: str, **more: Any) -> str:
    """Return the id of a stored response."""
    body = {"input": text, "client_metadata": {"thread_id": text}, **more}
    return str((await bench.send(in_session(RESPONSES), body))["id"])


async def grow(bench: ServedBench) -> list[list[Any]]:
    """Make a session with every kind of line, and with routed experts; return the conversations
    that can be continued.
    """
    engine: Any = bench.served.engine
    engine.config = engine.config.model_copy(update={"return_routed_experts": True})
    await bench.create(temperature=0.5)
    main = [USER]
    for _ in range(4):
        main = await ask(bench, main, logprobs=True, top_logprobs=2)
    pair = await ask(bench, [system("S"), USER], n=2)
    edited = await ask(bench, [*main[:3], assistant("Edited"), USER], temperature=0.9)
    switched = await ask(bench, main, chat_template_kwargs={"enable_thinking": False})
    prefilled = await ask(bench, [USER, assistant("Well,")], continue_final_message=True)
    without_tools = await ask(bench, main, tools=[])
    answer = await bench.send(TEXT_IN_S, {"prompt": "Once", "n": 2})
    text = answer["choices"][0]["text"]
    await bench.send(TEXT_IN_S, {"prompt": f"Once{text} more"})
    await respond(bench, "first")
    await respond(bench, "second", previous_response_id=await respond(bench, "again"))
    await bench.send("/sessions/s/reward", {"reward": 0.5, "info": {"why": "half"}})
    return [main, pair, edited, switched, [*prefilled[:1], *prefilled[2:]], without_tools]


# --- what is restored -----------------------------------------------------------------------------


async def test_a_killed_session_is_restored_bit_by_bit_and_goes_on(out: Path) -> None:
    async with serve(policy, out=out) as bench:
        talks = await grow(bench)
        live, before = bench.endpoint.sessions.find("s"), state_of(bench)
        async with restarted(out) as again:
            restored = again.endpoint.sessions.find("s")
            assert state_of(again) == before
            assert len(set(live.tree.forks)) > 2
            assert len(before["experts"]) > 20
            for talk in talks:
                for server in (bench, again):
                    await ask(server, talk, tools=[] if talk is talks[-1] else [TOOL])
            assert restored.tree.forks == live.tree.forks
            assert restored.session.nodes == live.session.nodes
            ids, expected = (
                [node.ids.tobytes() for node, _ in session.trace[: -len(talks)]]
                for session in (restored, live)
            )
            assert ids == expected
            for node, _ in restored.trace:
                same = live.session.node(node.index).parent
                assert node.parent is not None and same is not None
                assert np.array_equal(node.parent.ids, same.ids)
            trajectories = await again.get("/sessions/s/trajectories")
            assert (trajectories["mismatches"], trajectories["reward"]) == ({}, 0.5)


async def test_text_that_is_not_shown_is_counted_after_a_restart(out: Path) -> None:
    reply = call(at="it").replace(', "arg', ', "why": "because", "arg')
    async with serve(reply, out=out) as bench:
        talk = await ask(bench, await ask(bench, [USER]))
        async with restarted(out) as again:
            for server, unshown in ((bench, 1), (again, 1), (again, 2)):
                session = await server.get("/sessions/s/trajectories")
                assert (session["mismatches"], session["forks"]) == ({"unshown": unshown}, [])
                turns = [turn for each in session["trajectories"] for turn in each["turns"]]
                assert {turn["excluded"] for turn in turns} == {None}
                if server is again and unshown == 1:
                    await ask(again, talk)


async def test_an_id_above_the_vocabulary_is_restored(tokenizer: Any, out: Path) -> None:
    """A model has more embedding rows than its tokenizer has tokens."""
    above = len(tokenizer) + 7
    reply = Reply(output_ids=[above, tokenizer.eos_token_id])
    async with serve(reply, out=out, vocab_size=above + 50) as bench:
        talk = await ask(bench, [USER])
        async with restarted(out, vocab_size=above + 50) as again:
            for server in (bench, again):
                await ask(server, talk)
                assert above in list(server.engine.log[-1].input_ids)


async def test_simultaneous_first_requests_are_restored_as_forks(out: Path) -> None:
    both = asyncio.Barrier(2)

    async def together(request: PolicyRequest) -> str:
        await both.wait()
        return "Hello."

    async with serve(together, out=out) as bench:
        await asyncio.gather(*(bench.ask(user(text), session="chat") for text in ("One", "Two")))
        path = in_session(TEXT, "text")
        await asyncio.gather(*(bench.send(path, {"prompt": text}) for text in ("One", "Two")))
        async with restarted(out) as again:
            for name, reason, forks in (("chat", NEW_ROOT, [NEW_ROOT]), ("text", NEW_TEXT, [])):
                reasons = [each["fork_reason"] for each in await bench.trajectories(name)]
                assert (reasons, await bench.forks(name)) == ([None, reason], forks)
                assert state_of(again, name) == state_of(bench, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_IN_S, {**BODY, "tools": [TOOL], "logprobs": True, "top_logprobs": 3, "n": 2}),
        (CHAT_IN_S, {"messages": [USER, assistant("So"), USER]}),
        (CHAT_IN_S, {**BODY, "tools": [TOOL], "chat_template_kwargs": {"x": 1}}),
        (TEXT_IN_S, {"prompt": "Once", "logprobs": 2, "return_token_ids": True}),
    ],
    ids=["logprobs", "a root", "switches", "text"],
)
async def test_a_retry_after_a_restart_is_equal(out: Path, path: str, body: dict[str, Any]) -> None:
    async def received(server: ServedBench, retry: int) -> bytes:
        headers = {"x-stainless-retry-count": str(retry)}
        async with server.http.post(server.url + path, json=body, headers=headers) as response:
            return await response.read()

    async with serve(policy, out=out) as bench:
        await ask(bench, [USER, USER])
        first = await received(bench, 0)
        assert b'"choices"' in first
        async with restarted(out) as again:
            assert [await received(again, retry) for retry in (1, 2)] == [first, first]
            assert again.engine.log == []
            assert state_of(again) == state_of(bench)
            assert await received(again, 0) != first  # a new request


async def test_a_stream_retried_after_a_restart_is_the_same(out: Path) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": [USER], "tools": [TOOL], "n": 3}
    async with serve(policy, out=out) as bench:
        first = await streamed(bench.client(), **fields)
        async with restarted(out) as again:
            same = await streamed(again.client(), **fields, extra_headers=RETRY)
            assert same.choices == first.choices
            assert again.engine.log == []


# --- the disk -------------------------------------------------------------------------------------


def hold_the_disk(
    monkeypatch: pytest.MonkeyPatch, out: Path
) -> tuple[threading.Event, threading.Event]:
    """Hold each answer that is being saved in `out`. Return the event that one is held, and the
    event that lets them go on.
    """
    holds = lambda descriptor: b'"chat"' in (out / JOURNAL_NAME).read_bytes()
    slow, reached, go_on = held(os.fdatasync, holds)
    monkeypatch.setattr(os, "fdatasync", slow)
    return reached, go_on


async def test_answers_being_saved_count_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(policy, out=out) as bench:
        await bench.create()
        bench.endpoint.sessions.find("s").max_turns = 3
        reached, go_on = hold_the_disk(monkeypatch, out)
        pair = asyncio.create_task(bench.send(CHAT_IN_S, {**BODY, "n": 2}))
        try:
            await asyncio.to_thread(reached.wait)
            refusal = await bench.refusal(CHAT_IN_S, {**BODY, "n": 2})
            assert refusal[:2] == (409, "turn_limit")
            last = asyncio.create_task(bench.send(CHAT_IN_S, BODY))
            sampled = asyncio.create_task(bench.engine.until(lambda engine: len(engine.log) == 3))
            await asyncio.wait((last, sampled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            go_on.set()
        await asyncio.gather(pair, last, sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_byte_of_an_answer_waits_for_the_disk(
    out: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with serve(policy, out=out) as bench:
        reached, go_on = hold_the_disk(monkeypatch, out)
        received = bytearray()

        async def read() -> None:
            body = {**BODY, "stream": stream}
            async with bench.http.post(bench.url + CHAT_IN_S, json=body) as response:
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
            go_on.set()
        await asking
        assert b'finish_reason":"stop"' in received


async def test_an_answer_that_cannot_be_saved_is_not_trained(out: Path) -> None:
    async with serve(policy, out=out) as bench:
        talk = await ask(bench, [USER])
        before = state_of(bench)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = (out / JOURNAL_NAME).stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        try:
            for headers in ({}, RETRY):
                body = {"messages": talk, "tools": [TOOL]}
                status, answer = await bench.post(CHAT_IN_S, body, **headers)
                assert (status, answer["error"]["code"]) == (503, "storage_failed")
                assert "File too large" in answer["error"]["message"]
            sampled = len(bench.engine.log)
            assert (await bench.refusal(CHAT_IN_S, {"messages": [USER, USER]}))[0] == 503
            assert len(bench.engine.log) == sampled  # nothing is sampled that cannot be kept
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        await bench.trajectories(refused=1)
    async with serve(policy, out=out) as again:
        assert state_of(again) == before
        await ask(again, talk)


async def test_an_answer_that_was_not_committed_is_returned_to_nobody(out: Path) -> None:
    go_on = asyncio.Event()
    hold = lambda request: Reply(f"Reply {request.index}.", hold=go_on, hold_after=1)
    async with serve(hold, out=out) as bench:
        first = asyncio.create_task(bench.refusal(CHAT_IN_S, BODY))
        await bench.engine.until(lambda engine: engine.held == 1)
        joined = asyncio.create_task(bench.refusal(CHAT_IN_S, BODY, **RETRY))
        await bench.joined("s", retry=1)
        journal = bench.store.journal
        journal._failure = "the disk is full"
        go_on.set()
        for refusal in await asyncio.gather(first, joined):
            assert refusal[:2] == (503, "storage_failed")
        journal._failure = None
        answer = await bench.send(CHAT_IN_S, BODY, **{"x-stainless-retry-count": "2"})
        assert answer["choices"][0]["message"]["content"] == "Reply 1."
        await bench.trajectories(refused=1)
        assert len((await bench.get("/sessions/s/trace"))["trace"]) == 1


# --- damage ---------------------------------------------------------------------------------------


async def test_a_torn_line_loses_only_itself(out: Path) -> None:
    async with serve(policy, out=out) as bench:
        talk = await ask(bench, [USER])
        before = state_of(bench)
        await ask(bench, talk)
    journal = out / JOURNAL_NAME
    whole = journal.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in (start, start + 1, (start + len(whole)) // 2, len(whole) - 1):
        journal.write_bytes(whole[:end])
        async with restarted(out) as again:
            assert state_of(again) == before
            await ask(again, talk)
        shutil.rmtree(out.with_name("out-again"))


async def refused_line(out: Path) -> str:
    """Return the words with which a server refuses to start on `out`."""
    with pytest.raises(UsageError) as refused:
        async with serve(policy, out=out):
            pass
    return str(refused.value)


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    """A line with other fields."""
    return lambda line: json.dumps(json.loads(line) | fields).encode() + b"\n"


DAMAGES: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "an empty object": (2, lambda line: b"{}\n" + line),
    "a line left out": (2, lambda line: b""),
    "a cut line": (2, lambda line: line[:-3] + b"\n"),
    "no sampling parameters": (2, changed(sampling_params=None)),
    "an unknown turn": (3, changed(turn=55)),
    "an unknown parent": (3, changed(parent=55)),
    "a switch for messages": (3, changed(switches={"messages": 1})),
    "an unknown answer": (4, changed(kept=["x", "y", 5])),
}
"""The number of a line, and what becomes of it."""


async def test_a_damaged_line_is_refused_by_number(out: Path, subtests: pytest.Subtests) -> None:
    """Until it is repaired."""
    async with serve(policy, out=out) as bench:
        await ask(bench, await ask(bench, [USER]))
        await respond(bench, "first")
    journal = out / JOURNAL_NAME
    whole = journal.read_bytes()
    for name, (number, damage) in DAMAGES.items():
        lines = whole.splitlines(keepends=True)
        lines[number - 1] = damage(lines[number - 1])
        journal.write_bytes(b"".join(lines))
        with subtests.test(name):
            words = f"{JOURNAL_NAME}, line {number}, cannot be restored"
            assert words in await refused_line(out)
    journal.write_bytes(b"{}\n" + whole)
    async with serve(policy) as bench:
        store = SessionStore(out, store_settings(bench.served, "embedded"))
        core = Endpoint(bench.served, store=store)
        for _ in range(2):
            with pytest.raises(UsageError, match="line 1, cannot be restored"):
                await core.start()
        journal.write_bytes(whole)
        async with core:
            assert len(core.sessions) == 1


async def test_another_model_or_a_second_server_is_refused(out: Path) -> None:
    async def nothing(live: LiveSession) -> None: ...

    async with serve(policy, out=out) as bench:
        assert "another process is writing into" in await refused_line(out)
        await ask(bench, [USER])
        settings = store_settings(bench.served, "embedded")
    for name in ("model", "tokenizer_sha256", "template_sha256", "history", "parser"):
        store = SessionStore(out, {**settings, name: "other"})
        with pytest.raises(UsageError, match=f"other settings for serve:\n  {name}: recorded"):
            await store.open(bench.endpoint.sessions, bench.endpoint.templates, nothing)
    async with serve(policy, out=out) as again:
        assert len(again.endpoint.sessions) == 1
