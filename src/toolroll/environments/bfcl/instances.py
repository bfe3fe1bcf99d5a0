"""Instances of BFCL's own tool classes. Functions are called by name, never through `eval`.

Invariants:

- The instances belong to one episode, and only functions that the tool documents name can be
  called.
- No call raises an error, and the work of every call is limited. Without a limit, `MathAPI` would
  compute `power(9, 9**9)`, or three million digits of a root, for minutes while holding the GIL.
- `MathAPI` changes settings of the whole process (mpmath's precision, the decimal context). These
  are restored after each call, and only one of its calls runs at a time.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from toolroll.environments.bfcl.data import DOCUMENTS
from toolroll.rollout.types import Tool

_MODULES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_MAX_DIGITS = 1000
_MAX_BITS = 1 << 14

_math_lock = threading.Lock()  # mpmath's precision is one number for the whole process


class BfclInstances:
    """The instances of `classes`. They are set up from an entry's `initial_config`.

    `documents` maps a class to its tools.
    """

    def __init__(
        self,
        classes: Sequence[str],
        initial_config: Mapping[str, Any],
        documents: Mapping[str, Sequence[Tool]],
        *,
        long_context: bool,
    ) -> None:
        self.instances: dict[str, Any] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._math: set[str] = set()
        for name in classes:
            kind = getattr(importlib.import_module(f"{_MODULES}.{DOCUMENTS[name]}"), name)
            instance = kind()
            if name != "MathAPI":  # it has no state
                instance._load_scenario(
                    copy.deepcopy(initial_config.get(name, {})), long_context=long_context
                )
            self.instances[name] = instance
            for tool in documents[name]:
                function = tool["function"]["name"]
                self._functions[function] = getattr(instance, function)
                if name == "MathAPI":
                    self._math.add(function)

    def call(self, name: str, arguments: Mapping[str, Any], positional: Iterable[Any] = ()) -> str:
        """Call a function. Return its result or its error as the text that BFCL returns."""
        function = self._functions.get(name)
        if function is None:
            return f"Error during execution: name '{name}' is not defined"
        # A tool may store its arguments, but lists in the messages must not change with the state.
        values, named = copy.deepcopy(list(positional)), copy.deepcopy(dict(arguments))
        try:
            if name in self._math:
                return _call_math(name, function, values, named)
            return _as_text(function(*values, **named))
        except Exception as error:  # noqa: BLE001 - the benchmark's rule: an error is a result
            return f"Error during execution: {error}"

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the public attributes of every instance, which BFCL compares."""
        return {
            name: {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            for name, instance in self.instances.items()
        }

    def differences(self, other: BfclInstances) -> list[str]:
        """Return the attributes of `other` that differ from this object's, as `Class.attribute`."""
        own_state, other_state = self.state(), other.state()
        return [
            f"{name}.{key}"
            for name, attributes in other_state.items()
            for key, value in attributes.items()
            if own_state[name].get(key, _MISSING) != value
        ]


_MISSING = object()


def _as_text(result: Any) -> str:
    if isinstance(result, dict):
        with suppress(TypeError, ValueError):
            return json.dumps(result)
    return str(result)


def _call_math(
    name: str, function: Callable[..., Any], values: list[Any], named: dict[str, Any]
) -> str:
    import mpmath

    try:
        arguments = inspect.signature(function).bind(*values, **named).arguments
    except TypeError:
        arguments = {}  # the call then raises the function's own error
    problem = _too_large(name, arguments)
    if problem is not None:
        return f"Error during execution: {problem}"
    with _math_lock, decimal.localcontext():
        digits = mpmath.mp.dps
        try:
            return _as_text(function(*values, **named))
        finally:
            mpmath.mp.dps = digits


def _too_large(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why a call of `MathAPI` would take too long, or None if it would not. No task comes
    near these limits.
    """
    for value in _numbers(list(arguments.values())):
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            return f"a number has more than {_MAX_BITS} bits"
    precision = arguments.get("precision")  # of `logarithm` and `square_root`
    if isinstance(precision, int | float) and precision > _MAX_DIGITS:
        return f"the precision may be at most {_MAX_DIGITS} digits"
    if name == "power":
        base, exponent = arguments.get("base"), arguments.get("exponent")
        if (
            isinstance(base, int)
            and isinstance(exponent, int)  # a power of floats overflows at once
            and abs(base) > 1
            and exponent * math.log2(abs(base)) > _MAX_BITS
        ):
            return f"the result has more than {_MAX_BITS} bits"
    return None


def _numbers(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    else:
        yield value
