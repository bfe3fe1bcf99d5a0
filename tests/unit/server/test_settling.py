"""No sequence is handed out before it was verified, whichever way it leaves the endpoint."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from support.endpoints import Bench, endpoint

from toolroll.endpoint.in_process import ManagedSession, ToolrollClient
from toolroll.rollout.template.delta import RenderedDelta
from toolroll.rollout.template.record import AnswerRecord

USER: Any = {"role": "user", "content": "Hi"}
CHAT = "/sessions/s/v1/chat/completions"


def checking(tokenizer: Any, verify: str = "sample") -> AbstractAsyncContextManager[Bench]:
    return endpoint(tokenizer, lambda request: "Hello.", settings={"verify": verify})


async def talked(bench: Bench, turns: int = 2) -> list[Any]:
    """Play `turns` turns of session "s", the last of them with a delta that begins one character
    late.
    """
    messages = [USER]
    derive = bench.served.template.parts.deltas.derive
    for turn in range(turns):
        if turn == turns - 1:
            bench.served.template.parts.deltas.derive = lambda *args, **more: _late(  # type: ignore[method-assign]
                derive(*args, **more)
            )
        status, answer = await bench.post(CHAT, {"messages": messages})
        assert status == 200, answer
        messages = [
            *messages,
            answer["choices"][0]["message"],
            {"role": "user", "content": "Go on"},
        ]
    bench.served.template.parts.deltas.derive = derive  # type: ignore[method-assign]
    return messages


def _late(found: RenderedDelta) -> RenderedDelta:
    return RenderedDelta(found.whole, found.cut + 1, found.rewritten)


@pytest.mark.parametrize("verify", ["sample", "always"])
async def test_the_trace_says_what_verification_found(tokenizer: Any, verify: str) -> None:
    async with checking(tokenizer, verify) as bench:
        await talked(bench)
        trace = (await bench.get("/sessions/s/trace"))["trace"]
        assert [str(entry["excluded"]).partition(":")[0] for entry in trace] == ["verification"] * 2


async def test_a_right_trace_is_excluded_nowhere(tokenizer: Any) -> None:
    async with checking(tokenizer) as bench:
        await bench.post(CHAT, {"messages": [USER]})
        [entry] = (await bench.get("/sessions/s/trace"))["trace"]
        assert entry["excluded"] is None


@pytest.mark.parametrize("tree", [False, True])
async def test_a_state_is_settled_after_calls_of_its_client(tokenizer: Any, tree: bool) -> None:
    async with checking(tokenizer) as bench:
        await talked(bench)
        async with ToolrollClient(bench.endpoint, session="s"):
            state = ManagedSession(bench.endpoint, session="s", track_tree=tree).get_state()
        nodes = state["sequences"].values() if tree else state["nodes"]
        assert nodes
        assert all(token == -100 for node in nodes for token in node.masked_tokens)


async def test_what_is_committed_while_others_are_checked_is_checked_too(tokenizer: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()
    async with checking(tokenizer) as bench:
        await bench.post(CHAT, {"messages": [{"role": "user", "content": "Another talk"}]})
        verifier = bench.served.template.verifier
        check, seen = verifier.check, list[int]()

        def slow(sequence: Any) -> str | None:
            seen.append(len(sequence.messages))
            begun.set()
            assert go_on.wait(60)
            return check(sequence)

        verifier.check = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        await talked(bench)
        go_on.set()
        found = await asking
        assert seen == [2, 4]
        assert found["mismatches"]
        assert all(
            str(turn["excluded"]).startswith("verification")
            for one in found["trajectories"]
            for turn in one["turns"]
        )


@pytest.mark.parametrize("path", [CHAT, "/sessions/s/v1/completions"])
async def test_what_is_committed_while_logprobs_are_compared_is_compared_too(
    tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is free in the meantime."""
    begun, go_on, loop = threading.Event(), threading.Event(), threading.get_ident()
    check, compared = AnswerRecord.check, list[tuple[int, bool]]()

    def slow(record: AnswerRecord, trajectories: Any) -> str | None:
        compared.append((len(trajectories), threading.get_ident() == loop))
        begun.set()
        assert threading.get_ident() == loop or go_on.wait(60)
        return check(record, trajectories)

    monkeypatch.setattr(AnswerRecord, "check", slow)
    async with checking(tokenizer) as bench:
        await bench.post(CHAT, {"messages": [USER]})
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        other: Any = {"messages": [{"role": "user", "content": "Bye"}]}
        status, _ = await bench.post(path, other if path == CHAT else {"prompt": "Bye"})
        assert status == 200
        go_on.set()
        assert ((await asking)["mismatches"], compared) == ({}, [(1, False), (2, False)])


async def test_a_check_that_fails_is_made_again(tokenizer: Any) -> None:
    async with checking(tokenizer) as bench:
        await talked(bench)
        verifier = bench.served.template.verifier
        check = verifier.check

        def broken(sequence: Any) -> str | None:
            raise MemoryError

        verifier.check = broken  # type: ignore[method-assign]
        for _ in range(2):
            assert (await bench.get("/sessions/s/trace"))["error"]["code"] == "internal_error"
        verifier.check = check  # type: ignore[method-assign]
        assert (await bench.get("/sessions/s/trajectories"))["mismatches"]


async def test_a_session_deleted_while_it_is_checked_is_said_to_be(tokenizer: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()
    async with checking(tokenizer) as bench:
        await bench.post(CHAT, {"messages": [USER]})

        def waiting(sequence: Any) -> str | None:
            begun.set()
            go_on.wait(60)
            return None

        bench.served.template.verifier.check = waiting  # type: ignore[method-assign]
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        async with bench.http.delete(f"{bench.url}/sessions/s") as response:
            assert response.status == 200
        assert (await asking)["error"]["code"] == "request_aborted"
        go_on.set()
