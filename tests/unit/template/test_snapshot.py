"""A cursor's messages and tools never change, and no JSON text is used for another object."""

import copy
import gc
import json
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import pytest
from support.oracle_scenarios import call, calls, user
from transformers.utils import chat_template_utils

from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.snapshot import (
    JsonTexts,
    SharedTools,
    json_texts,
    snapshot,
    write_json,
)
from toolroll.rollout.types import Message, Tool

pytestmark = pytest.mark.tokens

JSON = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{{ tool.function | tojson(indent=2) }}\n"
    "{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class Level(IntEnum):
    HIGH = 1


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("there is one of this")


def tool(**parameters: Any) -> Tool:
    function = {"name": "look", "description": "Look.", "parameters": parameters}
    return {"type": "function", "function": function}


def looking(arguments: Any) -> Message:
    return calls(call(1, arguments, "look"))


def played(template: ChatTemplate, turns: list[list[Message]], tools: list[Tool]) -> list[str]:
    """The texts of all prompts of a conversation: a user's message, then `turns`."""
    cursor = template.start([user("Go.")], tools)
    texts = [cursor.text]
    for turn in turns:
        text = json.dumps(turn[0]["tool_calls"][0]["function"]["arguments"]) + "<|end|>"
        ids = template.encoder.encode(text, previous=0)
        _, cursor = cursor.after(template.sampled(ids), turn)
        texts.append(cursor.text)
    return texts


@pytest.fixture
def template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, chat_template=JSON)


def test_a_change_of_a_message_or_a_tool_does_not_reach_a_prompt(template: ChatTemplate) -> None:
    messages, tools = [user([{"type": "text", "text": "Go."}])], [tool(type="object")]
    before = template.start(copy.deepcopy(messages), copy.deepcopy(tools))
    cursor = template.start(messages, tools)
    messages[0]["content"][0]["text"] = "Stop."
    tools[0]["function"]["parameters"]["type"] = "string"
    assert cursor.text == before.text

    turn = looking({"at": {"x": [1]}})
    ids = template.encoder.encode('{"at": {"x": [1]}}<|end|>', previous=0)
    _, after = cursor.after(template.sampled(ids), [turn, user("More.")])
    turn["tool_calls"][0]["function"]["arguments"]["at"]["x"].append(2)
    _, later = after.after(template.sampled(ids), [looking({"at": {"x": [1]}}), user("Again.")])
    assert later.text.startswith(after.text)
    assert '{"x": [1, 2]}' not in later.text


LISTS: list[Callable[[], list[Tool]]] = [
    lambda: [tool(limit=1)],
    lambda: [tool(limit=True)],
    lambda: [tool(limit=1.0)],
    lambda: [tool(limit="1")],
    lambda: [tool(limit=Level.HIGH)],
    lambda: [tool(limit=[1, 2])],
    lambda: [tool(limit=(1, 2))],
    lambda: [tool(limit=2, type="object")],
    lambda: [tool(type="object", limit=2)],
    lambda: [tool(limit=-0.0)],
    lambda: [tool(limit=0.0)],
    lambda: [tool(limit="é\ud800")],
    lambda: [tool(**{"1": "x"})],
    lambda: [{"function": {"parameters": {1: "x"}}}],
    lambda: [tool(limit=1), tool(limit=2)],
    lambda: [tool(limit=2), tool(limit=1)],
    lambda: [tool(limit=2)] * 2,
]


def test_tools_render_as_transformers_renders_them(template: ChatTemplate, tokenizer: Any) -> None:
    """All lists in one process: a text of another list, another type or other options of `tojson`
    would be in the wrong place."""
    for tools in [*LISTS, *reversed(LISTS)]:
        rendered, _ = chat_template_utils.render_jinja_template(
            [[user("Go.")]],
            tools=list[Any](json_safe(tools())),
            chat_template=JSON,
            add_generation_prompt=True,
        )
        assert template.start([user("Go.")], tools()).text == rendered[0]


def json_safe(tools: list[Tool]) -> list[Tool]:
    """Return `tools`, with the lone surrogate replaced."""
    for entry in tools:
        parameters = entry["function"]["parameters"]
        for name, limit in parameters.items():
            if isinstance(limit, str):
                parameters[name] = limit.replace("\ud800", "\ufffd")
    return tools


def test_equal_tools_are_one_object_unless_a_type_differs() -> None:
    sets = [SharedTools.of(tools()) for tools in LISTS]
    shared = [n for n, held in enumerate(sets) if SharedTools.of(tuple(LISTS[n]())) is held]
    assert shared == [n for n in range(len(LISTS)) if n not in (4, 6)]  # of other classes
    assert len(set(map(id, sets))) == len(LISTS)
    for odd in (b"x", bytearray(b"x"), {1}, frozenset({1}), 1j, ...):
        assert SharedTools.of([tool(limit=odd)]) is not SharedTools.of([tool(limit=odd)])
    mine = [OrderedDict(tool(const="\ud800"))]
    held = SharedTools.of(mine)
    assert held is not SharedTools.of(mine)
    assert held.copy() == [tool(const="\ufffd")]
    size = SharedTools.of([tool(type="object")]).size
    assert size == len("function" + "look" + "Look." + "object")


