"""Anthropic's Messages: whole episodes, judged by the engine's log; each field is honored or
refused by name, in Anthropic's form.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.anthropic_wire import HELLO, LOOK, PATH, ask, events_of, message_of, play
from support.client_scenario import one_episode, saying
from support.endpoints import endpoint
from support.episodes import call

from toolroll.testing import Fault


@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_is_one_exact_trajectory(any_tokenizer: Any, stream: bool) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        last = await play(bench, stream=stream)
        assert last["stop_reason"] == "end_turn"
        assert [block["type"] for block in last["content"]] == ["thinking", "text"]
        assert (last["content"][0]["thinking"], last["content"][1]["text"]) == (
            "What now?",
            "All seen: <b>x</b>.",
        )
        assert last["content"][0]["signature"]
        await one_episode(bench)
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []


async def test_a_stream_is_the_message_in_pieces(tokenizer: Any) -> None:
    said = "<think>\nHm.\n</think>\n\nYes. " + call(at="x") + call(at="y")
    body = {**HELLO, "tools": [LOOK]}
    async with endpoint(tokenizer, lambda request: said) as bench:
        events = await events_of(bench, PATH, body)
        whole = await ask(bench, body, path=PATH, stream=False)
        started, made = events[0]["message"], message_of(copy.deepcopy(events))
        assert started["usage"]["input_tokens"] == len(bench.engine.log[0].input_ids)
        assert started["id"] == made["id"] != whole["id"]
        for block in (*made["content"], *whole["content"]):
            block.pop("id", None)  # a second answer has other ids
        assert {**made, "id": ""} == {**whole, "id": "", "usage": made["usage"]}
        assert made["usage"]["output_tokens"] == len(bench.engine.log[0].output_ids)


def _moved(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`cache_control` on the newest block only, texts as blocks, signatures and keys changed."""
    sent: list[Any] = copy.deepcopy(messages)
    for message in sent:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for block in message["content"]:
            if block["type"] == "thinking":
                block["signature"] = "another"
            if block["type"] == "tool_use":
                given: dict[str, Any] = block["input"]
                block |= {"input": dict(reversed(given.items())), "caller": None}
    sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return sent


def _without_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = copy.deepcopy(messages)
    for message in sent:
        if message["role"] == "assistant":
            kept = [block for block in message["content"] if block["type"] != "thinking"]
            message["content"] = kept
    return sent


@pytest.mark.parametrize("change", [_moved, _without_thoughts])
async def test_what_a_client_changes_on_its_own_does_not_break_a_match(
    any_tokenizer: Any, change: Any
) -> None:
    async with endpoint(any_tokenizer, saying) as bench:
        await play(bench, change=change, system=[{"type": "text", "text": "Be brief."}])
        await one_episode(bench)


