"""Requests that name no session: each conversation is a session, which its requests find."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.episodes import call
from support.listed_environment import TOOL
from support.recorded import break_the_end, finished, policy
from support.served import (
    CHAT,
    MESSAGES,
    MORE,
    RESPONSES,
    TEXT,
    USER,
    Message,
    ServedBench,
    assistant,
    in_session,
    numbered,
    serve,
    system,
    tool_results,
)
from support.wires import BODIES, continued

from toolroll.testing import Fault, Reply, fault_at

HELLO_REPLY = assistant("Hello.")
EXAMPLES = [USER, HELLO_REPLY, MORE]
LOOK = "I look." + call(at="x")


async def send(
    bench: ServedBench, path: str = CHAT, body: Any = None, *, retry: int = 0
) -> tuple[str, Any]:
    """Return the id of the session in the header of the answer, and the answer."""
    headers = {"x-stainless-retry-count": str(retry)}
    body = BODIES[path] if body is None else body
    async with bench.http.post(bench.url + path, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return response.headers["x-session-id"], answer


async def say(bench: ServedBench, *messages: Message, **fields: Any) -> tuple[str, Message]:
    """Return the id of the session and the reply."""
    name, answer = await send(bench, CHAT, {"messages": messages, **fields})
    return name, answer["choices"][0]["message"]


# --- which session a request continues ------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_the_next_requests_of_a_conversation_are_in_its_session(path: str) -> None:
    async with serve(numbered) as bench:
        name, answer = await send(bench, path)
        if path == CHAT:
            reply = answer["choices"][0]["message"]
            later: list[Any] = [{"messages": [USER, reply, MORE]}]
        else:
            later = [continued(BODIES[path], answer)]
        if path == RESPONSES:
            later.append({"input": "More", "previous_response_id": answer["id"]})
        for body in later:
            assert (await send(bench, path, body))[0] == name
        trajectories = await bench.trajectories(name)
        assert [len(each["turns"]) for each in trajectories] == [2] * len(later)
        assert len(bench.endpoint.sessions) == 1


async def test_a_stream_and_a_named_session_have_the_header_too() -> None:
    async with serve() as bench:
        body = {**BODIES[CHAT], "stream": True}
        async with bench.http.post(bench.url + CHAT, json=body) as response:
            await response.read()
            name = response.headers["x-session-id"]
        assert (await say(bench, *EXAMPLES))[0] == name
        assert (await send(bench, in_session(CHAT), BODIES[CHAT]))[0] == "s"


async def test_a_stored_response_is_found_in_its_session() -> None:
    async with serve() as bench:
        await send(bench, RESPONSES)
        # equal, and only its id tells them apart
        name, stored = await send(bench, RESPONSES)
        assert await bench.get(f"{RESPONSES}/{stored['id']}") == stored
        _, named = await send(bench, in_session(RESPONSES), BODIES[RESPONSES])
        for previous, expected in (
            (stored["id"], 200),
            (["x"], 400),
            ("resp_none", 404),
            (named["id"], 404),
        ):
            body = {"input": "More", "previous_response_id": previous}
            if expected == 200:
                assert (await send(bench, RESPONSES, body))[0] == name
            else:
                assert (await bench.refusal(RESPONSES, body))[0] == expected


def called(reply: Message, arguments: str) -> list[Message]:
    """The conversation after `reply`, with other arguments."""
    [tool_call] = reply["tool_calls"]
    tool_call["function"]["arguments"] = arguments
    return [USER, reply, *tool_results(reply)]


Repeats = Callable[[Message], list[Message]]
FOLLOWING: dict[str, tuple[str, Repeats, bool]] = {
    "an equal first request": ("Hello.", lambda reply: [USER], False),
    "another system message": ("Hello.", lambda reply: [system("S"), USER, reply, MORE], False),
    "another first message": ("Hello.", lambda reply: [MORE, reply, MORE], False),
    "another reply": ("Hello.", lambda reply: [USER, assistant("Ho."), MORE], False),
    "other arguments": (LOOK, lambda reply: called(reply, '{"at": "y"}'), False),
    "the same": ("Hello.", lambda reply: [USER, reply, MORE], True),
    "a call": (LOOK, lambda reply: [USER, reply, *tool_results(reply)], True),
    "other spacing": (LOOK, lambda reply: called(reply, '{ "at":"x" }'), True),
    "a default": (LOOK, lambda reply: called(reply, '{"at": "x", "far": 3}'), True),
    "a later edit": ("Hello.", lambda reply: [USER, reply, MORE, HELLO_REPLY, USER], True),
}
"""A reply, the messages of the next request, and whether it continues the session."""
PROPERTIES = {"at": {"type": "string"}, "far": {"type": "integer", "default": 3}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{**TOOL, "function": {**TOOL["function"], "parameters": PARAMETERS}}]


@pytest.mark.parametrize("case", FOLLOWING)
async def test_only_a_request_that_repeats_a_reply_continues(case: str) -> None:
    text, messages, continues = FOLLOWING[case]
    async with serve(text) as bench:
        # a session with the same start and another schema, and a named one, are not looked at
        await say(bench, USER, tools=[TOOL], temperature=0.5)
        await bench.ask(USER, tools=TOOLS)
        name, reply = await say(bench, USER, tools=TOOLS)
        if text == "Hello.":
            bench.endpoint.sessions.discard(bench.ids()[0])
        other, _ = await say(bench, *messages(reply), tools=TOOLS)
        assert (other == name) == continues
        for each in {name, other}:
            await bench.trajectories(each)


@pytest.mark.parametrize("messages", [EXAMPLES, EXAMPLES[1:]], ids=["user", "assistant"])
async def test_a_first_request_with_examples_starts_a_session(messages: list[Message]) -> None:
    async with serve(numbered) as bench:
        talks = [await say(bench, *messages) for _ in range(4)]
        assert len({name for name, _ in talks}) == 4
        name, reply = talks[-1]
        assert (await say(bench, *messages, reply, MORE))[0] == name


async def test_a_request_that_fits_two_sessions_equally_starts_one() -> None:
    async with serve(lambda request: "Yes." if request.call else "Hello.") as bench:
        (first, reply), (second, _) = await say(bench, USER), await say(bench, USER)
        third, last = await say(bench, USER, reply, MORE)
        assert len({first, second, third}) == 3
        # it repeats more of the third than of the others
        assert (await say(bench, USER, reply, MORE, last, USER))[0] == third
        bench.endpoint.sessions.discard(second)
        assert (await say(bench, USER, reply, USER))[0] == first
        for name in (first, third):
            await bench.trajectories(name)


async def test_the_ids_of_calls_tell_equal_conversations_apart() -> None:
    async with serve(lambda request: "Done." if request.call else LOOK) as bench:
        talks = [await say(bench, USER, tools=[TOOL]) for _ in range(3)]
        for name, reply in talks:
            messages = [USER, reply, *tool_results(reply)]
            same_name, last = await say(bench, *messages, tools=[TOOL])
            assert same_name == name
            # now only an earlier message has ids
            assert (await say(bench, *messages, last, MORE, tools=[TOOL]))[0] == name
        await bench.one_trajectory(turns=3, session=talks[0][0])


async def test_a_session_that_ends_while_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        name, reply = await say(bench, USER)
        tree = bench.endpoint.sessions.find(name).tree
        loop, fit = asyncio.get_running_loop(), tree.fit

        async def drop() -> None:
            bench.endpoint.sessions.discard(name)

        def ended(*compared: Any) -> Any:
            asyncio.run_coroutine_threadsafe(drop(), loop).result()
            return fit(*compared)

        monkeypatch.setattr(tree, "fit", ended)
        other, _ = await say(bench, USER, reply, MORE, user="x" * 200_000)
        assert other != name


# --- retries --------------------------------------------------------------------------------------


async def test_retries_join_the_requests_that_their_clients_gave_up() -> None:
    """Equal first requests: each of two clients gives up and asks again, the third waits."""
    hold = asyncio.Event()
    async with serve(Reply("Hello.", hold=hold)) as bench:
        first = [asyncio.create_task(send(bench)) for _ in range(3)]
        await bench.engine.until(lambda engine: engine.held == 3)
        for task in first[:2]:
            task.cancel()
        await asyncio.gather(*first[:2], return_exceptions=True)
        again = [asyncio.create_task(send(bench, retry=1)) for _ in range(2)]
        sessions = bench.endpoint.sessions
        while sum(each.joined for live in sessions.all() for each in live.pending.all()) < 2:
            await asyncio.sleep(0.01)
        hold.set()
        names = {name for name, _ in await asyncio.gather(first[2], *again)}
        assert len(names) == len(sessions) == len(bench.engine.log) == 3
        for name in names:
            await bench.trajectories(name)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_retry_of_an_answered_request_gets_its_answer(path: str) -> None:
    async with serve(numbered) as bench:
        first = await send(bench, path)
        assert await send(bench, path, retry=1) == first
        assert (await send(bench, path))[0] != first[0]
        if path == CHAT:
            body = {"messages": [USER, first[1]["choices"][0]["message"], MORE]}
            second = await send(bench, CHAT, body)
            assert await send(bench, CHAT, body, retry=2) == second
        assert len(bench.engine.log) == (3 if path == CHAT else 2)
        await bench.trajectories(first[0])


@pytest.mark.parametrize("together", [False, True])
async def test_equal_retries_of_several_clients_get_own_answers(together: bool) -> None:
    """Their first attempts did not arrive, for example because the server was down. Samples of one
    prompt must stay independent.
    """
    async with serve(numbered) as bench:
        sent = [send(bench, retry=1) for _ in range(3)]
        answers = await asyncio.gather(*sent) if together else [await each for each in sent]
        assert len({name for name, _ in answers}) == len({each["id"] for _, each in answers}) == 3
        first = await send(bench)
        assert await send(bench, retry=1) == first
        assert (await send(bench, retry=1))[0] != first[0]


async def test_a_retry_after_an_error_is_in_the_session_of_the_error() -> None:
    async with serve(numbered, faults=fault_at({1: Fault(abort_after=1)})) as bench:
        failed = ""
        for _ in range(3):
            if (await bench.post(CHAT, BODIES[CHAT]))[0] == 503:
                failed = bench.ids()[-1]
        assert (await send(bench, retry=1))[0] == failed
        for _ in range(2):  # only one retry follows the error: these get the others' answers
            assert (await send(bench, retry=1))[0] != failed
        assert (len(bench.endpoint.sessions), len(bench.engine.log)) == (3, 4)


# --- limits ---------------------------------------------------------------------------------------


async def test_the_least_recent_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the unnamed sessions, when the endpoint is full."""
    caplog.set_level("INFO", "toolroll.endpoint")
    async with serve(numbered, settings={"max_sessions": 3}, out=tmp_path) as bench:
        await bench.ask(USER)
        first, reply = await say(bench, USER)
        second, _ = await say(bench, USER)
        assert (await say(bench, USER, reply, MORE))[0] == first  # now the second is older
        third, _ = await say(bench, USER)
        assert bench.ids() == ["s", first, third]
        assert f"the unnamed session {second} ends" in caplog.text
        await bench.ask(USER, session="t")
        assert bench.ids() == ["s", third, "t"]
        # its conversation goes on in a new session
        assert (await say(bench, USER, reply, MORE))[0] not in (first, second, third)
        await bench.ask(USER, session="u")
        assert bench.endpoint.sessions.unnamed._by_opening == {}  # they are forgotten
        for path in (CHAT, in_session(CHAT, "v")):
            refusal = await bench.refusal(path, BODIES[CHAT])
            assert refusal[:2] == (429, "too_many_sessions")
    names = finished(tmp_path)
    assert names[:3] == [second, first, third]
    assert len(names) == 4


