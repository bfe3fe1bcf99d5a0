"""The quick sandbox: the same text, the same refusals, as the one that `transformers` renders in."""

from __future__ import annotations

import enum
import itertools
import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from markupsafe import Markup
from support.qwen import all_templates
from support.tiers import by_tier

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import sandbox
from toolroll.rollout.template.render import Renderer, arguments_as, compiled
from toolroll.rollout.template.sandbox import QuickSandbox, RememberedJson, quick
from toolroll.rollout.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look – 見る.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "a frog"},
    {"role": "assistant", "content": "A frog."},
    {"role": "user", "content": "Thanks."},
]


def plain() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = lambda value, **settings: json.dumps(value, ensure_ascii=False, **settings)
    return made


def both(source: str, **given: Any) -> tuple[Any, Any]:
    """What it renders to, or the error, in Jinja's sandbox and in ours."""
    template = plain().from_string(source)
    other = quick(template, source)
    assert other is not None
    assert type(other.environment) is QuickSandbox
    found: list[Any] = []
    for one in (template, other):
        try:
            found.append(one.render(**given))
        except Exception as error:
            found.append((type(error), str(error)))
    return found[0], found[1]


class Text(str):
    """A string of another type."""

    secret = "s"


class Record(dict):  # type: ignore[type-arg]
    """A dict with attributes."""

    role = "attribute"


OBJECTS = {
    "a dict": {"role": "user", "items": 1, "get": 2, "_x": 3, "__class__": 4, "content": None, 1: "number"},
    "an empty dict": {},
    "a string": "a {0} b",
    "markup": Markup("<b>{0}</b>"),
    "another string": Text("x"),
    "another dict": Record(role="key", other=1),
    "a list": [1, 2],
    "a number": 7,
    "nothing": None,
    "a namespace": Namespace(a=1, text="x {0}", _hidden=2, method="x".format),
    "a method": "x".upper,
    "a type": dict,
}
ODD_NAMES = {"role", "content", "_x", "_hidden", "secret", "other", "a", "text", "method", "gone", "mro", "index0"}
NAMES = sorted({*dir(dict), *dir(str), *dir(list), *ODD_NAMES})


@pytest.mark.parametrize("what", OBJECTS)
def test_every_attribute_is_the_sandboxs_own(what: str) -> None:
    ours = quick(plain().from_string(""), "")
    assert ours is not None
    obj = OBJECTS[what]
    for name in NAMES:
        theirs, own = plain().getattr(obj, name), ours.environment.getattr(obj, name)
        assert type(own) is type(theirs), name
        if isinstance(theirs, jinja2.Undefined):
            assert (own._undefined_message, own._undefined_exception) == (theirs._undefined_message, theirs._undefined_exception)
        elif hasattr(theirs, "__wrapped__"):  # a wrapped `format`
            assert own.__wrapped__ == theirs.__wrapped__
        else:
            assert own == theirs, name


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ m.__class__ }}",
        "{{ m.update({'a': 1}) }}",
        "{{ m.pop('role') }}{{ m.clear() }}",
        "{{ l.append(1) }}",
        "{{ '{0.__class__}'.format(m) }}",
        "{{ ('{0.__class__}'.format)(m) }}",
        "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(m) }}",
        "{% set ns = namespace(f=m) %}{{ ns.f.clear() }}",
        "{% for f in ['{0.__class__}'.format, 1] %}{{ (loop.previtem or loop.nextitem) }}{{ loop.__init__ }}{% endfor %}",
        "{% for f in [1, 2] %}{{ loop._length }}{{ loop.index }}{{ loop.changed(f) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{{ m.gone.further }}",
        "{{ 'x'.encode }}",
        "{{ 'abc'.startswith('a', 1) }}{{ 'a,b'.split(',', maxsplit=1) }}{{ ' x '.strip().upper() }}",
        "{{ 'abc'.startswith() }}",
        "{{ 'x'.join(range(3)) }}",
        "{% macro f(x) %}{{ caller() }}{{ x.role }}{% endmacro %}{% call f(m) %}{{ 'A'.lower() }}{% endcall %}",
        "{% for a in l recursive %}{{ loop.depth }}{{ a.x is defined }}{{ loop.last }}{% endfor %}",
        "{{ m['__class__'] }}{{ m['items'] }}{{ m.items() | list }}",
        "{{ range(1000000) }}",
        "{{ m | tojson }}{{ l | tojson(indent=2) }}{{ 'é' | tojson }}",
    ],
)
def test_what_is_refused_and_what_is_given_are_the_same(source: str) -> None:
    theirs, ours = both(source, m={"role": "user", "n": {"x": 1}}, l=[{"x": 1}, {"x": None}, {}])
    assert ours == theirs


def test_the_sandbox_is_one() -> None:
    refused = [
        both(source, m={})[1] for source in ("{{ ''.__class__.mro() }}", "{{ m.update(a=1) }}", "{{ '{0.__class__.x}'.format(m) }}")
    ]
    assert {found[0] for found in refused} == {SecurityError}


# --- JSON that was written before --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """No JSON."""

    RED = "red"


def dumped(value: Any, **settings: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **settings)


