"""BFCL v4 multi-turn as environments: `bfcl/multi_turn_base`, `_miss_func`, `_miss_param`,
`_long_context`.

The data, the tool classes and the scoring rule are the benchmark's. The code of the loop and of the
scoring is toolroll's, because the official executor evaluates model text as Python and keeps its
state in module globals. A reply without calls ends the user's turn. Then the state of the episode
is compared with a second state, to which the calls of the ground truth were applied.

Invariants: an episode is deterministic and has its own pair of states. A wrong call results in an
observation.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from toolroll.agents.environments.factory import Factory, tool_error_metrics
from toolroll.environments.bfcl.data import INSTALL, BfclData, installed
from toolroll.environments.bfcl.instances import BfclInstances
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
)
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.types import Message, Tool

MAX_STEPS_PER_TURN = 20
"""BFCL fails an entry if a turn takes more steps than this."""

MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""The user's line when functions that were withheld become available. The text is BFCL's."""

SPLIT = "test"


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the positional arguments and the named arguments of a ground-truth call,
    which BFCL writes as Python text. Raise `ValueError` if the arguments are not literals.
    """
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError(f"not a plain call: {text!r}")
    values = [ast.literal_eval(value) for value in tree.args]
    named = {str(item.arg): ast.literal_eval(item.value) for item in tree.keywords}
    return tree.func.id, values, named


class BfclEnvironment(Environment):
    """One entry of a category."""

    blocking = False  # 0.2-0.7 ms for a whole episode

    def __init__(self, data: BfclData) -> None:
        self._data = data
        self._entry: Mapping[str, Any] | None = None
        self._turn = 0
        self._turn_steps = 0
        self._turn_calls = 0
        self._results: list[str] = []
        self._calls = 0
        self._errors: Counter[str] = Counter()

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the first user message and the tools of its turn. `seed` has no effect."""
        entry = self._entry = self._data.entries[task.index]
        self._results = []
        self._turn = self._turn_steps = self._turn_calls = 0
        self._calls, self._errors = 0, Counter()
        self._state, self._truth = self._instances(entry), self._instances(entry)
        self._truths = self._data.ground_truths[entry["id"]]
        return Observation(
            [dict(message) for message in entry["question"][0]],
            self._tools(),
            {"entry": entry["id"]},
        )

    def step(self, action: Action) -> StepResult:
        """Execute all calls in order. If there are no calls, end the turn."""
        if self._entry is None:
            raise EnvironmentFailure("step was called before reset or after the episode ended")
        if not action.tool_calls:
            return self._end_turn()
        self._turn_steps += 1
        if self._turn_steps > MAX_STEPS_PER_TURN:
            return self._end(0.0, f"turn {self._turn} took more than {MAX_STEPS_PER_TURN} steps")
        return StepResult([self._execute(call) for call in action.tool_calls])

    def metrics(self) -> Mapping[str, float]:
        """Return the number of calls, the number of failed calls (in total and by tool) and the
        number of user turns.
        """
        counts = {"calls": float(self._calls), "user_turns": float(self._turn + 1)}
        return counts | tool_error_metrics(self._errors)

    def _execute(self, call: ToolCall) -> Message:
        # As in BFCL, a function that is still withheld can be called. One ground truth does so.
        result = self._state.call(call.name, call.arguments or {})
        self._calls += 1
        self._turn_calls += 1
        if result.startswith(("Error during execution", '{"error"')):
            self._errors[call.name] += 1
        self._results.append(result)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}

    def _end_turn(self) -> StepResult:
        """Judge the turn. Then return the next user message, or end the episode."""
        assert self._entry is not None
        failure = self._judge(self._truths[self._turn])
        if failure is not None:
            return self._end(0.0, failure)
        self._turn += 1
        self._turn_steps = self._turn_calls = 0
        if self._turn == len(self._entry["question"]):
            self._turn -= 1
            return self._end(1.0, None)
        messages = [dict(message) for message in self._entry["question"][self._turn]]
        if not messages:  # withheld functions become available: BFCL has no line for this turn
            return StepResult([{"role": "user", "content": MORE_FUNCTIONS}], tools=self._tools())
        return StepResult(messages)

    def _judge(self, truth: Sequence[str]) -> str | None:
        """Return why the turn fails by BFCL's rule. Return None if it passes.

        A turn with an empty ground truth is not judged.
        """
        expected = []
        for text in truth:
            name, values, named = parse_call(text)
            expected.append(self._truth.call(name, named, values))
        if not truth:
            return None
        if not self._turn_calls:
            return f"turn {self._turn}: no call was made"
        different = self._state.differences(self._truth)
        if different:
            return f"turn {self._turn}: the state differs in {', '.join(different)}"
        missing = Counter(expected) - Counter(self._results)
        if missing:
            return f"turn {self._turn}: no call had the expected results {list(missing)[:3]}"
        return None

    def _end(self, reward: float, failure: str | None) -> StepResult:
        self._entry = None
        return StepResult(reward=reward, done=True, info={"failure": failure} if failure else {})

    def _tools(self) -> list[Tool]:
        """Return the tools of the current turn. Functions that the entry withholds until a later
        turn are left out.
        """
        assert self._entry is not None
        withheld = {
            name
            for turn, names in (self._entry.get("missed_function") or {}).items()
            if int(turn) > self._turn
            for name in names
        }
        tools = (
            tool for name in self._entry["involved_classes"] for tool in self._data.documents[name]
        )
        return [tool for tool in tools if tool["function"]["name"] not in withheld]

    def _instances(self, entry: Mapping[str, Any]) -> BfclInstances:
        return BfclInstances(
            entry["involved_classes"],
            entry["initial_config"],
            self._data.documents,
            long_context="long_context" in self._data.category,
        )


