"""OpenAI's Responses: whole episodes, judged by the engine's log; each field is honored or refused
by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseCustomToolCall
from support.anthropic_wire import events_of
from support.client_scenario import one_episode, saying
from support.endpoints import endpoint
from support.episodes import call
from support.responses_wire import HELLO, LOOK, PATH, ask, play, response_of

from toolroll.endpoint.dialects.openai_responses_items import read_items
from toolroll.endpoint.requests.ignored_fields import IgnoredFields

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_an_episode_is_one_exact_trajectory(
    any_tokenizer: Any, stream: bool, stored: bool
) -> None:
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        last = await play(bench, stream=stream, stored=stored)
        thought, said = last["output"]
        assert last["status"] == "completed"
        assert thought["summary"] == [{"type": "summary_text", "text": "What now?"}]
        assert said["content"][0]["text"] == "All seen: <b>x</b>."
        await one_episode(bench)
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []
        sampled = bench.engine.log[-1]
        assert last["usage"]["input_tokens"] == len(sampled.input_ids)
        assert last["usage"]["output_tokens"] == len(sampled.output_ids)
        reasoning = last["usage"]["output_tokens_details"]["reasoning_tokens"]
        before = bench.served.template.encoder.decode(sampled.output_ids[:reasoning])
        assert "What now?" in before and "All" not in before


async def test_a_stream_is_the_response_in_pieces(tokenizer: Any) -> None:
    said = "<think>\nHm.\n</think>\n\nYes. " + call(at="x") + call(at="y")
    body = {**HELLO, "tools": [LOOK], "include": ["reasoning.encrypted_content"]}
    async with endpoint(tokenizer, lambda request: said) as bench:
        made = response_of(await events_of(bench, PATH, body))
        whole = await ask(bench, body, path=PATH, stream=False)
        assert [item["type"] for item in made["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert made["output"][0]["encrypted_content"]
        for response in (made, whole):
            for name in ("id", "created_at", "usage"):
                del response[name]
            for item in response["output"]:
                del item["id"]
                item.pop("call_id", None)  # a second answer has other ids
        assert made == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_encrypted_if_the_response_is_not_stored(
    tokenizer: Any, stream: bool
) -> None:
    """Qwen Code sends reasoning back as a message if it has no `encrypted_content`."""
    said = "<think>\nHm.\n</think>\n\nYes."
    async with endpoint(tokenizer, lambda request: said) as bench:
        for store in (True, False):
            body = {**HELLO, "store": store}
            if stream:
                made = response_of(await events_of(bench, PATH, body))
            else:
                made = await ask(bench, body, path=PATH, stream=False)
            assert (made["output"][0]["encrypted_content"] is None) == store


def _bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the ids and states of items, arguments spaced otherwise, no thoughts."""
    sent = [dict(item) for item in items if item.get("type") != "reasoning"]
    for item in sent:
        if item.get("type") in ("function_call", "message"):
            item.pop("id", None)
            item.pop("status", None)
        if "arguments" in item:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), indent=1)
    return sent


