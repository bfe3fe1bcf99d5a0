"""No sequence is handed out before it was verified, whichever way it leaves the endpoint."""

import asyncio
import threading
from typing import Any

import pytest
from support.patience import held
from support.served import CHAT, TEXT, USER, ServedBench, in_session, serve, user

from toolroll.endpoint.in_process import ManagedSession, ToolrollClient
from toolroll.rollout.template.delta import RenderedDelta
from toolroll.rollout.template.record import AnswerRecord

SAMPLED: dict[str, Any] = {"settings": {"verify": "sample"}}


async def talk_wrongly(bench: ServedBench) -> None:
    """Play two turns of session "s", the last with a delta that begins one character late."""
    deltas = bench.served.template.parts.deltas
    derive = deltas.derive

    def late(*args: Any, **more: Any) -> RenderedDelta:
        right = derive(*args, **more)
        return RenderedDelta(right.whole, right.cut + 1, right.rewritten)

    reply = await bench.chat(USER, tools=[])
    deltas.derive = late  # type: ignore[method-assign]
    await bench.chat(USER, reply, user("Go on"), tools=[])
    deltas.derive = derive  # type: ignore[method-assign]


@pytest.mark.parametrize("verify", ["sample", "always"])
async def test_the_trace_says_what_verification_found(verify: str) -> None:
    async with serve(settings={"verify": verify}) as bench:
        await talk_wrongly(bench)
        await bench.ask(USER, session="right")
        for session, reasons in (("s", ["verification"] * 2), ("right", ["None"])):
            trace = (await bench.get(f"/sessions/{session}/trace"))["trace"]
            assert [str(each["excluded"]).partition(":")[0] for each in trace] == reasons


@pytest.mark.parametrize("tree", [False, True])
async def test_a_state_is_settled_after_calls_of_its_client(tree: bool) -> None:
    async with serve(**SAMPLED) as bench:
        await talk_wrongly(bench)
        async with ToolrollClient(bench.endpoint, session="s"):
            state = ManagedSession(bench.endpoint, session="s", track_tree=tree).get_state()
        nodes = state["sequences"].values() if tree else state["nodes"]
        assert nodes
        assert all(token == -100 for node in nodes for token in node.masked_tokens)


async def test_what_is_committed_during_a_check_is_checked_too() -> None:
    async with serve(**SAMPLED) as bench:
        await bench.ask(user("Another talk"))
        verifier, checked = bench.served.template.verifier, list[int]()
        check, begun, go_on = held(verifier.check)

        def counted(sequence: Any) -> Any:
            checked.append(len(sequence.messages))
            return check(sequence)

        verifier.check = counted  # type: ignore[method-assign]
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        await talk_wrongly(bench)
        go_on.set()
        session = await asking
        assert checked == [2, 4]
        assert session["mismatches"]
        turns = [turn for each in session["trajectories"] for turn in each["turns"]]
        assert all(str(turn["excluded"]).startswith("verification") for turn in turns)


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": [user("Bye")]}), (TEXT, {"prompt": "Bye"})],
    ids=["chat", "text"],
)
async def test_what_is_committed_during_a_comparison_is_compared_too(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs are compared; the event loop is free in the meantime."""
    loop, compared = threading.get_ident(), list[tuple[int, bool]]()
    check, begun, go_on = held(AnswerRecord.check, lambda *args: threading.get_ident() != loop)

    def counted(record: AnswerRecord, trajectories: Any) -> Any:
        compared.append((len(trajectories), threading.get_ident() == loop))
        return check(record, trajectories)

    monkeypatch.setattr(AnswerRecord, "check", counted)
    async with serve(**SAMPLED) as bench:
        await bench.ask(USER)
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        await bench.send(in_session(path), body)
        go_on.set()
        assert ((await asking)["mismatches"], compared) == ({}, [(1, False), (2, False)])


async def test_a_check_that_fails_is_made_again() -> None:
    async with serve(**SAMPLED) as bench:
        await talk_wrongly(bench)
        verifier = bench.served.template.verifier
        check = verifier.check

        def broken(sequence: Any) -> str | None:
            raise MemoryError

        verifier.check = broken  # type: ignore[method-assign]
        for _ in range(2):
            assert (await bench.get("/sessions/s/trace"))["error"]["code"] == "internal_error"
        verifier.check = check  # type: ignore[method-assign]
        assert (await bench.get("/sessions/s/trajectories"))["mismatches"]


async def test_a_session_deleted_while_it_is_checked_is_said_to_be() -> None:
    async with serve(**SAMPLED) as bench:
        await bench.ask(USER)
        verifier: Any = bench.served.template.verifier
        verifier.check, begun, go_on = held(verifier.check)
        asking = asyncio.create_task(bench.get("/sessions/s/trajectories"))
        await asyncio.to_thread(begun.wait)
        assert await bench.delete() == 200
        assert (await asking)["error"]["code"] == "request_aborted"
        go_on.set()
