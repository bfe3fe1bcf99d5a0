"""`check`: finds mistakes in an environment before a model plays it.

Invariants: the result of each check is ok, failed (with the mistake) or not applicable (with the
reason). If one check fails, the checks that depend on it are not applicable, so that a mistake is
reported only once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import jsonschema_rs
import orjson

from toolroll.evaluation.differences import excerpts, first_difference
from toolroll.evaluation.do_nothing import LeavingUser, do_nothing_runner
from toolroll.evaluation.environment_recorder import EnvironmentRecorder
from toolroll.evaluation.wrong_arguments import example_arguments, wrong_calls
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import RolloutError, ToolrollError, UsageError, error_in, message_of
from toolroll.rollout.runtime.jsonable import shown
from toolroll.rollout.runtime.targets import error_line
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import (
    Action,
    EnvironmentFactory,
    EnvironmentOptions,
    Status,
    Task,
    Tool,
)

CheckStatus = Literal["ok", "failed", "not applicable"]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST_ON_LOOP = 0.05
"""The maximum time in seconds for which one call may block the event loop of all episodes."""
_MOST_TOOLS = 10
_ADVICE = "raise an ActionError, or answer with a tool message"
_FAREWELL = Action("Goodbye.")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `detail`: what was found, or why it failed or does not apply."""

    name: str
    status: CheckStatus
    detail: str = ""


class _FailedError(Exception):
    """Raised by a check that fails. The message is the result's `detail`."""


class _NotApplicableError(Exception):
    """Raised by a check that does not apply. The message is the result's `detail`."""


async def check(
    factory: EnvironmentFactory, tasks: Sequence[Task], *, time_limit: float = 60.0
) -> list[CheckResult]:
    """Check the environment of `factory` on `tasks`, and return one result per check. No engine is
    needed.

    Each call of an environment may take at most `time_limit` seconds.

    Example:
        >>> import asyncio
        >>> from toolroll import load_environment
        >>> desk = load_environment("desk")
        >>> results = asyncio.run(check(desk, desk.tasks("test")))
        >>> [result.name for result in results if result.status == "failed"]
        []
    """
    return await _Checks(factory, tasks, time_limit).run()


