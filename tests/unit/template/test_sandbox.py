"""The caching sandbox: the same values, refusals and errors as Jinja's own."""

import itertools
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup
from transformers.utils import chat_template_utils

from toolroll.rollout.template.sandbox import CachingSandbox, compile_template

pytestmark = pytest.mark.tokens

NOW = datetime(2026, 3, 4, 5, 6, 7)
ODD = {"role", "content", "_x", "_hidden", "secret", "other", "a", "text", "method", "gone", "mro"}
KINDS = (dict, str, list, int, set, LoopContext, Namespace, Macro)
FOR_I, END = "{% for i in range(99999) %}", "{% endfor %}"
UPPER = "{% for a in x | map('upper') %}"


def shared(source: str) -> jinja2.Template:
    """The template that `transformers` itself renders with."""
    template: jinja2.Template = chat_template_utils._compile_jinja_template(source)
    return template


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or its error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def both(source: str, **given: Any) -> tuple[Any, Any]:
    """What it renders to, or the error, in transformers' environment and in ours."""
    theirs, ours = shared(source), compile_template(source, NOW)
    return outcome(lambda: theirs.render(**given)), outcome(lambda: ours.render(**given))


class Text(str):
    """A string of another type."""

    secret = "s"


class Record(dict):  # type: ignore[type-arg]
    """A dict with attributes."""

    role = "attribute"


class Room(Namespace):
    """A namespace of another type, as newer versions of transformers have one."""


OBJECTS = {
    "a dict": {"role": "user", "items": 1, "get": 2, "_x": 3, "__class__": 4, "content": None},
    "an empty dict": {},
    "a string": "a {0} b",
    "markup": Markup("<b>{0}</b>"),
    "another string": Text("x"),
    "another dict": Record(role="key", other=1),
    "a list": [1, 2],
    "a tuple": (1, 2),
    "a number": 7,
    "a float": 7.5,
    "a boolean": True,
    "nothing": None,
    "a set": {1},
    "a loop": LoopContext([1, 2], Undefined),
    "a namespace": Namespace(a=1, text="x {0}", _hidden=2, method="x".format, clear=3),
    "another namespace": Room(a=1, text="x {0}", _hidden=2, method="x".format, clear=3),
    "a method": "x".upper,
    "a function": both,
    "a type": dict,
    "a generator": (x for x in ()),  # type: ignore[var-annotated]
    "undefined": Undefined(name="x"),
}
NAMES = sorted({*ODD, *(name for kind in KINDS for name in dir(kind)), "gi_frame", "__globals__"})


def test_the_environment_is_transformers_own_but_for_its_clock() -> None:
    theirs, ours = shared("{{ 1 }}").environment, compile_template("{{ 1 }}", NOW).environment
    assert (type(theirs), type(ours)) == (ImmutableSandboxedEnvironment, CachingSandbox)
    added = {name: ours.filters[name] for name in ("toolroll_counted", "tojson")}
    assert ours.filters == {**theirs.filters, **added}
    assert added["tojson"].args == (theirs.filters["tojson"],)
    assert ours.tests == theirs.tests
    clock = {"strftime_now": None}
    assert {**ours.globals, **clock} == {**theirs.globals, **clock}
    assert list(ours.extensions) == list(theirs.extensions)
    assert ours.globals["strftime_now"]("%Y-%m-%d") == "2026-03-04"  # type: ignore[operator]
    assert theirs.globals["strftime_now"].__module__ == chat_template_utils.__name__


@pytest.mark.parametrize("what", OBJECTS)
def test_every_attribute_is_as_safe_and_the_one_that_jinja_gives(what: str) -> None:
    theirs, ours = shared("").environment, compile_template("", NOW).environment
    assert isinstance(theirs, ImmutableSandboxedEnvironment)
    assert isinstance(ours, CachingSandbox)
    obj = OBJECTS[what]
    for name in NAMES:
        safe = theirs.is_safe_attribute(obj, name, None)
        assert ours.is_safe_attribute(obj, name, None) is safe, name
    for name, read in itertools.product(NAMES, ("getattr", "getitem")):
        expected, own = (
            outcome(partial(getattr(environment, read), obj, name))
            for environment in (theirs, ours)
        )
        assert type(own) is type(expected), name
        if isinstance(expected, jinja2.Undefined):
            for field in ("_undefined_message", "_undefined_exception", "_undefined_name"):
                assert getattr(own, field) == getattr(expected, field), (name, field)
        elif hasattr(expected, "__wrapped__"):  # a wrapped `format`
            assert own.__wrapped__ == expected.__wrapped__
        else:
            assert own == expected, name