@pytest.mark.parametrize("number", ["1.0", "1e2", "12345678901234567890", "-0.0"])
async def test_numbers_come_back_as_javascript_writes_them(tokenizer: Any, number: str) -> None:
    said = ['<tool_call>{"name": "look", "arguments": {"at": ' + number + "}}</tool_call>", "Done."]
    schema = {"type": "object", "properties": {"at": {"type": "number"}}}
    as_float = float(number)
    written = int(as_float) if abs(as_float) < 2**53 else as_float
    body = {**HELLO, "tools": [{**LOOK, "input_schema": schema}]}
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        first = await ask(bench, body, path=PATH, stream=False)
        [block] = first["content"]
        history = [
            *HELLO["messages"],
            {"role": "assistant", "content": [{**block, "input": {"at": written}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}],
            },
        ]
        await ask(bench, {**body, "messages": history}, path=PATH, stream=False)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"at": ',
        '{"_unparsed_arguments": "x"}',
        '{"_unparsed_arguments": "{\\"_unparsed_arguments\\": \\"x\\"}"}',
        '{"_unparsed_arguments": {"a": null}}',
        '{"_unparsed_arguments": "x", "at": "y"}',
    ],
)
async def test_arguments_of_every_form_come_back_unchanged(
    tokenizer: Any, arguments: str, stream: bool
) -> None:
    said = [f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>', "Sorry."]
    if arguments == '{"at": ':
        said[0] = said[0].replace("}</tool_call>", "</tool_call>")
    body = {**HELLO, "tools": [LOOK]}
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        first = await ask(bench, body, path=PATH, stream=stream)
        [block] = [block for block in first["content"] if block["type"] == "tool_use"]
        answer = {"type": "tool_result", "tool_use_id": block["id"], "is_error": True}
        history = [
            *HELLO["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [answer]},
        ]
        await ask(bench, {**body, "messages": history}, path=PATH, stream=stream)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


async def test_an_input_is_shown_as_json(tokenizer: Any) -> None:
    block = {"type": "tool_use", "id": "a", "name": "look"}
    given = {"_unparsed_arguments": {"a": None}}
    reply = {"role": "assistant", "content": [{**block, "input": given}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "ok"}
    messages = [*HELLO["messages"], reply, {"role": "user", "content": [result]}]
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        await ask(bench, {**HELLO, "messages": messages}, path=PATH, stream=False)
        prompt = bench.served.template.encoder.decode(bench.engine.log[0].input_ids)
        assert json.dumps(given) in prompt


async def test_tokens_are_counted_exactly_and_kept_nowhere(any_tokenizer: Any) -> None:
    async with endpoint(any_tokenizer, saying) as bench:
        counted: list[int] = []

        async def counting(**asked: Any) -> None:
            del asked["max_tokens"]
            status, answer = await bench.post(PATH + "/count_tokens?beta=true", asked)
            assert (status, list(answer)) == (200, ["input_tokens"]), answer
            counted.append(answer["input_tokens"])

        await counting(**{**HELLO, "max_tokens": 1})
        assert await bench.get("/sessions/s/trajectories") and not bench.engine.log
        counted.clear()
        messages: list[Any] = [{"role": "user", "content": "Look."}]
        body = {"model": "m", "max_tokens": 1000, "tools": [LOOK]}
        for _ in range(2):
            await counting(**body, messages=messages)
            reply = await ask(bench, {**body, "messages": messages}, path=PATH, stream=False)
            messages.append({"role": "assistant", "content": reply["content"]})
            messages.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
                        for block in reply["content"]
                        if block["type"] == "tool_use"
                    ],
                }
            )
        assert counted == [len(entry.input_ids) for entry in bench.engine.log]
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


async def test_a_system_message_among_the_messages_is_shown_in_its_place(
    any_tokenizer: Any,
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Today is Monday."}]},
    ]
    async with endpoint(any_tokenizer, lambda request: f"Hello {request.call}.") as bench:
        body = {**HELLO, "system": "Be brief."}
        for _ in range(3):
            reply = await ask(bench, {**body, "messages": messages}, path=PATH, stream=True)
            messages.append({"role": "assistant", "content": reply["content"]})
            messages.append({"role": "user", "content": "Go on."})
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3
        text = bench.served.template.encoder.decode(trajectory["input_ids"])
        assert text.index("Be brief.") < text.index("Hi") < text.index("Today is Monday.")


