"""Requests that name no session: each conversation is a session, which its requests find."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.anthropic_wire import HELLO
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.recorded import policy

from toolroll.cli import serve_command
from toolroll.endpoint.dialects.dialect import ParsedRequest
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.requests.request_bodies import ChatRequest
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.sessions import Sessions
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import Fault, PolicyRequest, Reply, fault_at

USER: Any = {"role": "user", "content": "Hi"}
MORE: Any = {"role": "user", "content": "More"}
EXAMPLES: list[Any] = [USER, {"role": "assistant", "content": "Hello."}, MORE]
CHAT = "/v1/chat/completions"


async def send(
    bench: Bench, body: dict[str, Any], *, path: str = CHAT, retry: int = 0
) -> tuple[str, Any]:
    """Return the id of the session in the answer's header, and the answer."""
    headers = {"x-stainless-retry-count": str(retry)}
    async with bench.http.post(bench.url + path, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return response.headers["x-session-id"], answer


async def say(bench: Bench, *messages: Any, **more: Any) -> tuple[str, Any]:
    """Return the id of the session and the reply."""
    name, answer = await send(bench, {"messages": list(messages), **more})
    return name, answer["choices"][0]["message"]


def numbered(request: PolicyRequest) -> str:
    return f"Reply {request.index}."


def same(request: PolicyRequest) -> str:
    return "Hello."


def looks(request: PolicyRequest) -> str:
    return "I look." + call(at="x")


# --- which session a request continues ------------------------------------------------------------


def chat_turns(reply: Any) -> tuple[dict[str, Any], list[Any]]:
    return {"messages": [USER]}, [{"messages": [USER, reply["choices"][0]["message"], MORE]}]


def anthropic_turns(reply: Any) -> tuple[dict[str, Any], list[Any]]:
    echoed = {"role": "assistant", "content": reply["content"]}
    return HELLO, [{**HELLO, "messages": [*HELLO["messages"], echoed, MORE]}]


def response_turns(reply: Any) -> tuple[dict[str, Any], list[Any]]:
    items = [USER, *reply["output"], MORE]
    return {"input": "Hi"}, [{"input": items}, {"input": "M", "previous_response_id": reply["id"]}]


class Anything(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return Anything()


@pytest.mark.parametrize(
    ("path", "turns"),
    [(CHAT, chat_turns), ("/v1/messages", anthropic_turns), ("/v1/responses", response_turns)],
)
async def test_the_next_requests_of_a_conversation_are_in_its_session(
    tokenizer: Any, path: str, turns: Callable[[Any], tuple[dict[str, Any], list[Any]]]
) -> None:
    async with endpoint(tokenizer, numbered) as bench:
        body, _ = turns(Anything(choices=[Anything()], output=[]))
        name, reply = await send(bench, body, path=path)
        _, later = turns(reply)
        for body in later:
            assert (await send(bench, body, path=path))[0] == name
        found = await bench.trajectories(name)
        assert [len(one["turns"]) for one in found] == [2, 2][: len(later)]
        assert len(bench.endpoint.sessions) == 1


async def test_a_stream_and_a_named_session_have_the_header_too(tokenizer: Any) -> None:
    async with endpoint(tokenizer, same) as bench:
        body = {"messages": [USER], "stream": True}
        async with bench.http.post(bench.url + CHAT, json=body) as response:
            await response.read()
            name = response.headers["x-session-id"]
        assert (await say(bench, USER, {"role": "assistant", "content": "Hello."}, MORE))[0] == name
        assert (await send(bench, {"messages": [USER]}, path=f"/sessions/s{CHAT}"))[0] == "s"


async def test_a_stored_response_is_found_in_the_session_of_its_conversation(
    tokenizer: Any,
) -> None:
    async with endpoint(tokenizer, same) as bench:
        await send(bench, {"input": "Hi"}, path="/v1/responses")
        # equal, and only its id tells them apart
        name, made = await send(bench, {"input": "Hi"}, path="/v1/responses")
        assert await bench.get(f"/v1/responses/{made['id']}") == made
        body = {"input": "More", "previous_response_id": made["id"]}
        assert (await send(bench, body, path="/v1/responses"))[0] == name
        for wrong in (["x"], "resp_none"):
            body = {"input": "More", "previous_response_id": wrong}
            assert (await bench.post("/v1/responses", body))[0] in (400, 404)
        _, named = await send(bench, {"input": "Hi"}, path="/sessions/s/v1/responses")
        body = {"input": "More", "previous_response_id": named["id"]}
        assert (await bench.post("/v1/responses", body))[0] == 404


NEW: dict[str, tuple[Callable[[PolicyRequest], str], Callable[[Any], list[Any]]]] = {
    "an equal first request": (same, lambda reply: [USER]),
    "another system message": (
        same,
        lambda reply: [{"role": "system", "content": "S"}, USER, reply, MORE],
    ),
    "another first message": (same, lambda reply: [MORE, reply, MORE]),
    "another reply": (same, lambda reply: [USER, {**reply, "content": "Ho."}, MORE]),
    "other arguments": (looks, lambda reply: [USER, calls(reply, '{"at": "y"}'), seen(reply)]),
}
CONTINUED: dict[str, tuple[Callable[[PolicyRequest], str], Callable[[Any], list[Any]]]] = {
    "the same": (same, lambda reply: [USER, reply, MORE]),
    "a call": (looks, lambda reply: [USER, reply, seen(reply)]),
    "other spacing": (looks, lambda reply: [USER, calls(reply, '{ "at":"x" }'), seen(reply)]),
    "an argument's default": (
        looks,
        lambda reply: [USER, calls(reply, '{"at": "x", "far": 3}'), seen(reply)],
    ),
    "an edit after the reply": (same, lambda reply: [USER, reply, MORE, EXAMPLES[1], USER]),
}
FAR: Any = {"type": "integer", "default": 3}
TOOLS = [
    {
        **TOOL,
        "function": {
            **TOOL["function"],
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "far": FAR},
            },
        },
    }
]