class _Checks:
    def __init__(
        self, factory: EnvironmentFactory, tasks: Sequence[Task], time_limit: float
    ) -> None:
        self.factory = factory
        self.time_limit = time_limit
        self.tasks = tasks
        self.options = EnvironmentOptions()
        self.played: list[list[EnvironmentRecorder]] = []
        """For each of two episodes, one recorder for each time that the episode was played."""
        self.results: list[CheckResult] = []
        self.close_error = ""

    async def run(self) -> list[CheckResult]:
        await self._check("tasks", self._tasks)
        if self.results[-1].status == "ok":
            await self._check("an episode", self._episode)
        start = self.results[-1]
        rest: dict[str, Callable[[], Awaitable[str]]] = {
            "tool schemas": self._schemas,
            "same seed, same episode": self._seeds,
            "two episodes at once": self._at_once,
            "reference actions": self._references,
            "wrong arguments": self._wrong_arguments,
            "event loop": self._event_loop,
            "close": self._close,
            "time": self._time,
        }
        for name, function in rest.items():
            if start.status == "ok":
                await self._check(name, function)
            else:
                self._add(name, "not applicable", f"not checked: {start.name} failed")
        return self.results

    async def _check(self, name: str, function: Callable[[], Awaitable[str]]) -> None:
        try:
            self._add(name, "ok", await function())
        except _NotApplicableError as error:
            self._add(name, "not applicable", str(error))
        except (_FailedError, ToolrollError) as error:
            self._add(name, "failed", message_of(error))
        except Exception as error:  # noqa: BLE001 - a third-party factory may raise anything
            self._add(name, "failed", error_line(error))

    def _add(self, name: str, status: CheckStatus, detail: str) -> None:
        self.results.append(CheckResult(name, status, detail))

    def _failed(self, name: str) -> bool:
        return any(result.name == name and result.status == "failed" for result in self.results)

    # --- the checks -------------------------------------------------------------------------------

    async def _tasks(self) -> str:
        if not self.tasks:
            raise _FailedError("there are no tasks")
        split = self.tasks[0].split or self.factory.splits[0]
        first, again = (list(self.factory.tasks(split)) for _ in range(2))
        if [(task.id, task.data) for task in first] != [(task.id, task.data) for task in again]:
            raise _FailedError("tasks() returns different tasks when it is called again")
        counts = Counter(task.id for task in first)
        doubled = [task_id for task_id, count in counts.items() if count > 1]
        if doubled:
            raise _FailedError(f"{len(doubled)} task ids are not unique, such as {doubled[0]!r}")
        for place, task in enumerate(first):
            if task.index != place:
                raise _FailedError(f"task {task.id} has index {task.index}, expected {place}")
            try:
                orjson.dumps(dict(task.data))
            except TypeError as error:
                raise _FailedError(f"the data of task {task.id} is not JSON: {error}") from error
        return f"{len(first)} in the split {split}"

    async def _episode(self) -> str:
        """Play two episodes step by step, and one with the do-nothing agent."""
        await self._find_options()
        self.played = [[await self._play(task, seed)] for task, seed in self._pair()]
        limits = {"step_timeout": self.time_limit}
        runner = do_nothing_runner(self.factory, RunSettings(), limits)
        result = (await runner.play(self.tasks[0], 0)).result
        if result.status is Status.ABORTED:
            raise _FailedError(str(error_in(result.info).get("message", "it was aborted")))
        return f"doing nothing earns {result.reward:g} in task {self.tasks[0].id}"

    async def _schemas(self) -> str:
        tools = [tool for group in self.played for tool in group[0].tools]
        if not tools:
            raise _NotApplicableError("there are no tools")
        for group in self.played:
            names = [_checked_tool(tool) for tool in group[0].tools]
            doubled = [name for name, count in Counter(names).items() if count > 1]
            if doubled:
                raise _FailedError(f"two tools are named {doubled[0]!r}")
        count = len({tool["function"]["name"] for tool in tools})
        return f"{count} tool{'s' * (count > 1)}"

    async def _seeds(self) -> str:
        for (task, seed), plays in zip(self._pair(), self.played, strict=True):
            plays.append(await self._play(task, seed))
            where = _difference(plays[0], plays[1], ("the first time", "the second time"))
            if where:
                raise _FailedError(
                    f"task {task.id} differs if it is played twice with one seed: {where}"
                )
        return f"{len(self.played)} episodes, each played twice"

    async def _at_once(self) -> str:
        if self._failed("same seed, same episode"):
            raise _NotApplicableError("not checked: one episode alone is not reproducible")
        recorders = [self._recorder(task, seed) for task, seed in self._pair()]
        try:
            for recorder in recorders:
                await recorder.start()
            waiting = [self._actions(recorder) for recorder in recorders]
            while any(waiting):
                for recorder, actions in zip(recorders, waiting, strict=True):
                    if actions and not recorder.done:
                        await recorder.execute(actions.pop(0))
                    else:
                        actions.clear()
        finally:
            for recorder in recorders:
                await self._end(recorder)
        for recorder, alone in zip(recorders, self.played, strict=True):
            where = _difference(alone[0], recorder, ("alone", "with another episode"))
            if where:
                raise _FailedError(
                    f"task {recorder.task.id} changes if another episode runs: {where}"
                )
            alone.append(recorder)
        return "stepped alternately; each is the same as when it runs alone"

    async def _references(self) -> str:
        references = [(task, self.factory.reference(task)) for task in self.tasks]
        solved = [(task, list(actions)) for task, actions in references if actions is not None]
        if not solved:
            raise _NotApplicableError("the environment has no reference actions")
        wrong = []
        for task, actions in solved:
            recorder = await self._play(task, 0, [*actions, _FAREWELL])
            if recorder.reward != 1.0:
                wrong.append(f"{task.id}: {shown(recorder.reward)}{_first_error(recorder)}")
        if wrong and self.options.user is not None:
            raise _NotApplicableError(
                f"{len(wrong)} of {len(solved)} need a user who answers; this check has none"
            )
        if wrong:
            some = ", ".join(wrong[:3])
            raise _FailedError(f"{len(wrong)} of {len(solved)} do not earn 1.0: {some}")
        return f"{len(solved)} of {len(solved)} earn 1.0"

    async def _wrong_arguments(self) -> str:
        tools = list(self.played[0][0].tools)[:_MOST_TOOLS]
        if not tools:
            raise _NotApplicableError("there are no tools")
        calls = wrong_calls(tools)
        for what, call in calls:
            try:
                await self._play(self.tasks[0], 0, [Action("", (call,))])
            except RolloutError as error:
                arguments = orjson.dumps(call.arguments).decode()
                advice = "" if "ActionError" in str(error) else f"; {_ADVICE}"
                raise _FailedError(f"{what}, {call.name}({arguments}): {error}{advice}") from error
        return f"{len(calls)} calls, each answered"

    async def _event_loop(self) -> str:
        env = self.played[0][0].env
        longest = [max(map(min, zip(*(p.on_loop for p in ps), strict=False))) for ps in self.played]
        if not any(longest):
            raise _NotApplicableError("reset and step run in a thread")
        if max(longest) > _MOST_ON_LOOP:
            raise _FailedError(
                f"a call of {type(env).__name__} blocks the event loop for {max(longest):.2f} s: "
                f"make reset and step plain methods and set blocking = True, or await the "
                f"operation that blocks"
            )
        return f"blocked for at most {1e3 * max(longest):.1f} ms"

    async def _close(self) -> str:
        """Close one environment after an episode, and one before `reset`, because `close` is also
        called if `reset` fails.
        """
        if self.close_error:
            raise _FailedError(self.close_error)
        error = await self._recorder(self.tasks[0], 0).close()
        if error is not None:
            raise _FailedError(f"before reset: {message_of(error)}")
        return "after an episode, and before reset"

    async def _time(self) -> str:
        recorders = [recorder for group in self.played for recorder in group]
        resets = [recorder.durations[0] for recorder in recorders]
        steps = [seconds for recorder in recorders for seconds in recorder.durations[1:-1]]
        text = f"reset {_duration(median(resets))}"
        return f"{text}, step {_duration(median(steps))} (median)" if steps else text

    # --- playing ----------------------------------------------------------------------------------

    def _pair(self) -> list[tuple[Task, int]]:
        """Return two episodes: of two tasks, or of one task with two seeds."""
        return [(self.tasks[0], 1), (self.tasks[1 % len(self.tasks)], 2)]

    def _recorder(self, task: Task, seed: int) -> EnvironmentRecorder:
        return EnvironmentRecorder(self.factory.make(self.options), task, seed, self.time_limit)

    async def _find_options(self) -> None:
        """If the environment raises `UsageError` without a simulated user, add a user to the
        options. This user leaves at once.
        """
        try:
            await self._play(self.tasks[0], 0, [])
        except UsageError:
            self.options = EnvironmentOptions(user=lambda seed: LeavingUser())

    async def _play(
        self, task: Task, seed: int, actions: Sequence[Action] | None = None
    ) -> EnvironmentRecorder:
        recorder = self._recorder(task, seed)
        try:
            await recorder.start()
            for action in self._actions(recorder) if actions is None else actions:
                if not recorder.done:
                    await recorder.execute(action)
        finally:
            await self._end(recorder)
        return recorder

    async def _end(self, recorder: EnvironmentRecorder) -> None:
        """Close the environment. If this fails, keep the error for the check "close"."""
        error = await recorder.close()
        if error is not None:
            self.close_error = message_of(error)

    def _actions(self, recorder: EnvironmentRecorder) -> list[Action]:
        """Return the task's reference actions and a farewell. If the task has no reference, return
        one call of each tool (at most `_MOST_TOOLS`) and a farewell.
        """
        reference = self.factory.reference(recorder.task)
        if reference is not None:
            return [*reference, _FAREWELL]
        calls = [
            ToolCall(function["name"], example_arguments(function.get("parameters") or {}), "")
            for tool in recorder.tools[:_MOST_TOOLS]
            for function in [tool["function"]]
        ]
        return [*(Action("", (call,)) for call in calls), _FAREWELL]


