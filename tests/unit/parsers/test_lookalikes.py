"""Text that looks like a call stays text, is not executed, and is counted."""

import pytest
from support.examples import EXAMPLES, TOOLS
from support.parsing import assert_same_in_pieces, lost, tool

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

OFFERED = [*TOOLS, tool("grep")]
INVOKE = '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>'
EMPTY = {
    "deepseekv4": "<｜DSML｜tool_calls></｜DSML｜tool_calls>",
    "minimax-m2": "<minimax:tool_call>\n</minimax:tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n</tool_call>",
}
PROSE = (
    "Put the name behind `<function=`, as in <function=NAME>, and close it.",
    "I would use get_time or grep for it: {grep} is a set, and get_time (a tool) is not.",
    '<input name="grep"> is HTML, and to=somebody is a recipient.',
    "x = grep (y)\nprint(get_time)\nfunction.call(grep)\nsomething(grep=1)",
    '<function=unknown_tool>\n</function> {"name": "unknown_tool", "arguments": {}}',
    "get_time() returns the time, and grep() finds text.",
    "Write `<function=get_time>` or `get_time{}`, and then `{}`.",
    'A call is `{"name": "get_time", "arguments": {}}`, or `to=get_time` before it.',
    "x\n`get_time(zone='x')` and ``grep {q: 1}``\n` get_time()",
)


@pytest.mark.parametrize(
    ("name", "text", "called"),
    [
        ("qwen3_coder", "<function=get_time>\n</function>", "get_time"),
        ("glm45", "get_time\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "get_time"),
        ("minimax-m2", '<invoke name="get_time">\n</invoke>', "get_time"),
        ("deepseekv4", INVOKE, "get_time"),
        ("deepseekv4", f"<｜DSML｜toolcalls>{INVOKE}</｜DSML｜toolcalls>", "get_time"),
        ("deepseekv4", f"<｜DSML｜function_calls>{INVOKE}</｜DSML｜function_calls>", "get_time"),
        ("deepseekv31", 'get_time<｜tool▁sep｜>{"a": 1}', "get_time"),
        ("deepseekv3", "function<｜tool▁sep｜>get_time\n```json\n{}\n```", "get_time"),
        ("kimi_k2", "functions.get_time:0<|tool_call_argument_begin|>{}", "get_time"),
        ("kimi_k3", '<|open|>call tool="get_time" index="1"<|sep|>', "get_time"),
        ("mistral", 'get_time[ARGS]{"a": 1}', "get_time"),
        ("gemma4", 'call:get_time{zone:<|"|>x<|"|>}', "get_time"),
        ("gpt-oss", '<|channel|>final <|constrain|>functions.grep<|message|>{"q": 1}', "grep"),
        ("hermes", '<tools>{"name": "get_time", "arguments": {}}</tools>', "get_time"),
        ("hermes", '{"name": "get_time", "arguments": {}}', "get_time"),
        ("cohere_command4", '[{"tool_name": "get_time", "parameters": {}}]', "get_time"),
        ("pythonic", "I look.\nget_time(zone='x')", "get_time"),
        ("hermes", "I `look`.\nget_time() \nIt waits.", "get_time"),
        ("hermes", "[get_time(), 1]", "get_time"),
        ("hermes", 'A `look`:\n``x``: {"name": "get_time", "arguments": {}}', "get_time"),
        ("hermes", "functions.get_time {'zone': 1}", "get_time"),
        ("hermes", "```get_time{}\n```", "get_time"),
        ("plain", '{"name": "get_time", "arguments": {}}', "get_time"),
    ],
)
def test_a_call_without_markers_is_text_and_counted(name: str, text: str, called: str) -> None:
    parser = get_parser(name)
    reply = assert_same_in_pieces(parser, text, tools=OFFERED, in_reasoning=False)
    assert not lost(parser, text, reply)
    assert (reply.tool_calls, reply.bad_calls) == ((), ())
    assert reply.content
    assert [(call.name, call.status, call.ok) for call in reply.lookalikes] == [
        (called, CallStatus.LOOKS_LIKE_A_CALL, False)
    ]
    assert reply.lookalikes[0].raw in reply.content
    assert called in (reply.lookalikes[0].error or "")


@pytest.mark.parametrize("text", PROSE)
@pytest.mark.parametrize("name", ["hermes", "deepseekv4", "gpt-oss", "minimax-m2", "plain"])
def test_prose_about_calls_is_only_text(name: str, text: str) -> None:
    reply = get_parser(name).parse(text, tools=OFFERED, in_reasoning=False)
    assert reply.lookalikes == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_and_a_text_without_tools_look_like_nothing_else(name: str) -> None:
    parser, good = get_parser(name), EXAMPLES[name].good
    assert parser.parse(good, tools=OFFERED, in_reasoning=False).lookalikes == ()
    for tools in (None, ()):
        assert parser.parse(good, tools=tools, in_reasoning=False).lookalikes == ()


@pytest.mark.parametrize("name", EMPTY)
def test_a_block_without_calls_is_not_a_call_and_is_counted(name: str) -> None:
    text = f"Before.{EMPTY[name]}After."
    reply = assert_same_in_pieces(get_parser(name), text, tools=OFFERED, in_reasoning=False)
    assert (reply.content, reply.tool_calls) == ("Before.After.", ())
    assert [(call.raw, call.name) for call in reply.lookalikes] == [(EMPTY[name], "")]
