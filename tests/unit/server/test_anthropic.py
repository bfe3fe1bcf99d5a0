"""Anthropic's Messages, where it differs from the other dialects (`test_dialects.py`)."""

import json
from typing import Any

import pytest
from support.anthropic_wire import HELLO, LOOK
from support.client_scenario import saying
from support.episodes import call
from support.served import MESSAGES, USER, assistant, in_session, serve
from support.wires import ask, continued

from toolroll.testing import Fault

BODY = {**HELLO, "tools": [LOOK]}
COUNT = in_session(f"{MESSAGES}/count_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"at": 1.0}',
        '{"at": 12345678901234567890}',
        '{"at": -0.0}',
        '{"at": }',
        '{"_unparsed_arguments": "x"}',
        '{"_unparsed_arguments": "{\\"_unparsed_arguments\\": \\"x\\"}"}',
        '{"_unparsed_arguments": {"a": null}}',
        '{"_unparsed_arguments": "x", "at": "y"}',
    ],
)
async def test_arguments_come_back_unchanged(arguments: str, stream: bool) -> None:
    """Numbers come back as JavaScript writes them; the fourth text is no JSON."""
    schema = {"type": "object", "properties": {"at": {"type": "number"}}}
    body = {**HELLO, "tools": [{**LOOK, "input_schema": schema}]}
    reply = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    async with serve([reply, "Sorry."]) as bench:
        first = await ask(bench, body, stream=stream)
        given = first["content"][0]["input"]
        if isinstance(given.get("at"), int | float):
            number = float(given["at"])
            given["at"] = int(number) if abs(number) < 2**53 else number
        await ask(bench, continued(body, first), stream=stream)
        await bench.one_trajectory(turns=2)


async def test_an_input_is_shown_as_json() -> None:
    given = {"_unparsed_arguments": {"a": None}}
    block = {"type": "tool_use", "id": "a", "name": "look", "input": given}
    async with serve() as bench:
        await ask(bench, continued(BODY, {"content": [block]}))
        assert json.dumps(given) in bench.prompt()


@pytest.mark.parametrize(
    ("failed", "content", "shown"), [(True, [], "error"), (False, [], ""), (True, "No.", "No.")]
)
async def test_a_failed_tools_empty_result_is_an_error(
    failed: bool, content: Any, shown: str
) -> None:
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": failed, "content": content}
    dialogue = [
        *BODY["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    async with serve() as bench:
        await ask(bench, {**BODY, "messages": dialogue})
        assert f"<tool_response>{shown}</tool_response>" in bench.prompt()


async def test_tokens_are_counted_exactly_and_kept_nowhere(any_tokenizer: Any) -> None:
    async with serve(saying, tokenizer=any_tokenizer) as bench:

        async def counted(body: dict[str, Any], **limit: Any) -> Any:
            body = {name: body[name] for name in body if name != "max_tokens"}
            answer = await bench.send(f"{COUNT}?beta=true", {**body, **limit})
            assert list(answer) == ["input_tokens"]
            return answer["input_tokens"]

        body, counts = {**BODY, "max_tokens": 1000}, []
        for _ in range(2):
            counts.append(await counted(body))
            assert {await counted(body, max_tokens=limit) for limit in (None, 9)} == {counts[-1]}
            body = continued(body, await ask(bench, body))
        assert counts == [len(entry.input_ids) for entry in bench.engine.log]
        await bench.one_trajectory(turns=2)


async def test_a_system_message_is_shown_in_its_place(any_tokenizer: Any) -> None:
    today = {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]}
    body = {**HELLO, "system": "Be brief.", "messages": [USER, today]}
    replies = [f"Hello {number}." for number in range(3)]
    async with serve(replies, tokenizer=any_tokenizer) as bench:
        for _ in range(3):
            body = continued(body, await ask(bench, body, stream=True))
        await bench.one_trajectory(turns=3)
        text = bench.prompt()
        assert text.index("Be brief.") < text.index("Hi") < text.index("Today is Monday.")


async def test_a_prefill_is_continued() -> None:
    async with serve("is Paris.") as bench:
        reply = await ask(bench, {**HELLO, "messages": [USER, assistant("The capital ")]})
        assert reply["content"] == [{"type": "text", "text": "is Paris."}]


ENDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, str | None]]] = {
    "the model's end": ("Hello.", {}, {}, ("end_turn", None)),
    "the limit": ("One two three four.", {"max_tokens": 2}, {}, ("max_tokens", None)),
    "a stop string": ("One END", {"stop_sequences": ["END"]}, {}, ("stop_sequence", "END")),
    "the session's stop string": ("One END", {}, {"stop": "END"}, ("stop_sequence", "END")),
    "a call": (call(at="x"), {"tools": [LOOK]}, {}, ("tool_use", None)),
}


@pytest.mark.parametrize("name", ENDS)
async def test_why_a_message_ended(name: str) -> None:
    reply, fields, session, expected = ENDS[name]
    async with serve(reply) as bench:
        await bench.create(**session)
        for stream in (False, True):
            message = await ask(bench, {**HELLO, **fields}, stream=stream)
            assert (message["stop_reason"], message["stop_sequence"]) == expected


async def test_every_other_refusal_is_in_anthropics_form_too() -> None:
    down, key = Fault(status=503, body=b"{}"), {"x-api-key": "secret-key"}
    settings, path = {"api_key": "secret-key"}, in_session(MESSAGES)
    async with serve(settings=settings, faults=lambda _: down, config={"retries": 0}) as bench:
        for where, headers, expected in (
            (path, {}, (401, "authentication_error")),
            (path, key, (503, "overloaded_error")),
            (f"{path}/batches", key, (404, "not_found_error")),
        ):
            status, answer = await bench.post(where, HELLO, **headers)
            assert (answer["type"], (status, answer["error"]["type"])) == ("error", expected)
        async with bench.http.get(bench.url + path, headers=key) as response:
            answer = await response.json()
            assert (response.status, answer["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("header", "bearer"), [("x-api-key", ""), ("Authorization", "Bearer ")], ids=["key", "bearer"]
)
async def test_the_key_names_the_session(header: str, bearer: str) -> None:
    async with serve() as bench:
        await bench.send(MESSAGES, HELLO, **{header: f"{bearer}session:a:b"})
        assert len(await bench.trajectories("a:b")) == 1
        headers = {header: f"{bearer}session:c", "x-session-id": "its-own"}
        for path in (MESSAGES, in_session(MESSAGES, "c")):
            await bench.send(path, HELLO, **headers)
            assert bench.engine.log[-1].routing_key == "c"
    async with serve(settings={"api_key": "secret-key"}) as bench:
        for path, key, expected in (
            (MESSAGES, "secret-key", 200),
            (MESSAGES, "wrong-key!", 401),
            (in_session(MESSAGES), "secret-key", 400),  # two sessions
        ):
            status, _ = await bench.post(path, HELLO, **{header: f"{bearer}session:a:{key}"})
            assert status == expected
