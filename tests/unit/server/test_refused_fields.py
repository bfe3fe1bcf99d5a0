"""What the endpoint cannot honor is refused by its name, in every dialect, before anything else."""

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
from support.served import CHAT, MESSAGES, RESPONSES, TEXT, USER, assistant, in_session, serve

from toolroll.endpoint import EndpointSettings
from toolroll.endpoint.endpoint_settings import SamplingDefaults
from toolroll.rollout.engine import ModelInfo
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.param_names import KNOWN

Fields = dict[str, Any]
MISSING = object()
"""In the place of a value: it is left out."""
COUNT = f"{MESSAGES}/count_tokens"
OTHER: Any = {"type": "function", "function": {"name": "listen"}}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
ANY_JSON = {"type": "json_object"}
NAMED = {"type": "function", "name": "x"}
PREFILL = [USER, assistant("I")]
EMPTY_STOP = "a stop string must not be empty"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
SEEN = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}]}
REPLY = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "seen"}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": []},
    {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "text", "text": "seen"}]},
    {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
]
MESSAGES_BODY: Fields = {
    **HELLO,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [THOUGHT, USE]},
        {"role": "user", "content": [SEEN]},
    ],
    "tools": [MESSAGES_LOOK],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
EYES = {"type": "namespace", "name": "eyes", "tools": [RESPONSES_LOOK]}
BODIES: dict[str, Fields] = {
    CHAT: {"messages": [USER, REPLY, RESULT], "tools": [TOOL]},
    TEXT: {"prompt": "Hi"},
    MESSAGES: MESSAGES_BODY,
    COUNT: MESSAGES_BODY,
    RESPONSES: {
        "input": ITEMS,
        "tools": [RESPONSES_LOOK, {"type": "custom", "name": "patch"}, EYES],
        "include": ["reasoning.encrypted_content"],
    },
}


OF_MESSAGES: dict[str, list[Any]] = {
    "messages": [None, []],
    "messages[0].role": ["tool"],
    "messages[0].name": ["x"],
    "messages[0].content": [[], 7],
    "messages[0].content[0].type": [["text"], "image"],
    "messages[0].content[0].text": [MISSING],
    "messages[1].content[0].type": ["redacted_thinking"],
    "messages[1].content[1].id": [MISSING],
    "messages[1].content[1].input": ["x"],
    "messages[2].content[0].content": [7],
    "messages[2].content[0].content[0].type": ["image"],
    "system[0].type": ["image"],
    "tools[0].type": ["bash_20250124", ["custom"]],
    "tools[0].input_schema": [MISSING],
    "tools[0].defer_loading": [True, False],
    "tools[0].strict": ["false"],
    "tool_choice": [{"type": "tool", "name": "x"}],
    "thinking.type": ["between_tools"],
    "service_tier": ["priority"],
    "speed": ["fast"],
    "context_management.edits[0].type": ["clear_tool_uses_20250919"],
    "container": ["x"],
}
WRONG: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "best_of_all": [3],
        "reasoning_effort": ["none"],
        "store": [True],
        "n": [0, 1000],
        "temperature": [-1],
        "top_logprobs": [3],
        "stop_token_ids": [[10**8]],
        "logit_bias": [{str(10**8): 1}],
        "service_tier": ["priority"],
        "tools[0].type": ["web_search"],
        "tool_choice": [{"function": {"name": "listen"}}],
        "chat_template_kwargs.messages": [[]],
        "stream_options.include_obfuscation": [True],
        "continue_final_message": [True],
        "messages": [[]],
        "messages[1]": [3],
        "messages[0].role": ["function"],
        "messages[0].content": [[IMAGE], None, 3],
        "messages[0].tool_calls": [{"id": "a"}],
        "messages[1].audio": [{"id": "a"}],
        "messages[1].tool_calls": [5],
        "messages[1].tool_calls[0].type": ["custom"],
        "messages[1].tool_calls[0].content": [1],
        "messages[2].tool_call_id": [{}],
    },
    TEXT: {"prompt": ["", [-1]], "n": [1000], "suffix": ["x"]},
    MESSAGES: {**OF_MESSAGES, "max_tokens": [None, 0]},
    COUNT: OF_MESSAGES,
    RESPONSES: {
        "input": [7, [], PREFILL],
        "input[0].type": ["web_search_call", ["message"]],
        "input[0].role": ["tool"],
        "input[0].name": ["n"],
        "input[0].content": [7],
        "input[0].content[0].type": [{}, "input_image"],
        "input[1].summary": [7],
        "input[2].content[0].type": ["refusal"],
        "input[3].arguments": [{}],
        "input[4].call_id": [MISSING],
        "input[4].output[0].type": ["input_image"],
        "input[5].input": [{}],
        "input[6].output": [7],
        "tools[0]": ["look"],
        "tools[0].type": ["web_search", MISSING, ["function"]],
        "tools[0].name": [MISSING, ""],
        "tools[0].parameters": [7],
        "tools[1].parameters": [{}],
        "tools[1].format": ["text", GRAMMAR],
        "tools[2].tools": [MISSING],
        "tools[2].description": [{"a": 1}],
        "tool_choice": [NAMED, {"type": "allowed_tools"}],
        "reasoning.effort": ["none", "extreme"],
        "reasoning.mode": ["pro"],
        "top_logprobs": [3],
        "include[0]": ["message.output_text.logprobs"],
        "truncation": ["auto"],
        "background": [True],
        "service_tier": ["flex"],
        "conversation": ["c"],
        "stream_options.include_obfuscation": [True],
    },
}
"""Values that are refused at their own place."""
FORCED: Fields = {"tool_choice": "required"}
OF_BOTH: list[tuple[str, Fields, str]] = [
    ("tools", {"tools": [MESSAGES_LOOK] * 2}, "'look'"),
    ("stop_sequences", {"stop_sequences": ["END", ""]}, EMPTY_STOP),
    ("tool_choice", {"tools": [], "tool_choice": {"type": "any"}}, ""),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}, ""),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
    ("stream", {"stream": True, "messages": PREFILL}, ""),
    ("messages[1]", {"messages": [USER, {"role": "assistant", "content": [USE]}]}, ""),
]
TOGETHER: dict[str, list[tuple[str, Fields, str]]] = {
    CHAT: [
        ("tool_choice", {"tools": [], **FORCED}, ""),
        ("tools", {"tools": [TOOL, TOOL]}, "'look'"),
        ("tools", {"tools": [TOOL, TOOL], "tool_choice": "none"}, "'look'"),
        ("tools[1].function.strict", {"tools": [OTHER, STRICT], "response_format": ANY_JSON}, ""),
        ("response_format", {**FORCED, "response_format": ANY_JSON}, ""),
        ("messages", {"messages": PREFILL}, "the last message is from the assistant"),
        ("stop", {"stop": ""}, EMPTY_STOP),
    ],
    TEXT: [("stop", {"stop": ["END", ""]}, EMPTY_STOP)],
    MESSAGES: OF_BOTH,
    COUNT: OF_BOTH,
    RESPONSES: [
        ("previous_response_id", {"previous_response_id": "resp_x"}, "resp_x"),
        ("tools", {"tools": [RESPONSES_LOOK] * 2}, "'look'"),
        ("tools", {"tools": [EYES, {**RESPONSES_LOOK, "name": "eyes__look"}]}, "'eyes__look'"),
        ("input[1].type", {"input": [USER, {}]}, ""),
        ("input[1].id", {"input": [USER, {"type": "item_reference"}]}, ""),
        ("tool_choice", {"tools": [], **FORCED}, ""),
        ("text.format.schema_", {"text": {"format": {"type": "json_schema", "schema_": {}}}}, ""),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}, ""),
        ("text.format", {**FORCED, "text": {"format": ANY_JSON}}, ""),
    ],
}
"""Fields that are refused because of others or of a part: the name of the one at fault, and a word
of the message.
"""