def calls(reply: Any, arguments: str) -> Any:
    [made] = reply["tool_calls"]
    return {
        **reply,
        "tool_calls": [{**made, "function": {**made["function"], "arguments": arguments}}],
    }


def seen(reply: Any) -> Any:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "seen"}


@pytest.mark.parametrize("case", [*NEW, *CONTINUED])
async def test_only_a_request_that_repeats_a_reply_continues(tokenizer: Any, case: str) -> None:
    said, messages = {**NEW, **CONTINUED}[case]
    async with endpoint(tokenizer, said) as bench:
        # a session with the same start and another schema, and a named one, are not looked at
        await say(bench, USER, tools=[TOOL], temperature=0.5)
        await bench.post(f"/sessions/s{CHAT}", {"messages": [USER], "tools": TOOLS})
        before = await say(bench, USER, tools=TOOLS)
        if said is same:
            bench.endpoint.sessions.discard(bench.endpoint.sessions.all()[0].id)
        name, reply = before
        other, _ = await say(bench, *messages(reply), tools=TOOLS)
        assert (other == name) == (case in CONTINUED)
        for found in {name, other}:
            await bench.trajectories(found)


@pytest.mark.parametrize("messages", [EXAMPLES, EXAMPLES[1:]])
async def test_a_first_request_with_examples_starts_a_session(
    tokenizer: Any, messages: list[Any]
) -> None:
    async with endpoint(tokenizer, numbered) as bench:
        names = {(await say(bench, *messages))[0] for _ in range(3)}
        assert len(names) == 3
        name, reply = await say(bench, *messages)
        assert (await say(bench, *messages, reply, MORE))[0] == name


