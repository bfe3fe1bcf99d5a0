"""`check`: asks six questions about an environment before a model plays it. No engine is needed.

Invariants: the answer to a question is ok, failed (with the mistake) or not applicable (with the
reason). An error of the environment ends the check, because the next questions would meet the same
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import jsonschema_rs
import orjson

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.text_agent import FAREWELL, TextAgent
from toolroll.evaluation.differences import excerpts, first_difference
from toolroll.evaluation.do_nothing import LeavingUser
from toolroll.evaluation.reward_reason import reward_reason
from toolroll.evaluation.wrong_arguments import example_arguments, wrong_calls
from toolroll.parsers.openai import to_openai
from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.environment import Action, EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError, error_in
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runs.pass_at_k import passed
from toolroll.rollout.runtime.jsonable import plain, shown
from toolroll.rollout.runtime.targets import error_line
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.types import Message, Tool

CheckStatus = Literal["ok", "failed", "not applicable"]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
"""The keywords of a JSON schema that say which values an argument may have."""
_MOST_TOOLS = 10


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer to one question. `detail`: what was found, or why it failed or does not apply."""

    name: str
    status: CheckStatus
    detail: str = ""


class _FailedError(Exception):
    """Raised by a question whose answer is no. The message is the result's `detail`."""


class _NotApplicableError(Exception):
    """Raised by a question that does not apply. The message is the result's `detail`."""


async def check(
    factory: EnvironmentFactory, tasks: Sequence[Task], *, time_limit: float = 60.0
) -> list[CheckResult]:
    """Check the environment of `factory` on `tasks`. Return one result per question, up to the
    first one that meets an error of the environment.

    Each call of an environment may take at most `time_limit` seconds.

    Example:
        >>> import asyncio
        >>> from toolroll import load_environment
        >>> desk = load_environment("desk")
        >>> results = asyncio.run(check(desk, desk.tasks("test")))
        >>> [result.name for result in results if result.status == "failed"]
        []
    """
    questions = _Questions(factory, tasks, time_limit)
    results: list[CheckResult] = []
    for name, ask in {
        "tasks load": questions.tasks_load,
        "same seed, same episode": questions.same_seed_is_the_same,
        "references earn 1.0": questions.references_earn_1,
        "doing nothing does not earn 1.0": questions.doing_nothing_does_not,
        "every argument has a type": questions.every_argument_has_a_type,
        "wrong calls get an answer": questions.wrong_calls_are_answered,
    }.items():
        try:
            results.append(CheckResult(name, "ok", await ask()))
        except _NotApplicableError as error:
            results.append(CheckResult(name, "not applicable", str(error)))
        except _FailedError as error:
            results.append(CheckResult(name, "failed", str(error)))
        except (RolloutError, UsageError) as error:
            return [*results, CheckResult(name, "failed", str(error))]
        except Exception as error:  # noqa: BLE001 - a third-party factory may raise anything
            return [*results, CheckResult(name, "failed", error_line(error))]
    return results