SOURCES = [
    "{{ m.update({'a': 1}) }}",
    "{{ l.append(1) }}",
    "{{ '{0.__class__}'.format(m) }}",
    "{{ '{0.role} {0.gone}'.format(m) }}",
    "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(m) }}",
    "{% set ns = namespace(f=m) %}{% set ns.g = 2 %}{{ ns.g }}{{ ns.h }}{{ ns._f }}{{ ns.__init__ "
    "}}",
    "{% for f in ['{0.__class__}'.format, 1] %}{{ loop.previtem or loop.nextitem }}{% endfor %}",
    "{% for f in [1, 2] %}{{ loop._length }}{{ loop.index }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{{ 'abc'.startswith('a', 1) }}{{ 'a,b'.split(',', maxsplit=1) }}{{ ' x '.strip().upper() }}",
    "{{ 'abc'.startswith() }}",
    "{% macro f(x) %}{{ caller() }}{{ x.role }}{% endmacro %}{% call f(m) %}{{ 'A'.lower() }}{% "
    "endcall %}",
    "{% for a in l recursive %}{{ loop.depth }}{{ a.x is defined }}{{ loop.last }}{% endfor %}",
    "{{ m | tojson }}{{ l | tojson(indent=2) }}{{ 'é<' | tojson }}",
    "{% generation %}{{ m.role }}{% endgeneration %}{% for a in l %}{% break %}{% endfor %}",
    "{{ raise_exception('no') }}",
    # loops are counted
    "{% for a in x | map('upper') %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}{{ a }}{% "
    "endfor %}",
    "{% for k, v in d.items() %}{{ loop.length }}{{ k }}={{ v }}{% else %}none{% endfor %}",
    "{% for a in nothing %}{{ a }}{% else %}none{% endfor %}",
    "{% for a in 5 %}{% endfor %}",
    "{% for a in x if a != 'b' %}{{ loop.index }}{{ a }}{{ loop.previtem }}{{ loop.nextitem }}{% "
    "endfor %}",
    "{% for a in tree recursive %}{{ a.n }}{{ loop(a.c) if a.c }}{{ loop.depth }}{% endfor %}",
    "{% for a in x %}{% if loop.first %}{% continue %}{% endif %}{{ a }}{% break %}{% endfor %}",
    "{% for a in range(3) %}{% for b in range(a) %}{{ loop.index }}{{ a }}{% endfor %}{% endfor %}",
]
REFUSED = ["{{ ''.__class__.mro() }}", "{{ m.update(a=1) }}", "{{ '{0.__class__.x}'.format(m) }}"]


@pytest.mark.parametrize("source", [*SOURCES, *REFUSED])
def test_what_is_refused_and_what_is_given_are_the_same(source: str) -> None:
    given = {"x": "abc", "d": {"k": 1, "l": 2}, "tree": [{"n": 1, "c": [{"n": 2, "c": []}]}]}
    given |= {"m": {"role": "user", "n": {"x": 1}}, "l": [{"x": 1}, {"x": None}, {}]}
    expected, own = both(source, **given)
    assert own == expected
    assert source not in REFUSED or own[0] is SecurityError


ENDLESS = {
    "loops in loops": FOR_I + FOR_I + END + END,
    "a loop over a text": "{% for a in x %}" * 3 + END * 3,
    "a filter's items": UPPER + UPPER + END + END,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.template.sandbox.MOST_STEPS", 50_000)
    template = compile_template(ENDLESS[name], NOW)
    with pytest.raises(jinja2.TemplateRuntimeError, match="more than 50,000 steps for one render"):
        template.render(x="a" * 1000)
    assert compile_template("{% for a in x %}{{ a }}{% endfor %}", NOW).render(x="ok") == "ok"


def test_each_render_is_counted_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.template.sandbox.MOST_STEPS", 100)
    template = compile_template("{% for a in x %}{{ a.upper() }}{{ loop.last }}{% endfor %}", NOW)
    assert {template.render(x="a" * 20) for _ in range(20)} == {template.render(x="a" * 20)}