def _checked_tool(tool: Tool) -> str:
    """Return the name of `tool`. Raise `_FailedError` if `tool` is not in OpenAI's format."""
    function = tool["function"]
    if tool.get("type") != "function":
        raise _FailedError(f'a tool must be {{"type": "function", "function": ...}}: {shown(tool)}')
    name: str = function["name"]
    if not _NAME.fullmatch(name):
        raise _FailedError(f"{shown(name)} cannot be the name of a tool")
    schema = function.get("parameters", {"type": "object"})
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise _FailedError(f'{name}: the parameters must have "type": "object"')
    try:
        jsonschema_rs.meta.validate({**schema, "$schema": _DRAFT})
    except jsonschema_rs.ValidationError as error:
        place = "/".join(map(str, error.instance_path))
        raise _FailedError(f"{name}: parameters/{place}: {error.message}") from error
    unknown = set(schema.get("required", ())) - set(schema.get("properties", {}))
    if unknown:
        raise _FailedError(f"{name}: {min(unknown)!r} is required and not among the properties")
    return name


def _difference(
    expected: EnvironmentRecorder, other: EnvironmentRecorder, when: tuple[str, str]
) -> str:
    """Return a message about the first difference between two transcripts, or "". `when`: how the
    message refers to each transcript.
    """
    entries = zip(expected.transcript, other.transcript, strict=False)
    for step, (first, second) in enumerate(entries):
        if first != second:
            path, *values = first_difference(first, second)
            texts = [f"{text} {name}" for text, name in zip(excerpts(*values), when, strict=True)]
            return f"{path} of {f'step {step}' if step else 'reset'} is {' and '.join(texts)}"
    if len(expected.transcript) != len(other.transcript):
        steps = [f"{len(player.transcript) - 1}" for player in (expected, other)]
        return f"the number of steps is {steps[0]} {when[0]} and {steps[1]} {when[1]}"
    return ""


def _first_error(recorder: EnvironmentRecorder) -> str:
    """Return the first error message in the transcript, in parentheses, or "" if there is none."""
    for entry in recorder.transcript[1:]:
        if "error" in entry:
            return f" ({entry['error']})"
        for message in entry["messages"]:
            if str(message.get("content")).startswith("Error"):
                return f" ({message['content']})"
    return ""


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"