class BfclFactory(Factory):
    """The factory of one category."""

    splits: tuple[str, ...] = (SPLIT,)
    packages = ("bfcl-eval",)

    def __init__(self, category: str, description: str) -> None:
        self.category = category
        self.name = f"bfcl/{category}"
        self.description = description

    @cached_property
    def _data(self) -> BfclData:
        return BfclData(self.category)

    def missing(self) -> str | None:
        """Return the command that installs the wheel without its dependencies (6.4 GB). Return None
        if the wheel is installed.
        """
        return None if installed() else INSTALL

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all 200 entries. Raise `UsageError` for an unknown split."""
        self.check_split(split)
        return [Task(entry["id"], index, split) for index, entry in enumerate(self._data.entries)]

    def make(self, options: EnvironmentOptions) -> BfclEnvironment:
        """Return a new environment. It needs no user simulator, because the task contains the
        user's lines.
        """
        self.check_settings(options.settings)
        return BfclEnvironment(self._data)

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the ground truth: one call per action, and a final text for each user turn."""
        actions: list[Action] = []
        for turn in self._data.ground_truths[task.id]:
            actions += [Action("", (self._reference_call(text),)) for text in turn]
            actions.append(
                Action("That is done." if turn else "I cannot do that with what I have.")
            )
        return actions

    def _reference_call(self, text: str) -> ToolCall:
        name, values, named = parse_call(text)
        return ToolCall(
            name, {**dict(zip(self._parameters[name], values, strict=False)), **named}, text
        )

    @cached_property
    def _parameters(self) -> Mapping[str, Sequence[str]]:
        """Maps each function to the names of its parameters, in order."""
        return {
            tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
            for tools in self._data.documents.values()
            for tool in tools
        }


MULTI_TURN_BASE = BfclFactory(
    "multi_turn_base", "BFCL v4 multi-turn: 200 tasks over 8 simulated APIs"
)
MULTI_TURN_MISS_FUNC = BfclFactory(
    "multi_turn_miss_func", "BFCL v4 multi-turn, with functions withheld until a later turn"
)
MULTI_TURN_MISS_PARAM = BfclFactory(
    "multi_turn_miss_param", "BFCL v4 multi-turn, with a parameter that the user gives later"
)
MULTI_TURN_LONG_CONTEXT = BfclFactory(
    "multi_turn_long_context", "BFCL v4 multi-turn, with long tool results"
)
