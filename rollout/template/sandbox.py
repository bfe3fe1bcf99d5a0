"""A chat template, compiled as `transformers` compiles it, with one clock and a quicker sandbox.

Everything in the environment (options, extensions, filters, globals) is what `transformers` puts
there. Two things differ: `strftime_now` reads a given time, and Jinja's sandbox does not repeat its
safety checks for the built-in types that a template reads all the time.

Invariant: `CachingSandbox` returns, refuses and raises exactly what `ImmutableSandboxedEnvironment`
does. For an object of a built-in type both depend on nothing but its type and the attribute's name,
so Jinja's own answers are computed once, at import (`tests/unit/template/test_sandbox.py`).
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_SAMPLES: tuple[Any, ...] = ("", {}, [], (), 0, 0.0, True, None, LoopContext((), Undefined))
"""One object of each type whose attributes are fixed and whose checks are cached."""

_CHECKER = ImmutableSandboxedEnvironment()
_SAFE = frozenset(
    (type(sample), name)
    for sample in _SAMPLES
    for name in dir(sample)
    if _CHECKER.is_safe_attribute(sample, name, None)  # which does not look at the value
)
_DICT_ATTRIBUTES = frozenset(dir(dict))


class CachingSandbox(ImmutableSandboxedEnvironment):
    """`ImmutableSandboxedEnvironment` with its answers for built-in types computed in advance."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`; a key of a dict without asking the dict for an attribute first.

        A plain dict has no attributes but those of its type: Jinja would look for one in vain.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether the template may read `attr` of `obj`."""
        kind = type(obj)
        if (kind, attr) in _SAFE:
            return True
        if kind is Namespace or kind.__bases__ == (Namespace,):  # only the name counts
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


@lru_cache(64)
def compile_template(source: str, now: datetime) -> jinja2.Template:
    """Return `source`, compiled for `transformers`' renderer, with `now` as the time it sees.

    `transformers` shares the environment that it compiled the template in with every other user of
    the process, so this works on an overlay of it.
    """
    from transformers.utils import chat_template_utils

    shared = chat_template_utils._compile_jinja_template(source).environment
    environment = shared.overlay()
    environment.globals = {**shared.globals, "strftime_now": now.strftime}
    if type(environment) is ImmutableSandboxedEnvironment:
        environment.__class__ = CachingSandbox
    template: jinja2.Template = environment.from_string(source)
    return template
