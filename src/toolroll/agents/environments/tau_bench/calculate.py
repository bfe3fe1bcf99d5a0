"""tau-bench's tool `calculate` with limits. As in the original, Python's `eval` computes the value,
but powers and products cannot become too large.

Invariants: no expression takes more than milliseconds. (`9**9**9` would hold the GIL for minutes
and so block every other episode, and no time limit could end it.) If the original returns text,
this tool returns text too, even for an error. Only digits, operators, brackets and decimal points
are evaluated.
"""

from __future__ import annotations

import ast
import math
from typing import Any

_ALLOWED = frozenset("0123456789+-*/(). ")
_MAX_LENGTH = 2_000
_MAX_BITS = 1 << 16
"""The maximum size of an intermediate integer. An integer of more than 1,024 bits cannot be
converted to a float, so larger integers matter only as operands of a division.
"""

_TOO_LARGE = "int too large to convert to float"


class Calculate:
    """Replaces tau-bench's class. The names are the same, because Python's error message for wrong
    arguments contains them (`Calculate.invoke() got ...`).
    """

    @staticmethod
    def invoke(data: Any, expression: Any) -> str:
        """Return the value with two decimal places, or "Error: ..." in the original's words."""
        if not all(char in _ALLOWED for char in expression):
            return "Error: invalid characters in expression"
        if not isinstance(expression, str):
            return "Error: eval() arg 1 must be a string, bytes or code object"
        try:
            return str(round(float(_evaluate(expression)), 2))
        except (
            ArithmeticError,
            ValueError,
            TypeError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:
            return f"Error: {error}"


def _evaluate(expression: str) -> Any:
    """Return the value of `expression`. Raise the error that Python's `eval` raises, or
    `OverflowError` if a limit is exceeded.
    """
    if len(expression) > _MAX_LENGTH:
        raise OverflowError(f"the expression is longer than {_MAX_LENGTH} characters")
    tree = _Bounded().visit(ast.parse(expression.lstrip(" \t"), "<string>", "eval"))
    code = compile(ast.fix_missing_locations(tree), "<string>", "eval")
    return eval(
        code,
        {"__builtins__": {}, "power": _power, "product": _product, "same": lambda value: value},
    )


class _Bounded(ast.NodeTransformer):
    """Replaces powers and products with calls to the bounded functions."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = {ast.Pow: "power", ast.Mult: "product"}.get(type(node.op))
        return _called(name, node.left, node.right) if name else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.func = _called("same", node.func)  # the compiler warns if a number is called: `2(3)`
        return node


def _called(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent > 0 and exponent * math.log2(abs(base)) > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    value = left * right
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return value