async def test_a_prefill_is_continued(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "is Paris.") as bench:
        asked = [*HELLO["messages"], {"role": "assistant", "content": "The capital "}]
        reply = await ask(bench, {**HELLO, "messages": asked}, path=PATH, stream=False)
        assert reply["content"] == [{"type": "text", "text": "is Paris."}]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        (
            {"temperature": 0.5, "top_p": 0.5, "top_k": 7},
            {"temperature": 0.5, "top_p": 0.5, "top_k": 7},
        ),
        ({"stop_sequences": ["END", "STOP"]}, {"stop": ["END", "STOP"]}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array"}}}},
            {"json_schema": '{"type":"array"}'},
        ),
        (
            {"tools": [LOOK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"stop": ["</tool_call>"]},
        ),
        (
            {
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
                "metadata": {"user_id": "u"},
                "cache_control": {"type": "ephemeral"},
                "service_tier": "auto",
            },
            {},
        ),
    ],
)
async def test_a_field_reaches_the_engine(
    tokenizer: Any, asked: dict[str, Any], told: dict[str, Any]
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        await ask(bench, {**HELLO, **asked}, path=PATH, stream=False)
        found = bench.engine.log[0].sampling_params
        assert {name: found[name] for name in told} == told


@pytest.mark.parametrize(
    ("said", "more", "stop"),
    [
        ("Hello.", {}, ("end_turn", None)),
        ("One two three four five six.", {"max_tokens": 2}, ("max_tokens", None)),
        ("One END two", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        (call(at="x"), {"tools": [LOOK]}, ("tool_use", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_why_a_message_ended(
    tokenizer: Any, said: str, more: dict[str, Any], stop: Any, stream: bool
) -> None:
    async with endpoint(tokenizer, lambda request: said) as bench:
        reply = await ask(bench, {**HELLO, **more}, path=PATH, stream=stream)
        assert (reply["stop_reason"], reply["stop_sequence"]) == stop


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sessions_stop_string_ends_a_message(tokenizer: Any, stream: bool) -> None:
    async with endpoint(tokenizer, lambda request: "One END two") as bench:
        made = {"session_id": "s", "sampling_params": {"stop": "END"}}
        assert (await bench.post("/sessions", made))[0] == 201
        reply = await ask(bench, HELLO, path=PATH, stream=stream)
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")


USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def _said(**block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def _replied(**block: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": [block]}, USER]}


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "many"}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "Hi"}),
    ("messages[0]", {"messages": ["Hi"]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
    ("messages[0].name", {"messages": [{**USER, "name": "x"}]}),
    ("messages[0].content[0].type", _said(type=["text"], text="x")),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].content[0].text", _said(type="text")),
    ("messages[0].content[0].type", _said(type="image", source={"type": "url", "url": "x"})),
    ("messages[0].content[0].type", _said(type="document")),
    ("messages[0].content[0].type", _said()),
    ("messages[0].content[0].tool_use_id", _said(type="tool_result", content="x")),
    (
        "messages[0].content[0].content[0].type",
        _said(type="tool_result", tool_use_id="a", content=[{"type": "image"}]),
    ),
    ("messages[0].content[0].content", _said(type="tool_result", tool_use_id="a", content=7)),
    ("messages[1].content[0].type", _replied(type="redacted_thinking", data="x")),
    ("messages[1].content[0].type", _replied(type="server_tool_use", id="a", name="b")),
    ("messages[1].content[0].thinking", _replied(type="thinking")),
    ("messages[1].content[0].name", _replied(type="tool_use", id="a", input={})),
    ("messages[1].content[0].id", _replied(type="tool_use", name="a", input={})),
    ("messages[1].content[0].input", _replied(type="tool_use", id="a", name="b", input="x")),
    ("system", {"system": 7}),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": ["look"]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tools[0].name", {"tools": [{**LOOK, "name": ""}]}),
    ("tools[0].input_schema", {"tools": [{"name": "look"}]}),
    ("tools[0].defer_loading", {"tools": [{**LOOK, "defer_loading": True}]}),
    ("tools[0].defer_loading", {"tools": [{**LOOK, "defer_loading": False}]}),
    ("tools[0].examples", {"tools": [{**LOOK, "examples": []}]}),
    ("tools[0].type", {"tools": [{**LOOK, "type": ["custom"]}]}),
    ("tools[0].allowed_callers", {"tools": [{**LOOK, "allowed_callers": ["code"]}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tools": [LOOK], "tool_choice": {"type": "some"}}),
    ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}),
    ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "auto", "name": "x"}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (
        "output_config.format.schema_",
        {"output_config": {"format": {"type": "json_schema", "schema_": {}}}},
    ),
    ("output_config.format.type", {"output_config": {"format": {"type": "xml", "schema": {}}}}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 2}),
    ("stop_sequences", {"stop_sequences": "END"}),
    ("stream", {"stream": True, "messages": [USER, {"role": "assistant", "content": "I"}]}),
    ("stream", {"stream": "often"}),
    ("service_tier", {"service_tier": "priority"}),
    ("speed", {"speed": "fast"}),
    (
        "context_management.edits[0].type",
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}]}},
    ),
    (
        "context_management.edits[0].keep",
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}},
    ),
    ("mcp_servers", {"mcp_servers": [{"name": "x"}]}),
    ("container", {"container": "x"}),
    ("n", {"n": 2}),
    ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    ("tools[0].strict", {"tools": [{**LOOK, "strict": "false"}]}),
    (
        "messages[1]",
        {
            "system": "Be brief.",
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
                },
            ],
        },
    ),
]


