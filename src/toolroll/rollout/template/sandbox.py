"""Compile a chat template as `transformers` does, but with a fixed clock and a faster sandbox.

The environment (options, extensions, filters, globals) is the same as in `transformers`, with four
differences:

- `strftime_now` uses a given time.
- Jinja's sandbox does not repeat its safety checks for built-in types that templates use often.
- `tojson` does not write an object that never changes again (`snapshot.py`).
- One render runs at most `MOST_STEPS` steps of loops and calls.

Invariant: within this limit, `CachingSandbox` returns, refuses and raises exactly what
`ImmutableSandboxedEnvironment` does (`tests/unit/template/test_sandbox.py`). For an object of a
built-in type, Jinja's safety check depends only on the type and the attribute's name, so its
results are computed once, at import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from toolroll.rollout.template.snapshot import write_json

MOST_STEPS = 10_000_000
"""The maximum number of loop iterations and calls of macros, functions and methods in one render (a
few seconds of work).
"""
_COUNTED = "toolroll_counted"

_SAMPLES: tuple[Any, ...] = ("", {}, [], (), 0, 0.0, True, None, LoopContext((), Undefined))
"""One object of each type that has fixed attributes and cached checks."""

_CHECKER = ImmutableSandboxedEnvironment()
_SAFE = frozenset(
    (type(sample), name)
    for sample in _SAMPLES
    for name in dir(sample)
    if _CHECKER.is_safe_attribute(sample, name, None)  # the check ignores the value
)
_DICT_ATTRIBUTES = frozenset(dir(dict))
_WRAPPED = ("format", "format_map")
"""The methods of a string that the sandbox replaces."""
_COUNTERS = ("first", "index", "index0")
"""The attributes of a loop that never run code of the loop's items."""
_DIRECT = frozenset(
    (kind, name)
    for kind, name in _SAFE
    if (name in _COUNTERS if kind is LoopContext else name not in _WRAPPED)
)
"""The attributes that the sandbox returns unchanged, and that cannot raise an error."""


class CachingSandbox(ImmutableSandboxedEnvironment):
    """`ImmutableSandboxedEnvironment` with precomputed checks for built-in types, and with a limit
    on the work of one render.
    """

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `obj` for the template, and count the call as one step."""
        _count(context, 1)
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`, or the key `attribute` of a plain dict.

        A plain dict has only its type's attributes, so other names are looked up as keys directly.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (type(obj), attribute) in _DIRECT:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if the template may read `attr` of `obj`."""
        kind = type(obj)
        if (kind, attr) in _SAFE:
            return True
        if kind is Namespace or kind.__bases__ == (Namespace,):  # only the name counts
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


@jinja2.pass_context
def _counted(context: Context, iterable: Any) -> Any:
    """Return the items of a loop, and count its iterations. If the items have a length, they are
    counted all at once, else one by one.
    """
    if isinstance(iterable, Undefined):
        return iterable
    try:
        _count(context, len(iterable))
    except TypeError:
        return _counting(context, iterable) if isinstance(iterable, Iterator) else iterable
    return iterable


def _counting(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _count(context, 1)
        yield item


def _count(context: Context, steps: int) -> None:
    total = getattr(context, _COUNTED, 0) + steps
    setattr(context, _COUNTED, total)
    if total > MOST_STEPS:
        raise jinja2.TemplateRuntimeError(
            f"the template takes more than {MOST_STEPS:,} steps for one render, so it may loop "
            "forever"
        )


@lru_cache(64)
def compile_template(source: str, now: datetime) -> jinja2.Template:
    """Compile `source` for `transformers`' renderer, with `now` as its time.

    `transformers` shares its environment with the whole process, so this function uses an overlay
    of that environment.
    """
    from transformers.utils import chat_template_utils

    shared = chat_template_utils._compile_jinja_template(source).environment
    environment = shared.overlay()
    environment.globals = {**shared.globals, "strftime_now": now.strftime}
    if type(environment) is ImmutableSandboxedEnvironment:
        environment.__class__ = CachingSandbox
        environment.filters = {
            **shared.filters,
            _COUNTED: _counted,
            "tojson": partial(write_json, shared.filters["tojson"]),
        }
    template: jinja2.Template = environment.from_string(source)
    return template