async def test_a_session_with_a_request_in_flight_is_not_ended() -> None:
    hold = asyncio.Event()
    async with serve(Reply("Hello.", hold=hold), settings={"max_sessions": 2}) as bench:
        waiting = [asyncio.create_task(say(bench, USER)) for _ in range(2)]
        await bench.engine.until(lambda engine: engine.held == 2)
        assert (await bench.refusal(CHAT, BODIES[CHAT]))[0] == 429
        hold.set()
        assert sorted([name for name, _ in await asyncio.gather(*waiting)]) == sorted(bench.ids())
        await say(bench, USER)
        assert len(bench.endpoint.sessions) == 2


async def test_a_session_that_could_not_be_finished_can_be_later(tmp_path: Path) -> None:
    async with serve(numbered, settings={"max_sessions": 1}, out=tmp_path) as bench:
        name, reply = await say(bench, USER)
        repair = break_the_end(bench, name)
        assert await bench.delete(name) == 500
        sessions = bench.endpoint.sessions
        live = sessions.find(name)
        for _ in range(2):  # the session is idle, and still cannot be finished
            live.used -= 7200.0
            sessions.drop_idle()
            await asyncio.wait(bench.store._finishing)
            assert [*sessions.all()] == [live]
        assert (await bench.refusal(CHAT, {"messages": [USER, reply, MORE]}))[0] == 429
        repair()
        assert await bench.delete(name) == 200
        assert (await say(bench, USER, reply, MORE))[0] != name
    assert finished(tmp_path) == [name]


