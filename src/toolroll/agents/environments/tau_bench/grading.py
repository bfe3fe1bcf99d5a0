"""`Bench`: the data that all episodes of one domain and split share (the domain, its database, and
the expected outcome of each task).

Invariants:

- Rewards and reward infos are the same as tau-bench's. The reference actions are replayed once per
  task, and their changes are cached.
- Task objects never change, because tools get copies of the arguments.
- After each tool call, the event loop can do other work before another call starts.
- The tool `calculate` computes its value with Python's `eval`, as in the original, but no
  expression takes more than milliseconds, because powers and products cannot become too large.
  (`9**9**9` would hold the GIL for minutes and so block every other episode, and no time limit
  could end it.) If the original returns text, this tool returns text too, even for an error. Only
  digits, operators, brackets and decimal points are evaluated.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from toolroll.agents.environments.tau_bench.database import Changes, Database
from toolroll.agents.environments.tau_bench.package import TauBenchDomain
from toolroll.agents.loop.adapt import RESPOND_ACTION_NAME
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.threads import Threads


@dataclass(frozen=True, slots=True)
class Expected:
    """The changes that a task's reference actions make, and tau-bench's hash of the resulting
    database.
    """

    changes: Changes
    hash: str


class Bench:
    """The tasks, tools and database of one split of a domain, shared by all its episodes."""

    def __init__(self, domain: TauBenchDomain, database: Database) -> None:
        self.domain = domain
        self.database = database
        self._expected: dict[int, Expected] = {}
        # One thread: hashing is CPU work, and the episodes of a task share the outcome.
        self._grader = Threads(1)
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )

    def task(self, index: int) -> Any:
        """Return tau-bench's task object. Raise `UsageError` for an index out of range."""
        tasks = self.domain.tasks
        if not 0 <= index < len(tasks):
            raise UsageError(
                f"tau-bench/{self.domain.name} ({self.domain.split}) has tasks 0 to "
                f"{len(tasks) - 1}, not {index}"
            )
        return tasks[index]

    def invoke(self, data: dict[str, Any], name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool as tau-bench does: an error that it raises becomes the observation."""
        if name not in self.domain.invoke:
            return f"Unknown action {name}"
        tool = Calculate.invoke if name == "calculate" else self.domain.invoke[name]
        try:
            return str(tool(data=data, **copy.deepcopy(dict(arguments))))
        except Exception as error:  # noqa: BLE001 - tau-bench's rule: the model sees it
            return f"Error: {error}"

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Let only one episode use the database in each iteration of the event loop.

        Looking up a user by name reads all records, which takes milliseconds. Without this, the
        look-ups of many episodes in a row would block the loop.
        """
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            yield
            await asyncio.sleep(0)

    async def expected(self, index: int) -> Expected:
        """Return the outcome of the task's reference actions. To earn the reward, an episode must
        end with this outcome.
        """
        if index not in self._expected:
            self._expected[index] = await self._grader.run_in_thread(
                self.compute_expected, index, what=f"the reference of {self.domain.name} {index}"
            )
        return self._expected[index]

    def compute_expected(self, index: int) -> Expected:
        """Replay the task's reference actions on a fresh database."""
        if index in self._expected:
            return self._expected[index]
        data = self.database.copy()
        skipped = {*self.domain.terminate_tools, RESPOND_ACTION_NAME}
        for action in self.task(index).actions:
            if action.name not in skipped:
                self.invoke(data, action.name, action.kwargs)
        changes = self.database.changes(data)
        return Expected(changes, self.database.hash(data))

    def grade(
        self, index: int, expected: Expected, data: Mapping[str, Any], texts: Sequence[str]
    ) -> dict[str, Any]:
        """Return tau-bench's `RewardResult` as plain data. `texts`: the agent's texts."""
        task = self.task(index)
        reward = float(self.database.changes(data) == expected.changes)
        info: dict[str, Any] = {"r_actions": reward, "gt_data_hash": expected.hash}
        if task.outputs:
            plain = [text.lower().replace(",", "") for text in texts]
            outputs = {
                output: any(output.lower() in text for text in plain) for output in task.outputs
            }
            info = {"r_outputs": float(all(outputs.values())), "outputs": outputs}
            reward *= info["r_outputs"]
        actions = [
            action.model_dump() for action in task.actions if action.name != RESPOND_ACTION_NAME
        ]
        return {"reward": reward, "info": info, "actions": actions}


# --- calculate ------------------------------------------------------------------------------------


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
    integers = isinstance(base, int) and isinstance(exponent, int)
    if integers and abs(base) > 1 and exponent > 0 and exponent * math.log2(abs(base)) > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    value = left * right
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError(_TOO_LARGE)
    return value
