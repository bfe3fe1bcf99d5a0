"""`Renderer`: the text that `tokenizer.apply_chat_template` gives, on every supported version."""

import json
import operator
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.listed_environment import TOOL as LOOK
from support.oracle import Oracle, Refused
from support.oracle_scenarios import call, calls, part, result, said, scenarios, system, user
from support.qwen import all_templates, markers, trl_template
from support.tiers import by_tier
from transformers.utils import chat_template_utils

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import applier
from toolroll.rollout.template.render import Renderer
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

NOW = datetime(2026, 3, 4, 5, 6, 7)
MISSING = object()
TOOL = {**LOOK, "function": {**LOOK["function"], "description": "Look – 見る."}}
USER = user("Look.")


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own render reads the time that ours was given."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    return calls(call(1, arguments, "look"), **more)


def look_result(content: Any) -> dict[str, Any]:
    return result(1, content, "look")


TALK: Any = [
    system("Be brief."),
    USER,
    calling({"at": "é"}),
    look_result("a frog"),
    said("A frog."),
    user("Thanks."),
]


class Both:
    """One template, rendered by `transformers` and by the renderer."""

    def __init__(self, source: str, **kwargs: Any) -> None:
        tokenizer = load_embedded_tokenizer()
        tokenizer.chat_template, tokenizer.bos_token = source, "<b>"  # Llama 3's asks for it
        self.kwargs, self.oracle = kwargs, Oracle(tokenizer)
        self.renderer = Renderer(tokenizer, kwargs=kwargs, now=NOW)

    def native(self, talk: Sequence[Any], tools: Any = None) -> str:
        """The prompt that `apply_chat_template` gives for exactly these messages."""
        options = {"add_generation_prompt": True, "tokenize": False, **self.kwargs}
        return str(self.oracle.tokenizer.apply_chat_template(list(talk), tools=tools, **options))

    def ours(self, talk: Sequence[Any], tools: Any = None) -> str:
        return self.renderer.render(talk, tools, generate=True)


# --- every template -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_tier(all_templates()))
def test_every_scenario_renders_as_transformers_renders_it(name: str) -> None:
    source = all_templates()[name]
    both = Both(source)
    shown = 0
    for it in scenarios([*markers(source), "<|im_end|>"]):
        whole = [*it.history, it.turn, *it.new]
        for talk, generate in ((it.history, True), ([*it.history, it.turn], False), (whole, True)):
            render = partial(both.renderer.render, talk, it.tools, generate=generate)
            try:
                expected = both.oracle.text(talk, it.tools, generate=generate)
            except Refused as error:
                with pytest.raises(TemplateError, match=re.escape(str(error))):
                    render()
            else:
                assert render() == expected
                shown += 1
    few = {"gemma": 8, "llava": 3}  # no system message; only contents with parts
    assert shown >= few.get(name.split("_")[0], 60)


# --- what transformers does before it renders -----------------------------------------------------


def test_the_clock_is_the_renderers(tokenizer: Any) -> None:
    """And no variable: transformers 5.23 makes text of one that is not JSON."""
    source = "{{ strftime_now('%d %b %Y') }}"
    for year in (1999, 2031):
        renderer = Renderer(tokenizer, chat_template=source, now=datetime(year, 7, 26))
        assert renderer.render([USER], None, generate=False) == f"26 Jul {year}"
    both = Both(source + "{{ strftime_now is string }}{{ day is string }}", day=NOW.date())
    assert both.ours([USER]) == both.native([USER])
    assert both.ours([USER]).startswith("04 Mar 2026False")


def test_nothing_but_json_is_given_to_transformers() -> None:
    """Transformers 5.23 makes text of the rest: a clock among the variables cannot be called."""
    given = load_embedded_tokenizer()
    theirs, seen = given.apply_chat_template, []

    def apply(messages: Any, **more: Any) -> Any:
        seen.append(json.dumps([messages, more]))
        return theirs(messages, **more)

    given.apply_chat_template = apply
    Renderer(given, kwargs={"enable_thinking": False}).render(TALK, [TOOL], generate=True)
    assert '"enable_thinking": false' in seen[-1]


@pytest.mark.parametrize("field", ["name", "content", "reasoning_content", "thinking"])
@pytest.mark.parametrize("value", [None, "x", MISSING])
def test_a_field_is_normalized_as_transformers_does(field: str, value: Any) -> None:
    """Transformers 5.23 drops what is None, and copies thoughts from field to field."""
    names = ("name", "content", "reasoning_content", "thinking", "reasoning")
    shown = "{{ m.NAME }}|{{ m.get('NAME', 'no') }}|{{ m.NAME is defined }};"
    source = "{% for m in messages %}" + "".join(shown.replace("NAME", name) for name in names)
    both = Both(source + "{{ m | tojson }}{% endfor %}")
    turn = said("")
    talk = [USER, turn if value is MISSING else {**turn, field: value}]
    assert both.ours(talk) == both.native(talk)


