"""tau-bench's tool `calculate`, bounded: the same answers, without Python's `eval`.

Invariants: no expression takes more than milliseconds (`9**9**9` would hold the interpreter, and every other episode with it, for
minutes, and no time limit can end it); an expression that the original answers is answered with the same text.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ALLOWED = frozenset("0123456789+-*/(). ")
_MAX_LENGTH = 2_000
_MAX_BITS = 1 << 16
"""Of a whole number on the way to the result. One of more than 1,024 bits is no float, so only a quotient of two such could be an
answer."""

_TOO_LARGE = "int too large to convert to float"

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Calculate:
    """Stands in the place of tau-bench's class of this name; its name shows in the messages of wrong calls."""

    @staticmethod
    def invoke(data: Any, expression: Any) -> str:
        """The value, rounded to two digits, or "Error: ..." as the original says it."""
        if not all(char in _ALLOWED for char in expression):
            return "Error: invalid characters in expression"
        if not isinstance(expression, str):
            return "Error: eval() arg 1 must be a string, bytes or code object"
        try:
            return str(round(float(evaluate(expression)), 2))
        except (ArithmeticError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            return f"Error: {error}"


def evaluate(expression: str) -> Any:
    """The value of `expression`: numbers, + - * / // **, signs, brackets. Raises what Python would raise for it; `OverflowError`
    for numbers beyond the bound."""
    if len(expression) > _MAX_LENGTH:
        raise OverflowError(f"the expression is longer than {_MAX_LENGTH} characters")
    return _value(ast.parse(expression.lstrip(" \t"), "<string>", "eval").body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=function, args=given, keywords=named):
            raise _not_callable(_value(function), given, [word.value for word in named])
        case ast.Tuple(elts=[]):
            return ()
    raise SyntaxError("invalid syntax")


def _not_callable(function: Any, given: Sequence[ast.expr], mappings: Sequence[ast.expr]) -> TypeError:
    """What Python says of a call of a number, once it has looked at the arguments: `1(2)`, `1(*2)`, `1(**2)`."""
    for argument in given:
        if not isinstance(argument, ast.Starred):
            _value(argument)
        elif not isinstance(found := _value(argument.value), tuple):
            return TypeError(f"{function} argument after * must be an iterable, not {type(found).__name__}")
    for argument in mappings:
        return TypeError(f"{function} argument after ** must be a mapping, not {type(_value(argument)).__name__}")
    return TypeError(f"'{type(function).__name__}' object is not callable")


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent > 0 and exponent * math.log2(abs(base)) > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return base**exponent


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return value