@pytest.mark.parametrize("counted", [False, True])
async def test_malformed_bodies_are_refused_by_name_in_anthropics_form(
    tokenizer: Any, counted: bool
) -> None:
    assert len(MALFORMED) >= 45
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for param, asked in MALFORMED:
            if counted and param in ("max_tokens",):
                continue
            path = PATH + ("/count_tokens" if counted else "")
            status, answer = await bench.post(path, {**HELLO, **asked})
            assert (status, answer["type"]) == (400, "error"), (param, answer)
            error = answer["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), answer
            assert error["message"] and error["code"]
        assert bench.engine.log == []


async def test_every_other_refusal_is_in_anthropics_form_too(tokenizer: Any) -> None:
    async with endpoint(
        tokenizer,
        lambda request: "Hello.",
        settings={"api_key": "secret-key"},
        faults=lambda request: Fault(status=503, body=b"{}"),
        config={"retries": 0},
    ) as bench:
        status, answer = await bench.post(PATH, HELLO)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        status, answer = await bench.post(PATH, HELLO, **{"x-api-key": "secret-key"})
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")
        status, answer = await bench.post(PATH + "/batches", {}, **{"x-api-key": "secret-key"})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        async with bench.http.get(bench.url + PATH, headers={"x-api-key": "secret-key"}) as got:
            answer = await got.json()
            assert (got.status, answer["type"]) == (405, "error")


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
async def test_the_key_names_the_session(tokenizer: Any, header: str) -> None:
    bearer = "Bearer " if header == "Authorization" else ""
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, _ = await bench.post("/v1/messages", HELLO, **{header: bearer + "session:a:b"})
        assert status == 200
        assert len(await bench.trajectories("a:b")) == 1
        sent = {header: bearer + "session:c", "x-session-id": "its-own"}
        for path, session in (("/v1/messages", "c"), ("/sessions/c/v1/messages", "c")):
            assert (await bench.post(path, HELLO, **sent))[0] == 200
            assert bench.engine.log[-1].routing_key == session
    async with endpoint(
        tokenizer, lambda request: "Hello.", settings={"api_key": "secret-key"}
    ) as bench:
        for key, wanted in (("secret-key", 200), ("wrong-key!", 401)):
            sent = {header: f"{bearer}session:a:{key}"}
            status, _ = await bench.post("/v1/messages", HELLO, **sent)
            assert status == wanted
        status, _ = await bench.post(PATH, HELLO, **{header: f"{bearer}session:a:secret-key"})
        assert status == 400, "two sessions"


async def test_tokens_are_counted_with_and_without_a_limit(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        asked = {"messages": [USER]}
        for more in ({}, {"max_tokens": None}, {"max_tokens": 9}):
            status, answer = await bench.post(PATH + "/count_tokens", {**asked, **more})
            assert (status, list(answer)) == (200, ["input_tokens"])
