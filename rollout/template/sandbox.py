"""A chat template, compiled as `transformers` compiles it, in a sandbox that decides the common questions at once.

Jinja's sandbox asks for each attribute whether a template may have it: half of the time of a render. For what chat templates
read all the time (the fields of a message, the methods of a string, the state of a loop, a namespace) the answer follows from the
type and the name, and is the sandbox's own; everything else it is asked as before.

Invariants: nothing is allowed that `ImmutableSandboxedEnvironment` refuses, and no value differs; everything else about the
environment is as `transformers` made it (`tests/unit/template/test_sandbox.py`).
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_NAMES = frozenset(dir(dict))
_STRING_METHODS = frozenset(
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace istitle isupper join lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper "
    "zfill".split()
)
"""All but `format` and `format_map`, which the sandbox wraps, `encode` and what no template needs."""
_LOOP_STATE = frozenset("index index0 first last length depth depth0 revindex revindex0 previtem nextitem".split())
_PLAIN = (str, dict, bool, int, list, type(None))
"""What a loop or a namespace may hold that is no method: the sandbox wraps the `format` of a string wherever it comes from."""
_MISSING = object()
_REMEMBERED = 8 << 20
"""Bytes of JSON that are kept for one template, keys and texts; then all is forgotten, and what is in use comes back."""
_LONGEST = 16 << 10  # bytes of a value: a longer one is a file that somebody writes, not a tool that everybody reads
_ENTRY = 200  # bytes of an entry beside its key and its text
_NO_REFERENCES = 2  # from version 3 on the bytes also tell which parts of a value are one object


class QuickSandbox(ImmutableSandboxedEnvironment):
    """The sandbox. Made from another environment by `quick`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:
                found = obj.get(attribute, _MISSING)
                return self.undefined(obj=obj, name=attribute) if found is _MISSING else found
        elif kind is str:
            if attribute in _STRING_METHODS:
                return getattr(obj, attribute)
        elif (kind is LoopContext and attribute in _LOOP_STATE) or (kind is Namespace and not attribute.startswith("_")):
            found = getattr(obj, attribute, _MISSING)
            if type(found) in _PLAIN:
                return found
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """`obj(...)`; a string's own method is neither marked unsafe nor asks for the context."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in _STRING_METHODS:
            kwargs.pop("_loop_vars", None)  # what compiled templates hand over for functions that ask for the context
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class RememberedJson:
    """The filter `tojson` for tools and arguments, which stand in every render of a conversation: what was written once is looked up.

    By their bytes as `marshal` gives them: equal bytes are equal values of equal types (1, 1.0 and True differ, and so do the orders
    of keys), and what it cannot take is not remembered.
    """

    def __init__(self, write: Callable[..., str]) -> None:
        self._write = write
        self._known: dict[tuple[bytes, str], str] = {}
        self._room = _REMEMBERED

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> str:
        """The value as JSON text."""
        if type(value) not in (dict, list):
            return self._write(value, *args, **kwargs)
        try:
            data = marshal.dumps(value, _NO_REFERENCES)
            key = (data, repr((args, kwargs)))
            found = self._known.get(key)
        except ValueError:  # a value of another type
            return self._write(value, *args, **kwargs)
        if found is None:
            found = self._write(value, *args, **kwargs)
            if len(data) <= _LONGEST:
                self._keep(key, found)
        return found

    def _keep(self, key: tuple[bytes, str], text: str) -> None:
        self._room -= len(key[0]) + sys.getsizeof(text) + _ENTRY
        if self._room < 0:
            self._known, self._room = {}, _REMEMBERED
        else:
            self._known[key] = text


def quick(template: jinja2.Template, source: str) -> jinja2.Template | None:
    """`source`, of which `template` is compiled, compiled in a `QuickSandbox` that is as `template`'s environment in everything else;
    None where that is no `ImmutableSandboxedEnvironment`."""
    given = template.environment
    if type(given) is not ImmutableSandboxedEnvironment:
        return None
    made = object.__new__(QuickSandbox)
    made.__dict__.update(given.__dict__)
    made.filters = {**given.filters, "tojson": RememberedJson(given.filters["tojson"])}
    return made.from_string(source)