def test_a_change_of_what_came_in_or_went_out_changes_no_list() -> None:
    integer = lambda: tool(type="object", properties={"size": {"type": "integer"}})
    mine = [integer()]
    held = SharedTools.of(mine)
    for tools in (mine, held.copy()):
        tools[0]["function"]["parameters"]["properties"]["size"]["type"] = "string"
        tools.append(tool())
    assert held.tools == [integer()] == SharedTools.of([integer()]).copy()
    text = '<tool_call>\n{"name": "look", "arguments": {"size": "large"}}\n</tool_call>'
    [parsed] = get_parser("hermes").parse(text, tools=held.offered).tool_calls
    assert parsed.status is CallStatus.BAD_ARGUMENTS


def test_an_object_is_written_once(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    dumps = json.dumps

    def counted(*args: Any, **kwargs: Any) -> str:
        written.append(dumps(*args, **kwargs))
        return written[-1]

    turns = [[looking({"at": number}), user("More.")] for number in range(6)]
    tools = [tool(limit=number, unit="km") for number in range(3)]
    first = played(template, turns, copy.deepcopy(tools))
    monkeypatch.setattr(json, "dumps", counted)
    assert played(template, turns, copy.deepcopy(tools)) == first
    if hasattr(chat_template_utils, "mark_control_tokens"):  # it copies the messages
        return
    arguments = [text for text in written if text.startswith('{"at"')]
    # `played` writes each turn once itself
    assert sorted(arguments) == sorted([f'{{"at": {number}}}' for number in range(6)] * 2)
    assert len(written) == len(arguments)


def test_no_object_gets_the_text_of_one_that_is_gone() -> None:
    texts = JsonTexts()
    for number in range(1_000):
        arguments = snapshot({"at": number})
        texts = texts.with_arguments([looking(arguments)])
        with json_texts(texts):
            assert write_json(json.dumps, arguments) == f'{{"at": {number}}}'
            del arguments
            gc.collect(0)
            assert write_json(json.dumps, {"at": -number}) == f'{{"at": {-number}}}'


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"indent": 1}, {"indent": 2}),
        ({"indent": None}, {"indent": 0}),
        ({"sort_keys": True}, {"sort_keys": False}),
        ({"separators": (",", ":")}, {"separators": (", ", ": ")}),
        ({"ensure_ascii": True}, {"ensure_ascii": False}),
    ],
)
def test_other_options_give_another_text(options: Any, others: Any) -> None:
    arguments = {"b": ["é"], "a": 1}
    texts = JsonTexts()
    texts.add(arguments)
    with json_texts(texts):
        each: dict[str, Any]
        for each in (options, others, {}, options, others, {}):
            expected = json.dumps(arguments, **each)
            assert write_json(json.dumps, arguments, **each) == expected


def test_a_message_that_cannot_be_copied_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(TemplateError, match=r"cannot be copied \(there is one of this\)"):
        template.start([{**user("Go."), "extra": Uncopied()}])
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested too deeply"):
        snapshot(deep)


def test_an_object_that_is_its_own_copy_is_written_each_time() -> None:
    class Shared(dict[str, int]):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    shared = Shared(x=1)
    arguments = snapshot({"at": shared})
    texts = JsonTexts().with_arguments([looking(arguments)])
    with json_texts(texts):
        assert write_json(json.dumps, arguments) == '{"at": {"x": 1}}'
        shared["x"] = 2
        assert write_json(json.dumps, arguments) == '{"at": {"x": 2}}'


@pytest.mark.parametrize("tools", ["at once", "later"])
def test_control_text_that_is_shown_later_stays_text(tokenizer: Any, tools: str) -> None:
    """The template shows the first message again, and the tools only after two messages."""
    shown = "{% if messages | length > 2 %}{{ messages[0].content }}{{ tools | tojson }}{% endif %}"
    source = JSON.replace("{% for tool in tools or [] %}", "{% for tool in [] %}") + shown
    template = ChatTemplate(tokenizer, chat_template=source)
    plain, spelled = [tool(note="a")], [tool(note="<|turn|>")]
    ids = template.encoder.encode('{"at": 1}<|end|>', previous=0)
    turn = [looking({"at": 1}), user("More.")]
    deltas = []
    for content, first, then in (
        ("x", plain, plain),
        ("<|end|>", plain, plain),
        ("x", plain if tools == "later" else spelled, spelled),
    ):
        delta, after = template.start([user(content)], first).after(
            template.sampled(ids), turn, then
        )
        assert after.text.endswith(template.encoder.decode(delta))
        deltas.append([index for index in delta.tolist() if index in template.encoder.control_ids])
    assert deltas[0] == deltas[1] == deltas[2]
