"""Replies as OpenAI messages, there and back, and the published adapter's result."""

import json

import pytest
from support.examples import EXAMPLES, TOOLS

from toolroll.parsers.openai import create_openai_adapter, from_openai, parse_tools, to_openai
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_reply_comes_back_from_its_message(name: str) -> None:
    reply = get_parser(name).parse(EXAMPLES[name].good, tools=TOOLS, in_reasoning=False)
    message = to_openai(reply)
    json.dumps(message).encode()
    back = from_openai(message)
    assert (back.content, back.reasoning) == (reply.content, reply.reasoning)
    assert [(call.name, call.arguments, call.id) for call in back.tool_calls] == [
        (call.name, call.arguments, call.id) for call in reply.tool_calls
    ]
    assert to_openai(back) == message


def test_broken_arguments_are_a_bad_call_and_others_are_refused() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    (bad,) = from_openai({"role": "assistant", "content": None, "tool_calls": [call]}).bad_calls
    assert (bad.status, bad.raw, bad.id) == (CallStatus.INVALID_JSON, "{", "a")
    with pytest.raises(ValueError, match="'user'"):
        from_openai({"role": "user", "content": "x"})
    with pytest.raises(ValueError, match="parts"):
        from_openai({"role": "assistant", "content": [{"type": "text", "text": "x"}]})


def test_the_published_result() -> None:
    adapter = create_openai_adapter(TOOLS, "qwen25")
    result = adapter.parse_response_to_openai_format(EXAMPLES["hermes"].good)
    assert (result["success"], result["error"]) == (True, None)
    assert result["parsed_result"]["normal_text"] == "I look it up."
    weather = {"name": "get_weather", "parameters": '{"city": "Paris", "days": 2}'}
    assert result["parsed_result"]["calls"][0] == weather
    time = {"name": "get_time", "arguments": "{}"}
    assert result["openai_message"]["tool_calls"][1]["function"] == time
    broken = adapter.parse_response_to_openai_format("Hm. <tool_call>{</tool_call>")
    assert broken["success"] is False
    assert "not valid JSON" in broken["error"]
    assert broken["parsed_result"] == {"normal_text": "Hm.", "calls": []}
    assert adapter.get_openai_tools_format()[0]["function"]["name"] == "get_weather"
    assert parse_tools("Hi", TOOLS) == {"normal_text": "Hi", "calls": []}
