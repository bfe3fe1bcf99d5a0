"""`tool_environment`: create an environment from functions, data and a reward.

Invariants:

- The model gets an observation if it calls an unknown tool, if the arguments do not fit the tool's
  signature, or if the tool raises an `ActionError` or one of `told_errors`. Any other exception
  aborts the episode.
- Each episode has its own state object.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from toolroll.agents.environments.factory import Factory, openai_tool, tool_error_metrics
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
)
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError, message_of
from toolroll.rollout.runtime.jsonable import finite, plain, shown
from toolroll.rollout.runtime.signature import Signature
from toolroll.rollout.types import Message

TOLD_ERRORS: tuple[type[Exception], ...] = (ValueError, LookupError, ArithmeticError)
"""The default of `told_errors`: exceptions that a tool may raise because of its arguments."""
_STATE = ("self", "state")
"""If a tool's first parameter has one of these names, this parameter gets the episode's state."""
_REWARD = ("task", "final", "calls", "state")
_MADE_FROM = ("task", "seed")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Grader(Protocol):
    """A model that grades a record of messages, such as `toolroll.evaluation.judge.Judge`."""

    async def grade(
        self, record: Sequence[Message], task: Mapping[str, Any] | None, rule: float | None
    ) -> StepResult:
        """Return the last step of an episode, with its reward. `rule`: the reward by a rule."""
        ...

    def version(self, task: Mapping[str, Any]) -> str:
        """Return a text that is another one if `task` would be graded in another way."""
        ...


@dataclass(frozen=True, slots=True)
class PlayedCall:
    """One call in an episode. `result` is the tool's return value, or None if the call failed. If
    it failed, `error` is the error message that the model got.
    """

    name: str
    arguments: Mapping[str, Any]
    result: Any = None
    error: str | None = None


def tool_environment(
    *,
    tools: Sequence[Callable[..., Any]],
    tasks: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] | str | Path,
    reward: Callable[..., float | tuple[float, str]] | None = None,
    judge: Grader | None = None,
    system: str | None = None,
    state: Callable[..., Any] | None = None,
    told_errors: tuple[type[Exception], ...] = TOLD_ERRORS,
    name: str = "",
    description: str = "",
) -> ToolEnvironmentFactory:
    """Return an environment whose tools are functions. `toolroll run FILE.py:NAME` plays it.

    An episode gives the model the task's prompt and executes the calls of each reply. It ends with
    the first reply without a call, and is then graded.

    Args:
        tools: plain functions. The schema for the model is made from a function's name, its
            annotations, and its docstring (the text before the first section, and the `Args:`
            section). Tools run in threads. If a tool returns text, the model gets the text
            unchanged. Any other value becomes JSON.
        tasks: a list of dicts, the path of a JSONL file (relative to the file that calls this, else
            to the working directory), or a dict from split to list. Each task has `prompt` (the
            user's message) or `messages` (the start of a conversation), and further data for
            `reward`. `id` is optional; the default is the position. `reference` is optional: a list
            of replies that solve the task. Each reply is a call as `{"name": ..., "arguments":
            {...}}`, a list of such calls, or the final text.
        reward: a function with any of the parameters `task` (the dict), `final` (the text of the
            last reply), `calls` (a list of `PlayedCall`) and `state`. It returns a number, which is
            1.0 for success, or a pair of the number and its reason. A truncated episode gets 0.
        judge: a model that gives the reward (`Judge`). It reads the prompt, the calls with their
            results, and the final reply. With `reward` too, the summary says how often the two
            agree.
        system: the system message.
        state: a function that creates the state of one episode, with any of the parameters `task`
            and `seed`. A tool gets the state as its first argument if its first parameter is named
            `self` (a method of the state's class) or `state`. If the state has a method `close`
            that is not a tool, it is called at the end.
        told_errors: exception types. If a tool raises one of them, or an `ActionError`, the model
            gets the message as `Error: ...`. Any other exception is a bug in the environment: the
            episode is aborted without a reward.
        name: the name in results, by default `FILE:NAME`.
        description: the text for the list of environments.

    Raises:
        UsageError: for a tool without a schema, a task without a prompt, an unknown parameter of
            `reward` or `state`, or neither `reward` nor `judge`.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> env = tool_environment(
        ...     tools=[add],
        ...     tasks=[{"prompt": "What is 2 + 3?", "answer": "5"}],
        ...     reward=lambda task, final: float(task["answer"] in final),
        ... )
        >>> env.tasks("test")[0].data["answer"]
        '5'
    """
    if reward is None and judge is None:
        raise UsageError("there is no reward: give reward= a function, or judge= a Judge")
    function_tools = [_FunctionTool(tool) for tool in tools]
    _refuse_doubled(function_tools, "name", "two tools are named {!r}: give each tool its own name")
    for tool in function_tools:
        if state is None and tool.first:
            raise UsageError(
                f"the tool {tool.name} has the parameter {tool.first!r}: give state=, a function "
                "that creates the object for it"
            )
    if not isinstance(told_errors, Collection) or not all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in told_errors
    ):
        raise UsageError(f"told_errors must be a tuple of exception types, not {told_errors!r}")
    rules = _Rules(
        {tool.name: tool for tool in function_tools},
        _Named("reward", reward, _REWARD) if reward is not None else None,
        judge,
        _Named("state", state, _MADE_FROM) if state is not None else None,
        system,
        (ActionError, *told_errors),
    )
    if isinstance(tasks, str | Path):
        caller = sys._getframe(1).f_globals.get("__file__") or ""  # none in a notebook
        tasks = _read_lines(Path(tasks), Path(caller).parent.absolute())
    return ToolEnvironmentFactory(rules, _read_tasks(tasks), name, description)


class _FunctionTool:
    """A function, and its schema for the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.isroutine(function) or function.__name__ == "<lambda>":
            raise UsageError(f"a tool must be a function with a name, not {function!r}")
        if inspect.iscoroutinefunction(function):
            raise UsageError(
                f"the tool {function.__name__} is async: write it as a plain function (it runs in "
                f"a thread), or derive a class from Environment"
            )
        self.function = function
        self.name = function.__name__
        names = list(inspect.signature(function).parameters)
        self.first = names[0] if names and names[0] in _STATE else ""
        self.signature = Signature(function, skip=(self.first,) if self.first else ())
        self.schema = openai_tool(self.name, self.signature.summary, self.signature.schema())


class _Named:
    """A function passed as `reward` or `state`. A call passes only the arguments in its signature.

    Raise `UsageError` if it is not a plain function, or has a parameter that is not in `names`.
    """

    def __init__(self, what: str, function: Callable[..., Any], names: Sequence[str]) -> None:
        if not callable(function):
            raise UsageError(f"{what} must be a function, not {function!r}")
        if inspect.iscoroutinefunction(function):
            raise UsageError(f"{what} is async: write it as a plain function (it runs in a thread)")
        self._what = what
        self._function = function
        code = getattr(function, "__code__", None)
        self.name = what if code is None else f"{what} in {Path(code.co_filename).name}"
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a built-in type such as dict: it is called without arguments
            parameters = []
        self._names = [parameter.name for parameter in parameters if parameter.name in names]
        for parameter in parameters:
            optional = parameter.default is not parameter.empty or parameter.kind in _VARIABLE
            if parameter.name not in names and not optional:
                raise UsageError(
                    f"{what} has the unknown parameter {parameter.name!r}; it may have "
                    f"{', '.join(names)}"
                )

    def __call__(self, **arguments: Any) -> Any:
        try:
            return self._function(**{name: arguments[name] for name in self._names})
        except Exception as error:
            raise EnvironmentFailure(f"{self._what} failed: {_described(error)}") from error


@dataclass(frozen=True, slots=True)
class _Rules:
    """The arguments of `tool_environment` that all its episodes share."""

    tools: Mapping[str, _FunctionTool]
    reward: _Named | None
    judge: Grader | None
    state: _Named | None
    system: str | None
    told_errors: tuple[type[Exception], ...]


class ToolEnvironment(Environment):
    """One episode of a `tool_environment`."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        self._task: Mapping[str, Any] = {}
        self._state: Any = None
        self._calls: list[PlayedCall] = []
        self._prompt: list[Message] = []

    def reset(self, task: Task, seed: int) -> Observation:
        """Create the state and return the prompt."""
        rules = self._rules
        # a copy, so that changes by the user's functions affect only this episode
        self._task, self._calls = copy.deepcopy(dict(task.data)), []
        messages = [dict(message) for message in task.data.get("messages", ())]
        if rules.system is not None:
            messages.insert(0, {"role": "system", "content": rules.system})
        if "prompt" in task.data:
            messages.append({"role": "user", "content": task.data["prompt"]})
        if rules.state is not None:
            self._state = rules.state(task=self._task, seed=seed)
        self._prompt = messages
        return Observation(messages, tools=[tool.schema for tool in rules.tools.values()])

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Execute the calls, or grade the final reply."""
        if action.tool_calls:
            return StepResult([self._answer(call) for call in action.tool_calls])
        rules, reason = self._rules, ""
        rule: float | None = None
        if rules.reward is not None:
            returned: Any = rules.reward(
                task=self._task, final=action.content, calls=list(self._calls), state=self._state
            )
            if isinstance(returned, tuple) and len(returned) == 2:
                returned, reason = returned
            rule = finite(returned)
            if rule is None:
                must = f"returned {shown(returned)}: it must return a number"
                raise EnvironmentFailure(f"{rules.reward.name} {must}")
        if rules.judge is None:
            info = {"reward_reason": reason} if reason else {}
            return StepResult(reward=rule, done=True, info=info)
        reply: Message = {"role": "assistant", "content": action.content}
        return rules.judge.grade(
            [*self._prompt, *map(_shown, self._calls), reply], self._task, rule
        )

    def metrics(self) -> Mapping[str, float]:
        """Return `tool_errors`, in total and by tool."""
        failed = [call.name for call in self._calls if call.error is not None]
        errors = Counter(name for name in failed if name in self._rules.tools)
        return tool_error_metrics(errors) | {"tool_errors": float(len(failed))}

    def close(self) -> Any:
        """Close the state if it has a method `close` that is not a tool. If `close` is async,
        return the awaitable.
        """
        state, self._state = self._state, None
        close = getattr(state, "close", None)
        tool = self._rules.tools.get("close")
        is_tool = tool is not None and tool.function is getattr(close, "__func__", close)
        return close() if callable(close) and not is_tool else None

    def _answer(self, call: ToolCall) -> Message:
        result, error = self._execute(call)
        self._calls.append(PlayedCall(call.name, call.arguments or {}, result, error))
        content = _text(result) if error is None else f"Error: {error}"
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}

    def _execute(self, call: ToolCall) -> tuple[Any, str | None]:
        """Return the tool's result, and the call's error if there is one."""
        tool = self._rules.tools.get(call.name)
        if tool is None:
            there = ", ".join(self._rules.tools)
            return None, f"there is no tool {call.name!r}; there are: {there}"
        try:
            arguments = tool.signature.checked(call.arguments or {})
        except UsageError as error:
            return None, str(error)
        try:
            state = (self._state,) if tool.first else ()
            result = tool.function(*state, **arguments)
        except self._rules.told_errors as error:
            text = message_of(error)
            return None, text if isinstance(
                error, ActionError
            ) else f"{type(error).__name__}: {text}"
        except Exception as error:
            raise EnvironmentFailure(
                f"the tool {tool.name} failed: {_described(error)}; to report an error to the "
                f"model, raise an ActionError, or list the exception's type in told_errors"
            ) from error
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise EnvironmentFailure(
                f"the tool {tool.name} returned a {type(result).__name__}: it must return a value"
            )
        return result, None


def _shown(call: PlayedCall) -> Message:
    """Return `call` as the judge reads it."""
    outcome = {"result": call.result} if call.error is None else {"error": call.error}
    content = {"name": call.name, "arguments": call.arguments, **outcome}
    return {"role": "tool", "content": content}


class ToolEnvironmentFactory(Factory):
    """The `EnvironmentFactory` that `tool_environment` returns."""

    settings_hint = (
        ". To support settings, make NAME in FILE.py:NAME a function that takes them and returns "
        "the environment"
    )

    def __init__(
        self, rules: _Rules, tasks: Mapping[str, Sequence[Task]], name: str, description: str
    ) -> None:
        self.name = name
        self.description = description
        self.splits = tuple(tasks)
        self._rules = rules
        self._tasks = tasks

    @property
    def sources(self) -> Mapping[str, str]:
        """The judge, so that `run.json` notes another one. Its rubric is that of the first task."""
        if self._rules.judge is None:
            return {}
        first = next(task for tasks in self._tasks.values() for task in tasks)
        with suppress(Exception):  # a rubric is the user's function, and may fail
            return {"judge": self._rules.judge.version(copy.deepcopy(dict(first.data)))}
        return {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `split`. Raise `UsageError` if it is unknown."""
        self.check_split(split)
        return self._tasks[split]

    def make(self, options: EnvironmentOptions) -> ToolEnvironment:
        """Return the environment of one episode. Raise `UsageError` for any setting."""
        self.check_settings(options.settings)
        return ToolEnvironment(self._rules)

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return the task's `reference` as actions, or None if it has none."""
        steps = task.data.get("reference")
        return None if steps is None else [_reference_step(task, step) for step in steps]


def _reference_step(task: Task, step: Any) -> Action:
    if isinstance(step, str):
        return Action(step)
    calls = [step] if isinstance(step, Mapping) else step
    try:
        return Action("", tuple(ToolCall(c["name"], dict(c["arguments"]), "") for c in calls))
    except (TypeError, KeyError, ValueError) as error:
        raise UsageError(
            f"task {task.id}: each step of 'reference' must be a text, a call as "
            f'{{"name": ..., "arguments": {{...}}}}, or a list of calls, not {step!r}'
        ) from error


def _read_tasks(tasks: Any) -> dict[str, list[Task]]:
    splits = tasks if isinstance(tasks, Mapping) else {"test": tasks}
    read: dict[str, list[Task]] = {}
    for split, rows in splits.items():
        read[split] = [_task(index, task, split) for index, task in enumerate(rows)]
        _refuse_doubled(read[split], "id", "two tasks have the id {!r}: give each task its own id")
    if not any(read.values()):
        raise UsageError("there are no tasks: give tasks= a list of dicts, or a JSONL file")
    return read


def _refuse_doubled(items: Sequence[Any], attribute: str, message: str) -> None:
    """Raise `UsageError` with `message` if two items have the same value of `attribute`."""
    for value, count in Counter(getattr(item, attribute) for item in items).items():
        if count > 1:
            raise UsageError(message.format(value))


def _task(index: int, task: Any, split: str) -> Task:
    if not isinstance(task, Mapping):
        raise UsageError(f"tasks[{index}] must be a dict, not {type(task).__name__}")
    if not isinstance(task.get("prompt", ""), str):
        raise UsageError(f"tasks[{index}]: prompt must be text; give a conversation as `messages`")
    # A row of a table may have a null in the column that it does not use.
    task = {name: task[name] for name in task if name != "messages" or task[name] is not None}
    messages = task.get("messages", [])
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise UsageError(f"tasks[{index}]: messages must be a list of dicts, not {messages!r:.100}")
    if "prompt" not in task and "messages" not in task:
        raise UsageError(f"tasks[{index}] needs a prompt (text), or messages")
    return Task(str(task.get("id", index)), index, split, task)


def _read_lines(path: Path, beside: Path) -> list[Any]:
    folders = list(dict.fromkeys([beside, Path.cwd()]))
    files = [folder / path for folder in folders if (folder / path).is_file()]
    if not files:
        where = " or ".join(map(str, folders))
        raise UsageError(f"tasks: there is no file {path} in {where}")
    path = files[0]
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise UsageError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def _described(error: Exception) -> str:
    """Return a description of the exception and of the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    location = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"{type(error).__name__}: {message_of(error)} ({location})"


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=plain)
    except (TypeError, ValueError):  # a key that is not text, or a value that contains itself
        return json.dumps(plain(result), ensure_ascii=False)
