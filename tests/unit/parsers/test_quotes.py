"""A model may put strings into the quotes of another format. Then the call has the model's value,
or it is unreadable; the quotes never become a part of the value.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.formats import written
from support.parsing import assert_same_in_pieces, lost, tool

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

TEXT, ANY = {"type": "string"}, {"type": "array"}
TOOLS = [tool("f", {"s": TEXT, "rows": ANY, "o": {"type": "object"}})]
Q = '<|"|>'
OF_TEXT = ('"x', 'x"', "'x", "x'", f'{Q}x"', f'"x{Q}', f'"x{Q}y"', '"a" "b"', 'say "hi"', '"a\nb"')
OF_JSON = ("hermes", "mistral", "kimi_k2", "deepseekv31", "gpt-oss")
OK, UNREADABLE = CallStatus.OK, CallStatus.INVALID_JSON


def parsed(name: str, text: str) -> Any:
    parser = get_parser(name)
    reply = assert_same_in_pieces(parser, text, tools=TOOLS, in_reasoning=False)
    assert not lost(parser, text, reply)
    (call,) = reply.tool_calls
    return call


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{rows:["ds_152"]}', {"rows": ["ds_152"]}),
        ("{rows:['ds_152']}", {"rows": ["ds_152"]}),
        ('{rows:["a, b", "c"]}', {"rows": ["a, b", "c"]}),
        ('{o:{"mode": "fast"}}', {"o": {"mode": "fast"}}),
        ('{s:"ls -la"}', {"s": "ls -la"}),
        ('{rows:[{"id": 1, "name": "x]y"}]}', {"rows": [{"id": 1, "name": "x]y"}]}),
        ("{'s': 'a', \"o\": {<|\"|>k<|\"|>:'}'}}", {"s": "a", "o": {"k": "}"}}),
        (f"{{rows:[\"a\",'b',{Q}c{Q},d,1,null]}}", {"rows": ["a", "b", "c", "d", 1, None]}),
        (r'{s:"a\"b\u00e9\n\/"}', {"s": 'a"bé\n/'}),
        (r"{s:'a\'b\n'}", {"s": "a'b\n"}),
        (f"{{s:{Q}say \"hi\", 'you'{Q}}}", {"s": "say \"hi\", 'you'"}),
        ('{s:"it\'s"}', {"s": "it's"}),
        ('{s:""}', {"s": ""}),
        ("{s:ls -la}", {"s": "ls -la"}),
    ],
)
def test_gemma_with_other_quotes_has_the_value_of_the_model(body: str, arguments: Any) -> None:
    call = parsed("gemma4", f"<|tool_call>call:f{body}<tool_call|>")
    assert (call.status, call.arguments, call.error) == (CallStatus.OK, arguments, None)


@pytest.mark.parametrize(
    "body",
    [*(f"{{s:{text}}}" for text in OF_TEXT), "{s:'say 'a', o: 'b'}", '{"s:1}', '{rows:["a]}'],
)
def test_gemma_with_quotes_that_do_not_match_is_unreadable(body: str) -> None:
    call = parsed("gemma4", f"<|tool_call>call:f{body}<tool_call|>")
    assert (call.name, call.status) == ("f", CallStatus.INVALID_JSON)
    assert "f" in call.error


def dsml(attribute: str, value: str) -> str:
    return written("deepseekv4", s=value).replace('string="true"', f'string="{attribute}"')


def kimi(kind: str, value: str) -> str:
    return written("kimi_k3", s=value).replace('type="string"', f'type="{kind}"')


@pytest.mark.parametrize(
    ("name", "text", "status", "value"),
    [
        # a value that is marked as JSON is JSON
        ("deepseekv4", dsml("false", '"Paris"'), OK, "Paris"),
        ("deepseekv4", dsml("false", ' "a\\n" '), OK, "a\n"),
        ("deepseekv4", dsml("false", "'Paris'"), UNREADABLE, None),
        ("deepseekv4", dsml("false", '"Paris'), UNREADABLE, None),
        ("deepseekv4", dsml("True", "90210"), OK, "90210"),
        ("deepseekv4", dsml("true", '"Paris"'), OK, '"Paris"'),
        ("kimi_k3", kimi("object", '"Paris"'), OK, "Paris"),
        ("kimi_k3", kimi("array", '"Paris'), UNREADABLE, None),
        # formats with JSON take no other quotes, and Python takes both
        *((name, written(name, s="x").replace('"', "'"), UNREADABLE, 0) for name in OF_JSON),
        ("pythonic", '[f(s="a", rows=[\'b\', "c"])]', OK, "a"),
        ("pythonic", "[f(s='a\")]", CallStatus.UNCLOSED, 0),
        ("lfm2", "<|tool_call_start|>[f(s='a\")]<|tool_call_end|>", UNREADABLE, 0),
    ],
)
def test_quotes_are_the_formats_own(name: str, text: str, status: CallStatus, value: Any) -> None:
    call = parsed(name, text)
    assert call.status is status, call.error
    assert not call.ok or call.arguments["s"] == value