def test_values_that_are_equal_and_written_otherwise_are_kept_apart() -> None:
    write = RememberedJson(dumped)
    values: list[Any] = [1, 1.0, True, None, float("nan"), float("inf"), "1", -0.0, 0.0, (1,), [1], 10**30]
    for _ in range(2):
        for value in values:
            assert write({"a": [value]}) == dumped({"a": [value]})
    assert write({"a": 1, "b": 2}) != write({"b": 2, "a": 1})
    assert write({"a": 1}, indent=2) == dumped({"a": 1}, indent=2)
    with pytest.raises(TypeError):
        write({"a": 1}, indent=2.0)
    assert write({1: "a"}) == write({"1": "a"}) == '{"1": "a"}'


def test_a_value_that_was_changed_is_written_anew() -> None:
    write, tool = RememberedJson(dumped), {"name": "a", "parameters": {"x": 1}}
    before = write(tool)
    tool["parameters"]["x"] = 2  # type: ignore[index]
    assert write(tool) != before
    assert write(tool) == dumped(tool)


@pytest.mark.parametrize("odd", [Colour.RED, uuid.UUID(int=1), object(), {1, 2}])
def test_what_is_no_json_is_refused_however_often(odd: Any) -> None:
    write = RememberedJson(dumped)
    write({"a": "red"})
    for _ in range(2):
        with pytest.raises(TypeError):
            write({"a": odd})


def test_a_string_of_another_type_is_written_as_ever() -> None:
    assert RememberedJson(dumped)({"a": Text("x")}) == '{"a": "x"}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_any_value_is_written_alike(value: Any) -> None:
    write = RememberedJson(dumped)
    assert write(value) == write(value) == dumped(value)


def test_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_REMEMBERED", 50_000)
    monkeypatch.setattr(sandbox, "_LONGEST", 1000)
    write, most = RememberedJson(dumped), 0
    for at in range(1000):
        write([at])
        most = max(most, len(write._known))
    assert 50 < most < 50_000 / 200
    before = len(write._known)
    assert write(["x" * 2000]) == dumped(["x" * 2000])
    assert len(write._known) == before, "what is long is not kept"


# --- the renderer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_tier(all_templates()))
def test_every_template_is_rendered_quickly_and_alike(tokenizer: Any, name: str) -> None:
    source = all_templates()[name]
    renderer = Renderer(tokenizer, chat_template=source, kwargs={"bos_token": "<b>"})  # Llama 3's asks for one
    assert compiled(source) is not None
    texts: list[tuple[str, str]] = []
    for begin, end in itertools.combinations(range(len(TALK) + 1), 2):
        for generate in (True, False):
            talk = TALK[begin:end]
            try:
                text = renderer.render(talk, TOOLS, generate=generate)
            except TemplateError:
                with pytest.raises((jinja2.TemplateError, TypeError, ValueError, AttributeError)):
                    by_transformers(tokenizer, renderer, talk, generate=generate)
                continue
            texts.append((text, by_transformers(tokenizer, renderer, talk, generate=generate)))
    assert [text for text, _ in texts] == [expected for _, expected in texts]
    assert renderer._quick_renders >= len(texts)
    assert renderer._may_be_quick
    assert len(texts) >= 6 or "llava" in name, "llava's take no plain strings"


def by_transformers(tokenizer: Any, renderer: Renderer, talk: Sequence[Any], *, generate: bool) -> str:
    """The same talk, rendered by `transformers`."""
    return str(
        tokenizer.apply_chat_template(
            arguments_as(talk, renderer.argument_form or "dict"),
            tools=TOOLS,
            chat_template=renderer.chat_template,
            tokenize=False,
            add_generation_prompt=generate,
            strftime_now=renderer.now.strftime,
            **renderer.kwargs,
        )
    )


def test_a_quick_render_that_differs_is_found_and_the_last(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    renderer = Renderer(tokenizer)
    truth = renderer.render(TALK, TOOLS, generate=True)
    renderer._compiled[renderer.source] = jinja2.Template("wrong")
    with caplog.at_level(logging.WARNING):
        found = [renderer.render(TALK, TOOLS, generate=True) for _ in range(5)]
    assert found == [truth] * 5, "the second render is checked"
    assert "the chat template renders otherwise in the quick sandbox" in caplog.text
    assert caplog.text.count("quick sandbox") == 1


def test_a_tokenizer_with_a_way_of_its_own_is_asked() -> None:
    mine = load_embedded_tokenizer()

    class Own(type(mine)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return "mine: " + super().apply_chat_template(*args, **kwargs)

    mine.__class__ = Own
    assert Renderer(mine).render(TALK, TOOLS, generate=True).startswith("mine: ")
    given = load_embedded_tokenizer()
    theirs = given.apply_chat_template
    given.apply_chat_template = lambda *args, **kwargs: "given: " + theirs(*args, **kwargs)
    renderer = Renderer(given)
    assert renderer.render(TALK, TOOLS, generate=True).startswith("given: ")
    assert renderer._quick_renders == 0


def test_switches_that_are_arguments_of_transformers_are_left_to_it(tokenizer: Any) -> None:
    source = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    renderer = Renderer(tokenizer, chat_template=source, kwargs={"documents": [{"title": "t", "text": "doc "}]})
    assert renderer.render(TALK, None, generate=True) == "doc Be brief."
    assert renderer._quick_renders == 0


def test_a_refusal_is_told_in_the_templates_words(tokenizer: Any) -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}{{ messages[0].content }}"
    renderer = Renderer(tokenizer, chat_template=source)
    assert renderer.render(TALK[:1], None, generate=True) == "Be brief."
    with pytest.raises(TemplateError, match="only one"):
        renderer.render(TALK, None, generate=True)
