"""What the endpoint cannot honor is refused by its name, in every dialect, before anything else."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.anthropic_wire import HELLO
from support.anthropic_wire import LOOK as MESSAGES_LOOK
from support.listed_environment import TOOL
from support.responses_wire import LOOK as RESPONSES_LOOK
from support.served import (
    CHAT,
    MESSAGES,
    RESPONSES,
    TEXT,
    USER,
    assistant,
    in_session,
    serve,
    tool_results,
)

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.endpoint_settings import SamplingDefaults
from toolroll.rollout.engine import ModelInfo
from toolroll.rollout.engine.sampling_params import KNOWN
from toolroll.rollout.errors import UsageError

Fields = dict[str, Any]
Row = tuple[str, Fields] | tuple[str, Fields, str]
COUNT = f"{MESSAGES}/count_tokens"
OTHER: Any = {"type": "function", "function": {"name": "listen"}}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
FUNCTION = {"name": "look", "arguments": "{}"}
EMPTY_STOP = "a stop string must not be empty"
JSON_OBJECT = {"type": "json_object"}
OBFUSCATED = {"stream_options": {"include_obfuscation": True}}
EYES = {"type": "namespace", "name": "eyes", "tools": [RESPONSES_LOOK]}
NO_ID = {"role": "tool", "content": "x", "tool_call_id": {}}
CALL_BLOCK = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


def _messages(*messages: Any) -> Fields:
    return {"messages": messages}


def _content(*parts: Any) -> Fields:
    return {"messages": [{"role": "user", "content": parts}]}


def _call(**call: Any) -> Fields:
    reply = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", **call}]}
    return _messages(USER, reply, *tool_results(reply))


def _asked(**block: Any) -> Fields:
    return _content(block)


def _result(content: Any) -> Fields:
    return _content({"type": "tool_result", "tool_use_id": "a", "content": content})


def _replied(**block: Any) -> Fields:
    return _messages(USER, {"role": "assistant", "content": [block]}, USER)


def _item(**item: Any) -> Fields:
    return {"input": [USER, item, USER]}


def _message(**fields: Any) -> Fields:
    return _item(role="user", **fields)


def _output_item(**fields: Any) -> Fields:
    return _item(type="function_call_output", call_id="a", **fields)


def _namespace(**fields: Any) -> Fields:
    return {"tools": [{"type": "namespace", "name": "x", **fields}]}


def _custom(**fields: Any) -> Fields:
    return {"tools": [{"type": "custom", "name": "x", **fields}]}


def _format(**form: Any) -> Fields:
    return {"text": {"format": form}}


def _output(**form: Any) -> Fields:
    return {"output_config": {"format": form}}


def _edit(**edit: Any) -> Fields:
    return {"context_management": {"edits": [edit]}}


OF_CHAT: list[Row] = [
    ("best_of_all", {"best_of_all": 3}),
    ("functions", {"functions": []}),
    ("reasoning_effort", {"reasoning_effort": "none"}),
    ("store", {"store": True}),
    ("n", {"n": 0}),
    ("n", {"n": 1000}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": "hot"}),
    ("top_k", {"top_k": 0}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("stop_token_ids", {"stop_token_ids": [10**8]}),
    ("logit_bias", {"logit_bias": {str(10**8): 1}}),
    ("stop", {"stop": ""}, EMPTY_STOP),
    ("stop", {"stop": [""]}, EMPTY_STOP),
    ("stop", {"stop": ["END", ""]}, EMPTY_STOP),
    ("service_tier", {"service_tier": "priority"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"function": {"name": "listen"}}}),
    ("tool_choice.function.extra", {"tool_choice": {"function": {"name": "look", "extra": 1}}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [TOOL, TOOL]}, "'look'"),
    ("tools", {"tools": [TOOL, TOOL], "tool_choice": "none"}, "'look'"),
    ("tools[1].function.strict", {"tools": [OTHER, STRICT], "response_format": JSON_OBJECT}),
    (
        "response_format",
        {"tools": [TOOL], "tool_choice": "required", "response_format": JSON_OBJECT},
    ),
    ("response_format.type", {"response_format": {"type": "grammar"}}),
    ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    ("stream_options.include_obfuscation", {"stream": True, **OBFUSCATED}),
    ("messages", {"messages": None}),
    ("messages", _messages()),
    ("messages", _messages(USER, assistant("prefill")), "the last message is from the assistant"),
    ("continue_final_message", {"continue_final_message": True}),
    ("messages[1]", _messages(USER, 3, USER)),
    ("messages[0].role", _messages({"role": "function", "content": "x"})),
    ("messages[0].content", _content(IMAGE)),
    ("messages[0].content", _messages({"role": "user", "content": None})),
    ("messages[0].content", _messages({"role": "user", "content": 3})),
    ("messages[1].content", _messages(USER, {"role": "user"}, USER)),
    ("messages[1].tool_call_id", _messages(USER, NO_ID)),
    ("messages[1].tool_calls", _messages(USER, {"role": "assistant", "tool_calls": 5}, USER)),
    ("messages[1].tool_calls[0].type", _call(type="custom", function=FUNCTION)),
    ("messages[1].tool_calls[0].content", _call(content=1, function=FUNCTION)),
    *(
        (f"messages[0].{name}", _messages({"role": role, "content": "x", name: {"id": "a"}}, USER))
        for role, name in (
            ("user", "audio"),
            ("user", "tool_calls"),
            ("assistant", "audio"),
            ("assistant", "function_call"),
            ("assistant", "refusal"),
            ("tool", "reasoning_content"),
        )
    ),
]
OF_TEXT: list[Row] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [-1]}),
    ("n", {"n": 1000}),
    ("suffix", {"suffix": "x"}),
    ("stop", {"stop": ""}, EMPTY_STOP),
    ("stop", {"stop": ["END", ""]}, EMPTY_STOP),
]
OF_MESSAGES: list[Row] = [
    ("tools", {"tools": [MESSAGES_LOOK] * 2}, "'look'"),
    ("tools", {"tools": [MESSAGES_LOOK] * 2, "tool_choice": {"type": "none"}}, "'look'"),
    ("stop_sequences", {"stop_sequences": ["END", ""]}, EMPTY_STOP),
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
    ("messages[0].content[0].type", _asked(type=["text"], text="x")),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].content[0].text", _asked(type="text")),
    ("messages[0].content[0].type", _asked(type="image", source={"type": "url", "url": "x"})),
    ("messages[0].content[0].type", _asked(type="document")),
    ("messages[0].content[0].type", _asked()),
    ("messages[0].content[0].tool_use_id", _asked(type="tool_result", content="x")),
    ("messages[0].content[0].content[0].type", _result([{"type": "image"}])),
    ("messages[0].content[0].content", _result(7)),
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
    ("tools[0].name", {"tools": [{**MESSAGES_LOOK, "name": ""}]}),
    ("tools[0].input_schema", {"tools": [{"name": "look"}]}),
    ("tools[0].defer_loading", {"tools": [{**MESSAGES_LOOK, "defer_loading": True}]}),
    ("tools[0].defer_loading", {"tools": [{**MESSAGES_LOOK, "defer_loading": False}]}),
    ("tools[0].examples", {"tools": [{**MESSAGES_LOOK, "examples": []}]}),
    ("tools[0].type", {"tools": [{**MESSAGES_LOOK, "type": ["custom"]}]}),
    ("tools[0].allowed_callers", {"tools": [{**MESSAGES_LOOK, "allowed_callers": ["code"]}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tools": [MESSAGES_LOOK], "tool_choice": {"type": "some"}}),
    ("tool_choice.name", {"tools": [MESSAGES_LOOK], "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"tools": [MESSAGES_LOOK], "tool_choice": {"type": "tool", "name": "x"}}),
    ("tool_choice.name", {"tools": [MESSAGES_LOOK], "tool_choice": {"type": "auto", "name": "x"}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("output_config.format.schema_", _output(type="json_schema", schema_={})),
    ("output_config.format.type", _output(type="xml", schema={})),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 2}),
    ("stop_sequences", {"stop_sequences": "END"}),
    ("stream", {"stream": True, "messages": [USER, {"role": "assistant", "content": "I"}]}),
    ("stream", {"stream": "often"}),
    ("service_tier", {"service_tier": "priority"}),
    ("speed", {"speed": "fast"}),
    ("context_management.edits[0].type", _edit(type="clear_tool_uses_20250919", keep="all")),
    ("context_management.edits[0].keep", _edit(type="clear_thinking_20251015", keep=1)),
    ("mcp_servers", {"mcp_servers": [{"name": "x"}]}),
    ("container", {"container": "x"}),
    ("n", {"n": 2}),
    ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
    ("tools[0].strict", {"tools": [{**MESSAGES_LOOK, "strict": "false"}]}),
    (
        "messages[1]",
        {"system": "Be brief.", **_messages(USER, {"role": "assistant", "content": [CALL_BLOCK]})},
    ),
]
OF_RESPONSES: list[Row] = [
    ("previous_response_id", {"previous_response_id": "resp_x"}, "resp_x"),
    ("tools", {"tools": [RESPONSES_LOOK] * 2}, "'look'"),
    ("tools", {"tools": [RESPONSES_LOOK] * 2, "tool_choice": "none"}, "'look'"),
    ("tools", {"tools": [EYES, {**RESPONSES_LOOK, "name": "eyes__look"}]}, "'eyes__look'"),
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
    ("input[1].name", _message(content="x", name="n")),
    ("input[1].type", _item(type=["message"], role="user", content="x")),
    ("input[1].content[0].type", _message(content=[{"type": {}, "text": "x"}])),
    ("input[1].content", _message()),
    ("input[1].content", _message(content=7)),
    ("input[1].content[0]", _message(content=["x"])),
    ("input[1].content[0].type", _message(content=[{"type": "input_image"}])),
    ("input[1].content[0].type", _message(content=[{"type": "input_file"}])),
    ("input[1].content[0].text", _message(content=[{"type": "input_text"}])),
    ("input[1].content[0].type", _item(role="assistant", content=[{"type": "refusal"}])),
    ("input[1].call_id", _item(type="function_call", name="a", arguments="{}")),
    ("input[1].name", _item(type="function_call", call_id="a", arguments="{}")),
    ("input[1].arguments", _item(type="function_call", call_id="a", name="b", arguments={})),
    ("input[1].call_id", _item(type="function_call_output", output="x")),
    ("input[1].output", _output_item(output=7)),
    ("input[1].output[0].type", _output_item(output=[{"type": "input_image"}])),
    ("input[1].summary", _item(type="reasoning", summary=7)),
    ("instructions", {"instructions": 7}),
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": ["look"]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].parameters", _custom(parameters={})),
    ("tools[0].format", _custom(format="text")),
    ("tools[0].format", _custom(format={"type": "json"})),
    ("tools[0].format", _custom(format=GRAMMAR)),
    ("tools[0].type", {"tools": [{"type": "mcp", "server_label": "x"}]}),
    ("tools[0].type", {"tools": [{}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].name", {"tools": [{**RESPONSES_LOOK, "name": ""}]}),
    ("tools[0].parameters", {"tools": [{"type": "function", "name": "x", "parameters": 7}]}),
    ("tools[0].defer_loading", {"tools": [{**RESPONSES_LOOK, "defer_loading": True}]}),
    ("tools[0].defer_loading", {"tools": [{**RESPONSES_LOOK, "defer_loading": False}]}),
    ("tools[0].type", {"tools": [{**RESPONSES_LOOK, "type": ["function"]}]}),
    ("tools[0].tools", _namespace()),
    ("tools[0].tools[0].name", _namespace(tools=[{"type": "custom"}])),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [RESPONSES_LOOK], "tool_choice": {"type": "function", "name": "x"}}),
    ("tool_choice", {"tools": [RESPONSES_LOOK], "tool_choice": {"type": "allowed_tools"}}),
    ("reasoning.effort", {"reasoning": {"effort": "none"}}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("text.format.schema_", _format(type="json_schema", schema_={})),
    ("text.format.type", _format(type="grammar")),
    ("text.format.schema", _format(type="json_schema", name="x")),
    (
        "text.format",
        {"tools": [RESPONSES_LOOK], "tool_choice": "required", **_format(**JSON_OBJECT)},
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
    ("tools[0].strict", {"tools": [{**RESPONSES_LOOK, "strict": "false"}]}),
    ("tools[0].description", _namespace(description={"a": 1}, tools=[])),
    ("tools[0].tools[0].name", _namespace(tools=[{**RESPONSES_LOOK, "name": ""}])),
    ("stream_options.include_obfuscation", OBFUSCATED),
]
REFUSED: dict[str, tuple[Fields, list[Row]]] = {
    CHAT: ({"messages": [USER]}, OF_CHAT),
    TEXT: ({"prompt": "Hi"}, OF_TEXT),
    MESSAGES: (HELLO, OF_MESSAGES),
    COUNT: (HELLO, [row for row in OF_MESSAGES if row[0] != "max_tokens"]),
    RESPONSES: ({"input": "Hi"}, OF_RESPONSES),
}
"""A body that is accepted, and fields with which it is not: the name of the field at fault, and
words of the message.
"""


@pytest.mark.parametrize("path", REFUSED)
async def test_what_cannot_be_honored_is_refused_by_its_name(
    path: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    body, rows = REFUSED[path]
    async with serve(out=tmp_path) as bench:
        for number, (param, fields, *words) in enumerate(rows):
            with subtests.test(f"{param} in {fields}"):
                status, answer = await bench.post(
                    in_session(path, f"s{number}"), {**body, **fields}
                )
                error = answer["error"]
                expected = 404 if param == "previous_response_id" else 400
                assert (status, error["param"]) == (expected, param), answer
                assert error["type"] == "invalid_request_error" and error["code"]
                assert ("type" in answer) == path.startswith(MESSAGES)
                name = re.split(r"[.\[]", param)[0].removesuffix("s")
                assert [word for word in words or [name] if word not in error["message"]] == []
        assert bench.engine.log == []
        assert (await bench.get("/sessions"))["data"] == []
    lines = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
    assert [line for line in lines if "kind" in line] == [], "no session was created"


async def test_an_id_that_is_none_is_refused_for_any_vocabulary() -> None:
    async with serve() as bench:
        bench.endpoint.model_info = ModelInfo(context_length=1000)
        for index in (-1, 2**31, 2**40):
            status, _, param = await bench.refusal(TEXT, {"prompt": [1, index]})
            assert (status, param) == (400, "prompt")


SHOWS_ID = "{% for m in messages if m.role == 'tool' %}{{ m.id }}{% endfor %}"


async def test_a_field_that_the_template_may_show_is_refused(tokenizer: Any) -> None:
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = SHOWS_ID + tokenizer.chat_template
    reply = {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}]}
    async with serve(tokenizer=shown) as bench:
        for role, value, expected in (
            ("user", "c", 200),
            ("tool", "c", 400),
            ("user", {}, 200),
            ("user", {"of": "c"}, 400),
        ):
            messages = [USER, reply, *tool_results(reply)]
            for message in messages:
                message |= {"id": value} if message["role"] == role else {}
            status, _ = await bench.post(CHAT, {"messages": messages})
            assert status == expected, (role, value)


# --- sampling parameters of a session and of the endpoint -----------------------------------------


WRONG_DEFAULTS: list[tuple[str, Fields]] = [
    ("max_new_tokens", {"max_new_tokens": "x"}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": 5}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
    ("temperature", {"temperature": -1}),
    ("logit_bias.a", {"logit_bias": {"a": 1}}),
    ("json_schema", {"json_schema": {"type": "object"}}),
    ("temprature", {"temprature": 1}),
]


async def test_a_wrong_default_is_refused_where_it_is_set() -> None:
    async with serve() as bench:
        for name, params in WRONG_DEFAULTS:
            with pytest.raises(UsageError, match=re.escape(name)):
                EndpointSettings(sampling_params=params)
            body = {"session_id": "s", "sampling_params": params}
            status, code, param = await bench.refusal("/sessions", body)
            assert status == 400 and (code == "invalid_value" or name == "temprature")
            assert param is not None and param.startswith(f"sampling_params.{name}")
        assert len(bench.endpoint.sessions) == 0


def test_every_parameter_of_sglang_but_n_can_be_a_default() -> None:
    assert set(SamplingDefaults.model_fields) == KNOWN - {"n"}