def test_prepared_messages_are_not_copied(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a version of transformers copies them in each render, it must be done once: `PASSES`."""
    seen: dict[str, Any] = {}
    template = SimpleNamespace(render=lambda **variables: seen.update(variables) or "")
    monkeypatch.setattr(applier, "compile_template", lambda source, now: template)
    renderer = Renderer(tokenizer)
    prepared = renderer.prepare(TALK)
    head = renderer.head(prepared, [TOOL])
    renderer.render_prepared(prepared, head, generate=True)
    assert len(seen["messages"]) == len(TALK)
    for name, given in (("messages", prepared), ("tools", head.tools)):
        assert all(map(operator.is_, seen[name], given or ()))


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("value", [np.float64(0.5), Text("text"), (1, "x"), {1: None}, [None, 2]])
def test_what_is_not_plain_is_rendered_as_transformers_does(value: Any) -> None:
    source = "{% for m in messages %}{{ m.at }}{% for t in tools %}{{ t.at }}{% endfor %}"
    both = Both(source + "{{ documents[0].at }}{% endfor %}", documents=[{"at": value}])
    talk, tools = [{**USER, "at": value, "none": None}], [{**TOOL, "at": value, "none": None}]
    assert both.ours(talk, tools) == both.native(talk, tools)


# --- arguments ------------------------------------------------------------------------------------

SHOWS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{{ m.content }}{% "
    "endfor %}"
)


def showing(tokenizer: Any, shown: str) -> Renderer:
    return Renderer(tokenizer, chat_template=SHOWS.replace("%s", shown))


@pytest.mark.parametrize(
    ("shown", "form"),
    [
        ("{{ c.function.arguments | tojson }}", "dict"),
        ("{{ c.function.arguments.items() | list }}", "dict"),
        ("{{ '```json\n' + c.function.arguments }}", "text"),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", "text"),
        ("{{ c.function.name }}", None),
    ],
)
def test_the_form_of_arguments_is_learned(tokenizer: Any, shown: str, form: str | None) -> None:
    assert showing(tokenizer, shown).argument_form == form


def test_an_error_does_not_change_the_form_of_arguments(tokenizer: Any) -> None:
    """Its arguments as text would render: without them."""
    renderer = showing(tokenizer, "{{ c.function.arguments.x + '!' }}")
    assert renderer.argument_form == "dict"
    talk = [USER, calling({"x": 5})]
    with pytest.raises(TemplateError, match="unsupported operand") as refused:
        renderer.render(talk, None, generate=True)
    assert isinstance(refused.value.__cause__, TypeError)
    assert renderer.argument_form == "dict"
    assert "there!" in renderer.render([USER, calling({"x": "there"})], None, generate=True)


@pytest.mark.parametrize("arguments", ['{"n": 123456789012345678901234567890}', '{"x": 1e22}'])
def test_numbers_are_rendered_as_they_were_said(tokenizer: Any, arguments: str) -> None:
    for shown in ("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"):
        talk = [USER, calling(arguments)]
        text = showing(tokenizer, shown).render(talk, None, generate=True)
        assert json.loads(text.removeprefix("Look.")) == json.loads(arguments)


@pytest.mark.parametrize("arguments", ['{"at"', "[1]", "", None, '"x"', "[" * 100_000])
def test_arguments_that_cannot_be_read_are_an_empty_object(tokenizer: Any, arguments: Any) -> None:
    renderer = showing(tokenizer, "{{ c.function.arguments.items() | list }}")
    assert renderer.render([USER, calling(arguments)], None, generate=True) == "Look.[]"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("{{ raise_exception('only one') }}", "only one"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ [1].append(2) }}", "not safely callable|is unsafe"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    ],
)
def test_a_refusal_is_told_in_the_templates_words(tokenizer: Any, fails: str, words: str) -> None:
    source = "{% if messages | length > 5 %}" + fails + "{% endif %}{{ messages[0].content }}"
    renderer = Renderer(tokenizer, chat_template=source)
    assert renderer.render(TALK[:1], None, generate=True) == "Be brief."
    with pytest.raises(TemplateError, match=words):
        renderer.render(TALK, None, generate=True)
    with pytest.raises(TemplateError, match="Encountered unknown tag"):
        Renderer(tokenizer, chat_template="{% nothing %}").render(TALK, None, generate=True)


# --- contents with parts --------------------------------------------------------------------------

PARTS = [part("  two \n"), part("parts ")]


@pytest.mark.parametrize("name", ["qwen2_5", "gemma3"])  # a list; the first part
def test_a_template_that_takes_no_parts_is_given_their_text(name: str) -> None:
    both = Both(trl_template(name))
    joined = "".join(each["text"] for each in PARTS)
    assert both.ours([system(PARTS), USER]) == both.native([system(joined), USER])


def test_parts_of_the_responses_api_are_text_parts() -> None:
    both = Both(trl_template("gemma4"))
    contents = ([{**PARTS[0], "type": kind}] for kind in ("text", "input_text", "output_text"))
    texts = {both.ours([user(content)]) for content in contents}
    assert texts == {both.native([user(PARTS[:1])])}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part("a"), {"type": "image_url", "image_url": {}}], r"content\[1\] .* 'image_url'"),
        (["a"], r"content\[0\] is a part of type 'str'"),
        ([{"type": "text"}], r"content\[0\]\.text must be a string"),
        (5, "not int"),
    ],
)
def test_what_is_not_text_is_refused_by_its_name(tokenizer: Any, content: Any, words: str) -> None:
    for name in ("gemma4", "qwen3"):
        renderer = Renderer(tokenizer, chat_template=trl_template(name))
        with pytest.raises(TemplateError, match=words):
            renderer.render([user(content)], None, generate=True)


# --- surrogates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "gemma4"])
def test_no_text_has_a_surrogate(tokenizer: Any, name: str) -> None:
    lone = "a\ud800b"
    tool = {**TOOL, "function": {**TOOL["function"], "description": lone}}
    renderer = Renderer(tokenizer, chat_template=trl_template(name), kwargs={"bos_token": lone})
    for arguments in ({"at": lone}, {lone: 1}, json.dumps({"at": lone})):
        talk = [user(lone), calling(arguments), look_result([part(lone)])]
        text = renderer.render(talk, [tool], generate=True)
        assert text.count("a\ufffdb") >= 3
        assert tokenizer(text)["input_ids"]