def changed(body: Fields, place: str, value: Any) -> Fields:
    """Return `body` with `value` at `place`, such as "tools[0].name"."""
    body = json.loads(json.dumps(body))  # no two places share an object
    *outer, last = (int(key) if key.isdigit() else key for key in re.findall(r"\w+", place))
    part: Any = body
    for key in outer:
        part = part[key] if isinstance(part, list) else part.setdefault(key, {})
    part[last] = value
    if value is MISSING:
        del part[last]
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_what_cannot_be_honored_is_refused_by_its_name(
    path: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    body = BODIES[path]
    rows = [
        (place, changed(body, place, value), "")
        for place, values in WRONG[path].items()
        for value in values
    ]
    rows += [(param, {**body, **fields}, word) for param, fields, word in TOGETHER[path]]
    async with serve(out=tmp_path) as bench:
        for number, (param, wrong, word) in enumerate(rows):
            with subtests.test(f"{param}, row {number}"):
                status, answer = await bench.post(in_session(path, f"s{number}"), wrong)
                error = answer["error"]
                expected = 404 if param == "previous_response_id" else 400
                assert (status, error["param"]) == (expected, param), answer
                assert error["type"] == "invalid_request_error" and error["code"]
                assert ("type" in answer) == path.startswith(MESSAGES)
                name = re.split(r"[.\[]", param)[0].removesuffix("s")
                assert (word or name) in error["message"]
        assert bench.engine.log == []
        assert (await bench.get("/sessions"))["data"] == []
        lines = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
        assert [line for line in lines if "kind" in line] == [], "no session was created"
        await bench.send(in_session(path), body)


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
    async with serve(tokenizer=shown) as bench:
        for role, value, expected in (
            ("user", "c", 200),
            ("tool", "c", 400),
            ("user", {}, 200),
            ("user", {"of": "c"}, 400),
        ):
            messages = [dict(message) for message in (USER, REPLY, RESULT)]
            for message in messages:
                message |= {"id": value} if message["role"] == role else {}
            status, _ = await bench.post(CHAT, {"messages": messages})
            assert status == expected, (role, value)


WRONG_DEFAULTS: list[tuple[str, Fields]] = [
    ("stop", {"stop": [""]}),
    ("stop_token_ids[0]", {"stop_token_ids": ["a"]}),
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
