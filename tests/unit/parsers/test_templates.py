"""A family's parser reads what its chat template writes, and is found by probing it."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import assert_read_back, calls
from support.formats import FAMILIES, FORMATS, UNREADABLE, tools_for
from support.qwen import all_templates, tokenizer_for
from support.tiers import by_tier, costly

from toolroll.parsers.infer import better_parser, infer_parser
from toolroll.parsers.reasoning import THINK
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import UnknownParserError
from toolroll.rollout.template.chat_template import ChatTemplate

pytestmark = pytest.mark.tokens


@cache
def tokenizer_named(name: str) -> Any:
    return tokenizer_for(template_named(name))


@cache
def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_named(name))


def template_named(name: str) -> str:
    found = all_templates()
    if name not in found:
        pytest.skip(f"the chat template {name} is in TOOLROLL_TEST_DATA, which is not set")
    return found[name]


def written_turn(template: Any, found: Any, content: str) -> tuple[str, list[dict[str, Any]], bool]:
    """What the template writes behind the generation prompt, up to its stop token; the tools;
    and whether it is in reasoning."""
    tools = tools_for(found)
    functions = [{"name": name, "arguments": arguments} for name, arguments in found]
    written = [
        {"id": f"functions.{function['name']}:{n}", "type": "function", "function": function}
        for n, function in enumerate(functions)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": written}
    user = {"role": "user", "content": "Go on."}
    whole = template.renderer.render([user, turn], tools, generate=False)
    prompt = template.renderer.render([user], tools, generate=True)
    opened = template.start([user], tools).opens_reasoning(THINK)
    if not whole.startswith(prompt):  # DeepSeek's opens a thought that history does not show
        prompt, opened = prompt.removesuffix("<think>\n"), False
        assert whole.startswith(prompt)
    text = whole[len(prompt) :]
    ends = [at for stop in template.stop_texts if (at := text.rfind(stop)) >= 0]
    return (text[: max(ends)] if ends else text), tools, opened


@pytest.mark.parametrize("name", by_tier(FAMILIES))
@costly(4)
@given(data=st.data())
def test_what_a_chat_template_writes_is_read_back(name: str, data: st.DataObject) -> None:
    kind, parallel = FAMILIES[name]
    form = next(form for form in FORMATS if form.name == kind)
    form = replace(form, parallel=parallel, wide=False)
    if name in UNREADABLE:
        form = replace(form, ambiguous=UNREADABLE[name])
    found, template = data.draw(calls(form)), chat_template(name)
    content = "" if kind in ("llama3", "gpt-oss", "muse") else "I look it up."
    text, tools, opened = written_turn(template, found, content)
    reply = get_parser(kind).parse(text, tools=tools, in_reasoning=opened)
    assert_read_back(reply, found)
    assert reply.content == content


@pytest.mark.parametrize("name", by_tier(FAMILIES))
def test_the_format_of_a_template_is_found_by_probing(name: str) -> None:
    kind, _ = FAMILIES[name]
    assert infer_parser(tokenizer_named(name)) == kind
    assert better_parser(get_parser(kind), tokenizer_named(name)) is None


@pytest.mark.parametrize("name", ["phi3", "gemma3", "llama3"])
def test_a_template_without_tools_has_no_format(name: str) -> None:
    with pytest.raises(UnknownParserError, match="name the parser"):
        infer_parser(tokenizer_named(name))