def _tagged(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As pydantic-ai: plain items, a thought as a message of its own."""
    sent: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") == "reasoning":
            thought = f"<think>\n{item['summary'][0]['text']}\n</think>"
            sent.append({"role": "assistant", "content": thought})
        elif item.get("type") == "message":
            sent.append({"role": "assistant", "content": item["content"][0]["text"]})
        else:
            sent.append({name: item[name] for name in item if name not in ("id", "status")})
    return sent


def _developer(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "developer", "content": "Say little."}, *items]


@pytest.mark.parametrize("change", [_bare, _tagged, _developer])
async def test_what_a_client_changes_on_its_own_does_not_break_a_match(
    any_tokenizer: Any, change: Any
) -> None:
    async with endpoint(any_tokenizer, saying) as bench:
        await play(bench, change=change, store=False)
        await one_episode(bench)


async def test_a_tagged_thought_and_the_text_after_it_are_one_reply(tokenizer: Any) -> None:
    said = ["<think>\nHm.\n</think>\n\nI look. " + call(at="x"), "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        await play(bench, change=_tagged)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


def test_a_tagged_text_stays_text_if_the_model_does_not_reason() -> None:
    item = {"role": "assistant", "content": "<think>\nHm.\n</think>"}
    [kept] = read_items([item], IgnoredFields(), reasons=False, find=lambda _: None)
    assert kept == {"role": "assistant", "content": item["content"]}
    [thought] = read_items([item], IgnoredFields(), reasons=True, find=lambda _: None)
    assert thought == {"role": "assistant", "content": None, "reasoning_content": "Hm."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", "  \n"])
async def test_an_empty_reply_is_an_empty_message(tokenizer: Any, said: str, stream: bool) -> None:
    async with endpoint(tokenizer, lambda request: said if request.call == 0 else "Done.") as bench:
        first = await ask(bench, HELLO, path=PATH, stream=stream)
        assert [item["type"] for item in first["output"]] == ["message"]
        history = [{"role": "user", "content": "Hi"}, *first["output"], USER]
        await ask(bench, {**HELLO, "input": history}, path=PATH, stream=stream)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


async def test_the_tools_of_a_namespace_are_flattened(tokenizer: Any) -> None:
    space = {"type": "namespace", "name": "eyes", "description": "To see.", "tools": [LOOK]}
    said = ['<tool_call>{"name": "eyes__look", "arguments": {"at": "x"}}</tool_call>', "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        body = {**HELLO, "tools": [space]}
        first = await ask(bench, body, path=PATH, stream=True)
        [item] = first["output"]
        assert (item["namespace"], item["name"]) == ("eyes", "look")
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
        history = [{"role": "user", "content": "Hi"}, item, output]
        await ask(bench, {**body, "input": history}, path=PATH, stream=False)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2
        prompt = bench.served.template.encoder.decode(bench.engine.log[0].input_ids)
        assert "eyes__look" in prompt and "To see." in prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_returned_as_it_was(tokenizer: Any, stream: bool) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        body = {**HELLO, "tools": [LOOK], "metadata": {"a": "b"}, "instructions": "Be brief."}
        made = await ask(bench, body, path=PATH, stream=stream)
        assert await bench.get(f"{PATH}/{made['id']}") == made
        assert made["metadata"] == {"a": "b"}
        kept = await ask(bench, {**HELLO, "store": False}, path=PATH, stream=stream)
        for other in (f"{PATH}/{kept['id']}", f"/v1/responses/{made['id']}"):
            answer = await bench.get(other)
            assert answer["error"]["code"] == "response_not_found", answer


async def test_other_instructions_replace_those_of_the_previous_response(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        first = await ask(bench, {**HELLO, "instructions": "Be brief."}, path=PATH, stream=False)
        for instructions in (None, "Be long."):
            body = {
                "model": "m",
                "input": "More",
                "instructions": instructions,
                "previous_response_id": first["id"],
            }
            await ask(bench, body, path=PATH, stream=False)
            prompt = bench.served.template.encoder.decode(bench.engine.log[-1].input_ids)
            assert "Be brief." not in prompt and "Hello." in prompt and "More" in prompt
            assert ("Be long." in prompt) == (instructions is not None)
        await bench.trajectories()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_output_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}}},
            {"json_schema": '{"type":"array"}'},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"json_schema": '{"type":"object"}'}),
        ({"tools": [LOOK], "parallel_tool_calls": False}, {"stop": ["</tool_call>"]}),
        (
            {
                "reasoning": {
                    "effort": "medium",
                    "summary": "auto",
                    "context": "auto",
                    "mode": "standard",
                },
                "text": {"verbosity": "medium"},
                "service_tier": "auto",
                "prompt_cache_key": "k",
                "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
                "metadata": {"a": "b"},
                "client_metadata": {"thread_id": "t"},
                "truncation": "disabled",
                "user": "u",
            },
            {},
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_text",
                                "text": "Hi",
                                "prompt_cache_breakpoint": {"mode": "explicit"},
                            }
                        ],
                    }
                ]
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_was_cut_is_incomplete(tokenizer: Any, stream: bool) -> None:
    async with endpoint(tokenizer, lambda request: "One two three four five six.") as bench:
        body = {**HELLO, "max_output_tokens": 2}
        made = await ask(bench, body, path=PATH, stream=stream)
        assert made["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        assert made["output"][-1]["status"] == "incomplete"


CUT = '<tool_call>{"name": "look", "arguments": {"at": "x", "b'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [True, False])
async def test_a_cut_call_is_an_incomplete_item(tokenizer: Any, stream: bool, cut: bool) -> None:
    """A call before it, and a whole call at the end of a cut reply, are complete."""
    before = call(at="w")
    text = before + (CUT if cut else call(at="x"))
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    body = {**HELLO, "tools": [LOOK], "max_output_tokens": tokens}
    async with endpoint(tokenizer, lambda request: text + " and more") as bench:
        made = await ask(bench, body, path=PATH, stream=stream)
        assert made["status"] == "incomplete"
        first, last = made["output"]
        assert (first["type"], first["status"]) == ("function_call", "completed")
        assert (last["type"], last["status"]) == (
            "function_call",
            "incomplete" if cut else "completed",
        )
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
            for item in made["output"]
        ]
        items = [{"role": "user", "content": "Hi"}, *made["output"], *results]
        await ask(bench, {**body, "input": items}, path=PATH, stream=stream)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
PATCHES = ['*** Begin\n+ "x" <b>\n', "", '{"input": "y"}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("namespace", ["", "files"])
async def test_a_custom_tool_is_a_function_with_one_text(
    any_tokenizer: Any, stream: bool, namespace: str
) -> None:
    name = f"{namespace}__apply_patch" if namespace else "apply_patch"
    said = [call(name, input=patch) for patch in PATCHES] + ["Done."]
    tool: dict[str, Any] = {**PATCH, "format": {"type": "text"}}
    if namespace:
        tool = {"type": "namespace", "name": namespace, "tools": [PATCH]}
    saying = lambda request: said[request.call]
    async with endpoint(any_tokenizer, saying, split="random") as bench:
        items: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
        body = {"model": "m", "input": items, "tools": [tool]}
        for patch in PATCHES:
            made = await ask(bench, body, path=PATH, stream=stream)
            [item] = made["output"]
            assert item["type"] == "custom_tool_call"
            assert ResponseCustomToolCall.model_validate(item).input == patch
            assert (item["name"], item.get("namespace", "")) == ("apply_patch", namespace)
            call_id = item["call_id"]
            output = {"type": "custom_tool_call_output", "call_id": call_id, "output": "ok"}
            items += [item, output]
        assert (await ask(bench, body, path=PATH, stream=stream))["output"]
        assert '"input"' in any_tokenizer.decode(bench.engine.log[0].input_ids)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 4


async def test_a_malformed_call_of_a_custom_tool_is_returned_as_it_is(tokenizer: Any) -> None:
    said = [call("apply_patch", patch="x"), call("apply_patch", input=["x"]), "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        items: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
        body = {"model": "m", "input": items, "tools": [PATCH]}
        for arguments in ({"patch": "x"}, {"input": ["x"]}):
            [item] = (await ask(bench, body, path=PATH, stream=False))["output"]
            assert (item["type"], json.loads(item["arguments"])) == ("function_call", arguments)
            call_id = item["call_id"]
            items += [item, {"type": "function_call_output", "call_id": call_id, "output": "No."}]
        await ask(bench, body, path=PATH, stream=False)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3


async def test_a_custom_tool_can_be_forced_and_one_with_a_grammar_be_dropped(
    tokenizer: Any,
) -> None:
    tools = [{**PATCH, "name": "other", "format": GRAMMAR}, PATCH]
    saying = lambda request: call("apply_patch", input="x")
    async with endpoint(tokenizer, saying, settings={"server_tools": "drop"}) as bench:
        body = {**HELLO, "tools": tools, "tool_choice": {"type": "custom", "name": "apply_patch"}}
        made = await ask(bench, body, path=PATH, stream=False)
        assert made["output"][0]["input"] == "x"
        assert made["tool_choice"] == body["tool_choice"]
        assert '"\\"apply_patch\\""' in bench.engine.log[-1].sampling_params["ebnf"]
        assert "other" not in tokenizer.decode(bench.engine.log[-1].input_ids)
    async with endpoint(tokenizer, saying) as bench:
        _, answer = await bench.post(PATH, {**HELLO, "tools": tools})
        assert "cannot enforce a grammar" in answer["error"]["message"]


def _referring(items: list[dict[str, Any]], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"type": "item_reference", "id": item["id"]} if item.get("type") in kinds else item
        for item in items
    ]


@pytest.mark.parametrize(
    "kinds", [("reasoning",), ("reasoning", "message"), ("reasoning", "message", "function_call")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reference_is_the_item_of_this_session(
    any_tokenizer: Any, stream: bool, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """So the Vercel AI SDK's provider sends an item that it was told is stored."""
    async with endpoint(any_tokenizer, saying, split="random", out=tmp_path) as bench:
        await play(bench, stream=stream, change=lambda items: _referring(items, kinds))
        await one_episode(bench)
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []


async def test_a_reference_to_nothing_stored_says_so(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        stored = await ask(bench, HELLO, path=PATH, stream=False)
        other = await ask(bench, {**HELLO, "store": False}, path=PATH, stream=False)
        for path, response, status in (
            (PATH, stored, 200),
            (PATH, other, 404),
            (PATH.replace("/s/", "/t/"), stored, 404),
            ("/v1/responses", stored, 404),
        ):
            item_id = response["output"][0]["id"]
            for reference in ({"type": "item_reference", "id": item_id}, {"id": item_id}):
                body = {"input": [USER, reference, USER]}
                got, answer = await bench.post(path, body)
                assert got == status, answer
                if status == 404:
                    error = answer["error"]
                    assert (error["code"], error["param"]) == ("item_not_found", "input[1].id")
                    assert item_id in error["message"] and "store: false" in error["message"]


def _item(**item: Any) -> dict[str, Any]:
    return {"input": [USER, item, USER]}


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": 7}),
    ("input", {"input": []}),
    ("input", {"input": [USER, {"role": "assistant", "content": "I"}]}),
    ("input[0]", {"input": ["Hi"]}),
    ("input[1].type", _item()),
    ("input[1].type", _item(type="web_search_call", id="x")),
    ("input[1].id", _item(type="item_reference")),
    ("input[1].type", _item(type="local_shell_call")),
    ("input[1].name", _item(type="custom_tool_call", call_id="a", input="x")),
    ("input[1].input", _item(type="custom_tool_call", call_id="a", name="b", input={})),
    ("input[1].output", _item(type="custom_tool_call_output", call_id="a", output=7)),
    ("input[1].role", _item(role="tool", content="x")),
    ("input[1].role", _item(type="message", content="x")),
    ("input[1].name", _item(role="user", content="x", name="n")),
    ("input[1].type", _item(type=["message"], role="user", content="x")),
    ("input[1].content[0].type", _item(role="user", content=[{"type": {}, "text": "x"}])),
    ("input[1].content", _item(role="user")),
    ("input[1].content", _item(role="user", content=7)),
    ("input[1].content[0]", _item(role="user", content=["x"])),
    ("input[1].content[0].type", _item(role="user", content=[{"type": "input_image"}])),
    ("input[1].content[0].type", _item(role="user", content=[{"type": "input_file"}])),
    ("input[1].content[0].text", _item(role="user", content=[{"type": "input_text"}])),
    ("input[1].content[0].type", _item(role="assistant", content=[{"type": "refusal"}])),
    ("input[1].call_id", _item(type="function_call", name="a", arguments="{}")),
    ("input[1].name", _item(type="function_call", call_id="a", arguments="{}")),
    ("input[1].arguments", _item(type="function_call", call_id="a", name="b", arguments={})),
    ("input[1].call_id", _item(type="function_call_output", output="x")),
    ("input[1].output", _item(type="function_call_output", call_id="a", output=7)),
    (
        "input[1].output[0].type",
        _item(type="function_call_output", call_id="a", output=[{"type": "input_image"}]),
    ),
    ("input[1].summary", _item(type="reasoning", summary=7)),
    ("instructions", {"instructions": 7}),
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": ["look"]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].parameters", {"tools": [{"type": "custom", "name": "x", "parameters": {}}]}),
    ("tools[0].format", {"tools": [{"type": "custom", "name": "x", "format": "text"}]}),
    ("tools[0].format", {"tools": [{"type": "custom", "name": "x", "format": {"type": "json"}}]}),
    ("tools[0].format", {"tools": [{"type": "custom", "name": "x", "format": GRAMMAR}]}),
    ("tools[0].type", {"tools": [{"type": "mcp", "server_label": "x"}]}),
    ("tools[0].type", {"tools": [{}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].name", {"tools": [{**LOOK, "name": ""}]}),
    ("tools[0].parameters", {"tools": [{"type": "function", "name": "x", "parameters": 7}]}),
    ("tools[0].defer_loading", {"tools": [{**LOOK, "defer_loading": True}]}),
    ("tools[0].defer_loading", {"tools": [{**LOOK, "defer_loading": False}]}),
    ("tools[0].type", {"tools": [{**LOOK, "type": ["function"]}]}),
    ("tools[0].tools", {"tools": [{"type": "namespace", "name": "x"}]}),
    (
        "tools[0].tools[0].name",
        {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]},
    ),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}}),
    ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}),
    ("reasoning.effort", {"reasoning": {"effort": "none"}}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("text.format.schema_", {"text": {"format": {"type": "json_schema", "schema_": {}}}}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    (
        "text.format",
        {
            "tools": [LOOK],
            "tool_choice": "required",
            "text": {"format": {"type": "json_object"}},
        },
    ),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": -1}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("include[0]", {"include": ["message.output_text.logprobs"]}),
    ("truncation", {"truncation": "auto"}),
    ("background", {"background": True}),
    ("service_tier", {"service_tier": "flex"}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("max_tool_calls", {"max_tool_calls": 3}),
    ("n", {"n": 2}),
    ("messages", {"messages": []}),
    ("metadata", {"metadata": ["a"]}),
    ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ("tools[0].strict", {"tools": [{**LOOK, "strict": "false"}]}),
    (
        "tools[0].description",
        {"tools": [{"type": "namespace", "name": "x", "description": {"a": 1}, "tools": []}]},
    ),
    (
        "tools[0].tools[0].name",
        {"tools": [{"type": "namespace", "name": "x", "tools": [{**LOOK, "name": ""}]}]},
    ),
    ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
]


async def test_malformed_bodies_are_refused_by_name(tokenizer: Any) -> None:
    assert len(MALFORMED) >= 45
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        for param, asked in MALFORMED:
            status, answer = await bench.post(PATH, {**HELLO, **asked})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]
        status, answer = await bench.post(PATH, {**HELLO, "previous_response_id": "resp_x"})
        assert (status, answer["error"]["param"]) == (404, "previous_response_id")
        assert bench.engine.log == []


async def test_tagged_text_after_a_call_is_text(tokenizer: Any) -> None:
    said = [call(at="x") + "<think>\nb\n</think>", "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        _, answer = await bench.post(PATH, {"input": [USER], "tools": [LOOK]})
        made, _ = answer["output"]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "seen"}
        talk = [USER, *answer["output"], result]
        await bench.post(PATH, {"input": talk, "tools": [LOOK]})
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2