async def test_a_request_that_fits_two_sessions_equally_starts_a_new_one(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello." if request.call < 1 else "Yes.") as b:
        (one, reply), (two, _) = await say(b, USER), await say(b, USER)
        three, last = await say(b, USER, reply, MORE)
        assert len({one, two, three}) == 3
        # it repeats more of the third than of the others
        assert (await say(b, USER, reply, MORE, last, USER))[0] == three
        b.endpoint.sessions.discard(two)
        assert (await say(b, USER, reply, USER))[0] == one
        for name in (one, three):
            await b.trajectories(name)


async def test_the_ids_of_calls_tell_equal_conversations_apart(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer, lambda request: looks(request) if request.call < 1 else "Done."
    ) as bench:
        talks = [await say(bench, USER, tools=[TOOL]) for _ in range(3)]
        for name, reply in talks:
            messages = [USER, reply, seen(reply)]
            same_name, last = await say(bench, *messages, tools=[TOOL])
            assert same_name == name
            # now only an earlier message has ids
            assert (await say(bench, *messages, last, MORE, tools=[TOOL]))[0] == name
        [found] = await bench.trajectories(talks[0][0])
        assert len(found["turns"]) == 3


async def test_only_sessions_with_the_same_first_messages_are_compared() -> None:
    """And none with a first request."""
    sessions = Sessions(EndpointSettings(), lambda name: lambda: 0)

    async def found(*messages: Any) -> LiveSession:
        parsed = ParsedRequest(ChatRequest(messages=[USER]), list(messages), ToolList.of([]))
        live = sessions.new_unnamed()
        return await sessions.unnamed.find(live, parsed, b"key", 0, large=False)

    live = await found(USER)
    sessions.add(live)
    live.tree = None  # type: ignore[assignment] # so a comparison fails
    await found(USER)
    await found(MORE, EXAMPLES[1], MORE)
    with pytest.raises(AttributeError):
        await found(*EXAMPLES)


async def test_a_session_that_ends_while_it_is_compared_is_not_continued(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with endpoint(tokenizer, same) as bench:
        name, reply = await say(bench, USER)
        tree = bench.endpoint.sessions.find(name).tree
        loop = asyncio.get_running_loop()
        fit = tree.fit

        def ended(*compared: Any) -> Any:
            future = asyncio.run_coroutine_threadsafe(drop(), loop)
            future.result()
            return fit(*compared)

        async def drop() -> None:
            bench.endpoint.sessions.discard(name)

        monkeypatch.setattr(tree, "fit", ended)
        other, _ = await say(bench, USER, reply, MORE, user="x" * 200_000)
        assert other != name


async def test_a_text_completion_is_a_session(tokenizer: Any) -> None:
    async with endpoint(tokenizer, same) as bench:
        path = "/v1/completions"
        names = [(await send(bench, {"prompt": "Once"}, path=path))[0] for _ in range(2)]
        assert len(set(names)) == 2
        again, _ = await send(bench, {"prompt": "Once"}, path=path, retry=1)
        assert again == names[-1]
        await bench.trajectories(names[0])


# --- retries --------------------------------------------------------------------------------------


async def test_retries_join_the_requests_that_their_clients_gave_up(tokenizer: Any) -> None:
    """Equal first requests: each of two clients gives up and asks again, the third waits."""
    hold = asyncio.Event()
    async with endpoint(tokenizer, lambda request: Reply("Hello.", hold=hold)) as bench:
        asked = [asyncio.create_task(say(bench, USER)) for _ in range(3)]
        await bench.engine.until(lambda engine: engine.held == 3)
        for task in asked[:2]:
            task.cancel()
        await asyncio.gather(*asked[:2], return_exceptions=True)
        again = [asyncio.create_task(send(bench, {"messages": [USER]}, retry=1)) for _ in range(2)]
        while sum(one.joined for one in pending(bench)) < 2:
            await asyncio.sleep(0.01)
        hold.set()
        names = {name for name, _ in await asyncio.gather(asked[2], *again)}
        assert len(names) == len(bench.endpoint.sessions) == len(bench.engine.log) == 3
        for name in names:
            await bench.trajectories(name)


def pending(bench: Bench) -> list[Any]:
    return [one for live in bench.endpoint.sessions.all() for one in live.pending.all()]


async def test_a_retry_of_an_answered_request_gets_its_answer(tokenizer: Any) -> None:
    async with endpoint(tokenizer, numbered) as bench:
        name, answer = await send(bench, {"messages": [USER]})
        assert await send(bench, {"messages": [USER]}, retry=1) == (name, answer)
        other, _ = await send(bench, {"messages": [USER]})
        assert other != name
        reply = answer["choices"][0]["message"]
        body = {"messages": [USER, reply, MORE]}
        first = await send(bench, body)
        assert await send(bench, body, retry=2) == first
        assert len(bench.engine.log) == 3


@pytest.mark.parametrize("together", [False, True])
async def test_equal_retries_of_several_clients_get_answers_of_their_own(
    tokenizer: Any, together: bool
) -> None:
    """Their first attempts did not arrive, for example because the server was down. Samples of one
    prompt must stay independent.
    """
    async with endpoint(tokenizer, numbered) as bench:
        sent = [send(bench, {"messages": [USER]}, retry=1) for _ in range(3)]
        got = await asyncio.gather(*sent) if together else [await one for one in sent]
        assert len({name for name, _ in got}) == len({one["id"] for _, one in got}) == 3
        first, answer = await send(bench, {"messages": [USER]})
        assert await send(bench, {"messages": [USER]}, retry=1) == (first, answer)
        assert (await send(bench, {"messages": [USER]}, retry=1))[0] != first


async def test_a_retry_after_an_error_is_in_the_session_of_the_error(tokenizer: Any) -> None:
    faults = fault_at({1: Fault(abort_after=1)})
    async with endpoint(tokenizer, numbered, faults=faults) as bench:
        failed = ""
        for _ in range(3):
            if (await bench.post(CHAT, {"messages": [USER]}))[0] == 503:
                failed = bench.endpoint.sessions.all()[-1].id
        name, _ = await send(bench, {"messages": [USER]}, retry=1)
        assert name == failed
        for _ in range(2):  # only one retry follows the error: these get the others' answers
            assert (await send(bench, {"messages": [USER]}, retry=1))[0] != failed
        assert (len(bench.endpoint.sessions), len(bench.engine.log)) == (3, 4)


# --- limits ---------------------------------------------------------------------------------------


async def test_a_full_endpoint_finishes_the_unnamed_session_that_was_used_least_recently(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "toolroll.endpoint")
    settings = {"max_sessions": 3}
    async with endpoint(tokenizer, numbered, settings=settings, out=tmp_path) as bench:
        await bench.post(f"/sessions/s{CHAT}", {"messages": [USER]})
        first, reply = await say(bench, USER)
        second, _ = await say(bench, USER)
        assert (await say(bench, USER, reply, MORE))[0] == first  # now the second is older
        third, _ = await say(bench, USER)
        assert [live.id for live in bench.endpoint.sessions.all()] == ["s", first, third]
        assert f"the unnamed session {second} ends" in caplog.text
        await bench.post(f"/sessions/t{CHAT}", {"messages": [USER]})
        assert [live.id for live in bench.endpoint.sessions.all()] == ["s", third, "t"]
        # its conversation goes on in a new session
        assert (await say(bench, USER, reply, MORE))[0] not in (first, second, third)
        await bench.post(f"/sessions/u{CHAT}", {"messages": [USER]})
        for path in (CHAT, f"/sessions/v{CHAT}"):
            status, answer = await bench.post(path, {"messages": [USER]})
            assert (status, answer["error"]["code"]) == (429, "too_many_sessions")
    names = [one.task_id for one in read_episodes(tmp_path)]
    assert names[:3] == [second, first, third]
    assert len(names) == 4


async def test_a_session_with_a_request_in_flight_is_not_finished_for_another(
    tokenizer: Any,
) -> None:
    hold = asyncio.Event()
    async with endpoint(
        tokenizer, lambda request: Reply("Hello.", hold=hold), settings={"max_sessions": 2}
    ) as bench:
        asked = [asyncio.create_task(say(bench, USER)) for _ in range(2)]
        await bench.engine.until(lambda engine: engine.held == 2)
        assert (await bench.post(CHAT, {"messages": [USER]}))[0] == 429
        hold.set()
        names = [name for name, _ in await asyncio.gather(*asked)]
        assert sorted(names) == sorted(live.id for live in bench.endpoint.sessions.all())
        await say(bench, USER)
        assert len(bench.endpoint.sessions) == 2


async def test_a_session_that_could_not_be_finished_is_neither_continued_nor_finished_again(
    tokenizer: Any, tmp_path: Path
) -> None:
    settings = {"max_sessions": 1}
    async with endpoint(tokenizer, numbered, settings=settings, out=tmp_path) as bench:
        store, sessions = bench.endpoint.store, bench.endpoint.sessions
        assert store is not None
        settle = store._settle

        async def broken(live: LiveSession) -> None:
            raise RuntimeError("broken")

        store._settle = broken
        name, reply = await say(bench, USER)
        sessions.discard(name)
        await asyncio.wait(store._finishing)
        assert sessions.get(name) is not None
        assert (await bench.post(CHAT, {"messages": [USER, reply, MORE]}))[0] == 429
        store._settle = settle
        async with bench.http.delete(f"{bench.url}/sessions/{name}") as response:
            assert response.status == 200
        assert (await say(bench, USER, reply, MORE))[0] != name
    assert [one.task_id for one in read_episodes(tmp_path)] == [name]


async def test_an_unused_session_ends_and_is_forgotten(tokenizer: Any) -> None:
    async with endpoint(tokenizer, numbered) as bench:
        sessions = bench.endpoint.sessions
        talks = [await say(bench, USER) for _ in range(2)]
        sessions.all()[0].used -= 7200.0
        sessions.drop_idle()
        assert [live.id for live in sessions.unnamed.all()] == [talks[1][0]]
        await sessions.drop(talks[1][0])
        assert sessions.unnamed._by_opening == {}
        for _, reply in talks:
            await say(bench, USER, reply, MORE)
        assert len(sessions) == 2


async def test_only_requests_with_a_session_are_served_if_they_must_name_one(
    tokenizer: Any,
) -> None:
    bodies: dict[str, Any] = {
        CHAT: {"messages": [USER]},
        "/v1/completions": {"prompt": "Once"},
        "/v1/messages": HELLO,
        "/v1/messages/count_tokens": HELLO,
        "/v1/responses": {"input": "Hi"},
    }
    async with endpoint(tokenizer, same, settings={"require_session": True}) as bench:
        for path, body in bodies.items():
            status, answer = await bench.post(path, body)
            assert status == 400
            assert f"{bench.url}/sessions/NAME{path}" in answer["error"]["message"]
            assert answer["error"].get("code", "session_required") == "session_required"
            assert (await bench.post(f"/sessions/s{path}", body))[0] == 200
            assert (await bench.post(path, body, **{"x-session-id": "s"}))[0] == 200
        assert (await bench.get("/v1/models"))["object"] == "list"
        assert [live.id for live in bench.endpoint.sessions.all()] == ["s"]


@pytest.mark.parametrize("required", [False, True])
def test_the_address_that_is_printed_records(
    required: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_command._ready("http://h:1", require_session=required)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "http://h:1/sessions/NAME/v1" in said
    assert ("http://h:1/v1, each conversation is a session" in said) != required


# --- on disk --------------------------------------------------------------------------------------


async def test_after_a_kill_a_conversation_finds_its_session(
    tokenizer: Any, tmp_path: Path
) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"
    async with endpoint(tokenizer, policy, out=out) as bench:
        talks = [await say(bench, USER, tools=[TOOL]) for _ in range(2)]
        await bench.post(f"/sessions/s{CHAT}", {"messages": [USER], "tools": [TOOL]})
        text = await send(bench, {"prompt": "Once"}, path="/v1/completions")
        _, made = await send(bench, {"input": "Hi"}, path="/v1/responses")
        lost = await send(bench, {"messages": [MORE]})
        shutil.copytree(out, killed)
    async with endpoint(tokenizer, policy, out=killed) as again:
        for name, reply in talks:
            tools = [seen(reply)] if reply.get("tool_calls") else [MORE]
            assert (await say(again, USER, reply, *tools, tools=[TOOL]))[0] == name
            assert [len(one["turns"]) for one in await trained(again, name)] == [2]
        prompt = {"prompt": "Once"}
        assert (await send(again, prompt, path="/v1/completions", retry=1))[0] == text[0]
        name, answer = await send(again, {"messages": [MORE]}, retry=1)
        assert (name, answer["id"]) == (lost[0], lost[1]["id"])
        assert await again.get(f"/v1/responses/{made['id']}") == made
        assert (await send(again, {"messages": [MORE]}))[0] != lost[0]
        assert again.endpoint.store is not None
        again.endpoint.store.finish_at_end = True
    found = [one.task_id for one in read_episodes(killed)]
    assert len(found) == len(set(found)) == 7
    assert {name for name, _ in talks} < set(found)


async def trained(bench: Bench, name: str) -> list[Any]:
    return list((await bench.get(f"/sessions/{name}/trajectories"))["trajectories"])