class _Questions:
    """Each question returns what it found. An error of the environment is a `RolloutError`."""

    def __init__(
        self, factory: EnvironmentFactory, tasks: Sequence[Task], time_limit: float
    ) -> None:
        self.factory = factory
        self.tasks = tasks
        self.time_limit = time_limit
        self.options = EnvironmentOptions()
        self.tools: dict[str, Tool] = {}
        """The tools of the episodes played so far, by name."""

    async def tasks_load(self) -> str:
        if not self.tasks:
            raise UsageError("there are no tasks")
        split = self.tasks[0].split or self.factory.splits[0]
        first, again = (list(self.factory.tasks(split)) for _ in range(2))
        if [(task.id, task.data) for task in first] != [(task.id, task.data) for task in again]:
            raise _FailedError("tasks() returns different tasks when it is called again")
        counts = Counter(task.id for task in first)
        doubled = [task_id for task_id, count in counts.items() if count > 1]
        if doubled:
            raise _FailedError(f"{len(doubled)} task ids are not unique, such as {doubled[0]!r}")
        for index, task in enumerate(first):
            if task.index != index:
                raise _FailedError(f"task {task.id} has index {task.index}, expected {index}")
            try:
                orjson.dumps(dict(task.data))
            except TypeError as error:
                raise _FailedError(f"the data of task {task.id} is not JSON: {error}") from error
        return f"{len(first)} in the split {split}"

    async def same_seed_is_the_same(self) -> str:
        """Play two episodes twice: of two tasks, or of one task with two seeds."""
        try:
            await self._play(self.tasks[0], 0, [])
        except UsageError:  # the environment needs a simulated user
            self.options = EnvironmentOptions(user=lambda seed: LeavingUser())
        for task, seed in ((self.tasks[0], 1), (self.tasks[1 % len(self.tasks)], 2)):
            actions = self.factory.reference(task)
            first, again = [
                plain({"messages": result.messages, "tools": result.tools, "reward": result.reward})
                for result in [await self._play(task, seed, actions) for _ in range(2)]
            ]
            if first != again:
                path, *values = first_difference(first, again)
                raise _FailedError(
                    "task {} differs if it is played twice with one seed: {} is {} the first time "
                    "and {} the second time".format(task.id, path, *excerpts(*values))
                )
        return "two episodes, each played twice"

    async def references_earn_1(self) -> str:
        references = [(task, self.factory.reference(task)) for task in self.tasks]
        solved = [(task, actions) for task, actions in references if actions is not None]
        if not solved:
            raise _NotApplicableError(
                "the tasks have no reference actions, so no solution was graded"
            )
        wrong = []
        for task, actions in solved:
            result = await self._play(task, 0, actions)
            if result.reward != 1.0:
                why = _first_error(result.messages) or reward_reason(result.info)
                wrong.append(f"{task.id}: {shown(result.reward)}{f' ({why})' if why else ''}")
        if wrong and self.options.user is not None:
            raise _NotApplicableError(
                f"{len(wrong)} of {len(solved)} need a user who answers; this check has none"
            )
        if wrong:
            some = ", ".join(wrong[:3])
            raise _FailedError(f"{len(wrong)} of {len(solved)} do not earn 1.0: {some}")
        return f"{len(solved)} of {len(solved)}"

    async def doing_nothing_does_not(self) -> str:
        """This fails only if each task is solved, because some tasks of a benchmark ask for no
        call.
        """
        rewards = [(await self._play(task, 0, [])).reward for task in self.tasks]
        count = sum(reward is not None and passed(reward) for reward in rewards)
        summary = f"a farewell earns 1.0 in {count} of {len(rewards)}"
        if count == len(rewards):
            raise _FailedError(f"{summary}: a model would learn to do nothing")
        return summary

    async def every_argument_has_a_type(self) -> str:
        if not self.tools:
            raise _NotApplicableError("there are no tools")
        for name, tool in self.tools.items():
            wrong = _wrong_schema(tool["function"].get("parameters", {"type": "object"}))
            if wrong:
                raise _FailedError(f"{name}: {wrong}")
        return f"{len(self.tools)} tool{'s' * (len(self.tools) > 1)}"

    async def wrong_calls_are_answered(self) -> str:
        if not self.tools:
            raise _NotApplicableError("there are no tools")
        calls = wrong_calls(list(self.tools.values())[:_MOST_TOOLS])
        for misuse, call in calls:
            try:
                await self._play(self.tasks[0], 0, [Action("", (call,))])
            except RolloutError as error:
                arguments = orjson.dumps(call.arguments).decode()
                raise _FailedError(
                    f"{misuse}, {call.name}({arguments}): {error}; raise an ActionError, or answer "
                    f"with a tool message"
                ) from error
        return f"{len(calls)} calls"

    async def _play(
        self, task: Task, seed: int, actions: Sequence[Action] | None
    ) -> InteractionResult:
        """Play one episode with `actions` and a farewell. If `actions` is None, call each tool
        once. Raise `RolloutError` if the environment raises an error.
        """
        agent = _ScriptedAgent(
            Threads(1),
            policy=CallPolicy(parallel_calls="all"),
            step_timeout=self.time_limit,
            actions=actions,
        )
        env = self.factory.make(self.options)
        most = (_MOST_TOOLS if actions is None else len(actions)) + 1
        result = await agent.asolve(env, None, {}, task.index, most, task=task, seed=seed)
        late = result.info.get("metrics_error") or result.info.get("close_error")
        if error := error_in(result.info) or late:
            raise RolloutError(str(error["message"]))
        self.tools |= {tool["function"]["name"]: tool for tool in result.tools}
        return result


@dataclass(eq=False)
class _ScriptedAgent(TextAgent):
    """Takes `actions`, and then says goodbye. If `actions` is None, it calls each tool once (at
    most `_MOST_TOOLS`).
    """

    _: KW_ONLY
    actions: Sequence[Action] | None

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        if self.actions is None:
            self.actions = [Action("", (_example_call(tool),)) for tool in tools[:_MOST_TOOLS]]
        action, *self.actions = self.actions or [Action(FAREWELL)]
        calls = [
            call.with_id(f"call_{len(messages)}_{number}")
            for number, call in enumerate(action.tool_calls)
        ]
        reply = ParsedReply(action.content, tool_calls=tuple(calls))
        return AssistantTurn(reply, to_openai(reply))


def _example_call(tool: Tool) -> ToolCall:
    function = tool["function"]
    return ToolCall(function["name"], example_arguments(function.get("parameters") or {}), "")


def _first_error(messages: Sequence[Message]) -> str:
    """Return the first message that is an error, or "" if there is none."""
    texts = [str(message.get("content")) for message in messages]
    return next((text for text in texts if text.startswith("Error")), "")


def _wrong_schema(schema: Any) -> str:
    """Return what is wrong with the `parameters` of a tool, or ""."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return 'the parameters must have "type": "object"'
    try:
        jsonschema_rs.meta.validate({**schema, "$schema": _DRAFT})
    except jsonschema_rs.ValidationError as error:
        return f"parameters/{'/'.join(map(str, error.instance_path))}: {error.message}"
    properties = schema.get("properties", {})
    for name in (*schema.get("required", ()), *properties):
        argument = properties.get(name)
        if not isinstance(argument, Mapping) or not _TYPES & argument.keys():
            return f"the argument {name!r} has no type"
    return ""