async def test_requests_must_name_a_session_if_it_is_required() -> None:
    async with serve(settings={"require_session": True}) as bench:
        for path, body in {**BODIES, f"{MESSAGES}/count_tokens": BODIES[MESSAGES]}.items():
            status, answer = await bench.post(path, body)
            assert status == 400
            assert f"{bench.url}/sessions/NAME{path}" in answer["error"]["message"]
            assert answer["error"].get("code", "session_required") == "session_required"
            await bench.send(in_session(path), body)
            await bench.send(path, body, **{"x-session-id": "s"})
        await bench.send(CHAT, {**BODIES[CHAT], "session_id": "s"})
        assert (await bench.get("/v1/models"))["object"] == "list"
        assert bench.ids() == ["s"]


# --- on disk --------------------------------------------------------------------------------------


async def test_after_a_kill_a_conversation_finds_its_session(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with serve(policy, out=out) as bench:
        talks = [await say(bench, USER, tools=[TOOL]) for _ in range(2)]
        await bench.ask(USER, tools=[TOOL])
        text = await send(bench, TEXT)
        _, stored = await send(bench, RESPONSES)
        body = {"messages": [MORE]}
        lost, answer = await send(bench, CHAT, body)
        shutil.copytree(out, killed)
    async with serve(policy, out=killed) as again:
        for name, reply in talks:
            results = tool_results(reply) or [MORE]
            assert (await say(again, USER, reply, *results, tools=[TOOL]))[0] == name
            [trajectory] = (await again.get(f"/sessions/{name}/trajectories"))["trajectories"]
            assert len(trajectory["turns"]) == 2
        assert (await send(again, TEXT, retry=1))[0] == text[0]
        name, same = await send(again, CHAT, body, retry=1)
        assert (name, same["id"]) == (lost, answer["id"])
        assert await again.get(f"{RESPONSES}/{stored['id']}") == stored
        assert (await send(again, CHAT, body))[0] != lost
        again.store.finish_at_end = True
    names = finished(killed)
    assert len(names) == len(set(names)) == 7
    assert {name for name, _ in talks} < set(names)
