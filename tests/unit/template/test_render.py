"""`Renderer`: the text that `tokenizer.apply_chat_template` gives, on every supported version."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.oracle_scenarios import part, scenarios
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
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look – 見る.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "Look."}


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own render reads the time that ours was given."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": content}


TALK: Any = [
    {"role": "system", "content": "Be brief."},
    USER,
    calling({"at": "é"}),
    result("a frog"),
    {"role": "assistant", "content": "A frog."},
    {"role": "user", "content": "Thanks."},
]


class Both:
    """One template, rendered by `transformers` and by the renderer."""

    def __init__(self, tokenizer: Any, source: str, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.kwargs = kwargs
        self.renderer = Renderer(tokenizer, chat_template=source, kwargs=kwargs, now=NOW)

    def native(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> str:
        """The text that `apply_chat_template` gives for exactly these messages."""
        options = {"chat_template": self.source, "add_generation_prompt": generate, **self.kwargs}
        given = list(tools) if tools else None
        apply = self.tokenizer.apply_chat_template
        return str(apply(list(talk), tools=given, tokenize=False, **options))

    def ours(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> str:
        return self.renderer.render(talk, tools, generate=generate)

    def agree(self, talk: Sequence[Any], tools: Any = None, *, generate: bool = True) -> bool:
        """Compare the texts, or the refusals; return whether there was a text."""
        given = [self.fields(self.form(message)) for message in talk]
        try:
            expected = self.native_parts(given, tools, generate=generate)
        except Exception as error:
            with pytest.raises(TemplateError) as refused:
                self.ours(talk, tools, generate=generate)
            assert str(error) in str(refused.value)
            return False
        assert self.ours(talk, tools, generate=generate) == expected
        return True

    def form(self, message: Any) -> Any:
        """`message` with its arguments in the form that the template takes."""
        return (as_text if self.renderer.argument_form == "text" else as_dict)(message)

    def fields(self, message: Any) -> Any:
        """`message` with its reasoning also as `thinking` if the template reads only this field,
        and with an empty content instead of null beside calls if the template does not take null.
        """
        only_thinking = "thinking" in self.source and "reasoning_content" not in self.source
        if message.get("reasoning_content") and only_thinking:
            message = {**message, "thinking": message["reasoning_content"]}
        if message["content"] is None and message.get("tool_calls") and not self.takes_null:
            message = {**message, "content": ""}
        return message

    @cached_property
    def takes_null(self) -> bool:
        """Whether a call beside null is neither refused nor rendered with the word for null."""
        for end in ([result("ok")], []):
            texts = []
            for content in ("", None):
                try:
                    call = self.form({**calling({"at": "x"}), "content": content})
                    texts.append(self.native([USER, call, *end], [TOOL]))
                except Exception:
                    texts.append("")
            empty, null = texts
            if empty:
                words = ("None", "null")
                return bool(null) and all(null.count(it) == empty.count(it) for it in words)
        return True

    def native_parts(self, talk: list[Any], tools: Any, *, generate: bool) -> str:
        """The native text; if the template cannot take lists of parts, with the parts joined."""
        texts = [it["text"] for m in talk if isinstance(m["content"], list) for it in m["content"]]
        if texts:
            try:
                text = self.native(talk, tools, generate=generate)
            except Exception:
                text = ""
            if "{'type'" not in text and all(it.strip() in text for it in texts):
                return text
        return self.native([joined(message) for message in talk], tools, generate=generate)


def as_dict(message: Any) -> Any:
    return with_arguments(message, lambda it: json.loads(it) if isinstance(it, str) else it)


def as_text(message: Any) -> Any:
    write = lambda it: json.dumps(it, ensure_ascii=False, separators=(",", ":"))
    return with_arguments(message, lambda it: it if isinstance(it, str) else write(it))


def with_arguments(message: Any, change: Any) -> Any:
    if not message.get("tool_calls"):
        return message
    made = [
        {**it, "function": {**it["function"], "arguments": change(it["function"]["arguments"])}}
        for it in message["tool_calls"]
    ]
    return {**message, "tool_calls": made}


def joined(message: Any) -> Any:
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "".join(it["text"] for it in message["content"])}


# --- every template -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_tier(all_templates()))
def test_every_scenario_renders_as_transformers_renders_it(tokenizer: Any, name: str) -> None:
    source = all_templates()[name]
    both = Both(tokenizer, source, bos_token="<b>")  # Llama 3's template asks for one
    shown = 0
    for it in scenarios([*markers(source), "<|im_end|>"]):
        shown += both.agree(it.history, it.tools)
        shown += both.agree([*it.history, it.turn], it.tools, generate=False)
        shown += both.agree([*it.history, it.turn, *it.new], it.tools)
    few = {"gemma": 8, "llava": 3}  # no system message; only contents with parts
    assert shown >= few.get(name.split("_")[0], 60)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss", "muse_glimmer"])
def test_a_hundred_prompts_with_calls_in_their_history(tokenizer: Any, name: str) -> None:
    """Refused by our render, or rendered with arguments as text, with transformers 5.23."""
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    dice = random.Random(16)
    for _ in range(100):
        talk = [{"role": "system", "content": "Be brief."}] if dice.random() < 0.7 else []
        talk.append(USER)
        for turn in range(dice.randint(1, 4)):
            arguments = dice.choice([{"at": "é"}, {"at": None}, {"at": [1, 2.5]}, {}])
            more = {"reasoning_content": f"I look {turn}."} if dice.random() < 0.5 else {}
            talk.append(calling(arguments, **more))
            talk.append(result(dice.choice(["ok", '{"a": 1}', ""])))
            if dice.random() < 0.3:
                talk += [{"role": "assistant", "content": "Done."}, USER]
        assert both.agree(talk, [TOOL])


# --- what transformers does before it renders -----------------------------------------------------


def test_the_clock_is_the_renderers(tokenizer: Any) -> None:
    """And no variable: transformers 5.23 makes text of one that is not JSON."""
    source = "{{ strftime_now('%d %b %Y') }}"
    for year in (1999, 2031):
        renderer = Renderer(tokenizer, chat_template=source, now=datetime(year, 7, 26))
        assert renderer.render([USER], None, generate=False) == f"26 Jul {year}"
    both = Both(
        tokenizer, source + "{{ strftime_now is string }}{{ day is string }}", day=NOW.date()
    )
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
def test_a_field_is_normalized_as_transformers_does(tokenizer: Any, field: str, value: Any) -> None:
    """Transformers 5.23 drops what is None, and copies thoughts from field to field."""
    names = ("name", "content", "reasoning_content", "thinking", "reasoning")
    shown = "{{ m.NAME }}|{{ m.get('NAME', 'no') }}|{{ m.NAME is defined }};"
    source = "{% for m in messages %}" + "".join(shown.replace("NAME", name) for name in names)
    both = Both(tokenizer, source + "{{ m | tojson }}{% endfor %}")
    turn = {"role": "assistant", "content": ""}
    talk = [USER, turn if value is MISSING else {**turn, field: value}]
    assert both.ours(talk) == both.native(talk)


def test_the_template_gets_the_prepared_messages_themselves(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_what_is_not_plain_is_rendered_as_transformers_does(tokenizer: Any, value: Any) -> None:
    source = "{% for m in messages %}{{ m.at }}{% for t in tools %}{{ t.at }}{% endfor %}"
    both = Both(tokenizer, source + "{{ documents[0].at }}{% endfor %}", documents=[{"at": value}])
    talk, tools = [{**USER, "at": value, "none": None}], [{**TOOL, "at": value, "none": None}]
    assert both.ours(talk, tools) == both.native(talk, tools)


def test_variables_that_transformers_takes_are_left_to_it(tokenizer: Any) -> None:
    source = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    both = Both(tokenizer, source, documents=[{"title": "t", "text": "doc "}])
    assert both.ours(TALK) == both.native(TALK) == "doc Be brief."


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
def test_the_form_of_arguments_is_learned_at_once(
    tokenizer: Any, shown: str, form: str | None
) -> None:
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
        ("{{ 2 + 'x' }}", "unsupported operand"),
        ("{{ range(10 ** 9) }}", "Range too big"),
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


TOOL_PARTS = [USER, calling({"at": "x"}), result(PARTS)]
USER_PARTS = [{"role": "user", "content": PARTS}]


@pytest.mark.parametrize(
    ("name", "talk"),
    [
        *((name, TOOL_PARTS) for name in ("llama3_2", "gptoss", "gemma4", "gemma4_v2", "lfm2")),
        *((name, USER_PARTS) for name in ("gemma4", "qwen3_5_think", "smolvlm")),
    ],
)
def test_a_template_that_takes_parts_is_given_them(tokenizer: Any, name: str, talk: Any) -> None:
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    tools = [TOOL] if talk is TOOL_PARTS else None
    assert both.ours(talk, tools) == both.native(talk, tools)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("qwen2_5", "user"),  # raises
        ("qwen2_5", "system"),  # prints a list
        ("llama3_2", "user"),  # prints a list
        ("qwen3", "user"),  # shows nothing
        ("gemma3", "system"),  # shows the first part
    ],
)
def test_a_template_that_takes_no_parts_is_given_their_text(
    tokenizer: Any, name: str, role: str
) -> None:
    both = Both(tokenizer, trl_template(name), bos_token="<b>")
    message = {"role": role, "content": PARTS}
    more = [USER] if role == "system" else []
    assert both.ours([message, *more]) == both.native([joined(message), *more])


def test_parts_of_the_responses_api_are_text_parts(tokenizer: Any) -> None:
    both = Both(tokenizer, trl_template("gemma4"), bos_token="<b>")
    contents = ([{**PARTS[0], "type": kind}] for kind in ("text", "input_text", "output_text"))
    texts = {both.ours([{"role": "user", "content": content}]) for content in contents}
    assert texts == {both.native([{"role": "user", "content": PARTS[:1]}])}


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
            renderer.render([{"role": "user", "content": content}], None, generate=True)


# --- surrogates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "gemma4"])
def test_no_text_has_a_surrogate(tokenizer: Any, name: str) -> None:
    lone = "a\ud800b"
    tool = {**TOOL, "function": {**TOOL["function"], "description": lone}}  # type: ignore[dict-item]
    renderer = Renderer(tokenizer, chat_template=trl_template(name), kwargs={"bos_token": lone})
    for arguments in ({"at": lone}, {lone: 1}, json.dumps({"at": lone})):
        talk = [{"role": "user", "content": lone}, calling(arguments), result([part(lone)])]
        text = renderer.render(talk, [tool], generate=True)
        assert text.count("a\ufffdb") >= 3
        assert tokenizer(text)["input_ids"]
