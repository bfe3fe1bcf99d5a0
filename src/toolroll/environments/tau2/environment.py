"""`Tau2Environment`: one episode of tau2, with a user simulator that may have its own tools.

Invariants: the episode ends with the user's stop marker, and nothing happens after it. A tool's
error is an observation, but as in tau2, ten errors end the episode with reward 0. The agent does
not see the user's own calls, but only what the user writes about them. A failed user simulator
never results in a reward. Slow work (copies, hashes) runs in threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from toolroll.agents.environments.factory import tool_error_metrics
from toolroll.agents.loop.call_policy import tool_message
from toolroll.agents.users import CallTool, OpenAIUser, checked_line
from toolroll.environments.tau2.domain import DEFAULT_BASIS, State, Tau2Call, Tau2Domain
from toolroll.rollout.environment import (
    Action,
    Environment,
    Observation,
    StepResult,
    Task,
    UserSimulator,
)
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Message, Tool

PARTS = {
    "DB": "database",
    "COMMUNICATE": "communicated",
    "ENV_ASSERTION": "assertions",
    "ACTION": "actions",
}


def grade(
    domain: Tau2Domain, task: Mapping[str, Any], state: State, texts: Sequence[str]
) -> dict[str, Any]:
    """Return `{"reward", "database", "communicated", "assertions", "actions"}`. The reward is 1.0
    if every part of the task's reward basis holds, else 0.0. A part that is not in the basis is
    None. `texts` are the agent's texts, one per message.

    - DB: the final database equals the database after the reference actions.
    - COMMUNICATE: one of the agent's messages contains each required text (`communicate_info`).
    - ENV_ASSERTION: the assertions about the agent's side and the user's side hold.
    - ACTION: each reference action was called, by the agent or the user.
    - NL_ASSERTION: a judge model confirms each statement. There is no judge here: `Tau2Factory`
      refuses such tasks, or leaves this part out.

    A part without data in the task holds. If the task names no basis, it is DB and COMMUNICATE.
    """
    criteria = task.get("evaluation_criteria") or {"reward_basis": []}
    basis = criteria.get("reward_basis", DEFAULT_BASIS)
    checks = {
        "DB": lambda: _database(domain, task, state),
        "COMMUNICATE": lambda: _communicated(criteria, texts),
        "ENV_ASSERTION": lambda: _assertions(criteria, state),
        "ACTION": lambda: all(_done(action, state) for action in criteria.get("actions") or ()),
    }
    results = {key: checks[part]() if part in basis else None for part, key in PARTS.items()}
    return {"reward": float(False not in results.values()), **results}


def _database(domain: Tau2Domain, task: Mapping[str, Any], state: State) -> bool:
    criteria = task["evaluation_criteria"]
    if criteria.get("actions") is None and criteria.get("env_assertions") is None:
        return True
    return domain.is_expected(task, state.database)


def _communicated(criteria: Mapping[str, Any], texts: Sequence[str]) -> bool:
    messages = [text.lower().replace(",", "") for text in texts]
    return all(
        any(info.lower() in message for message in messages)
        for info in criteria.get("communicate_info") or ()
    )


def _assertions(criteria: Mapping[str, Any], state: State) -> bool:
    return all(
        state.do(assertion["env_type"], assertion["func_name"], assertion["arguments"])
        == assertion.get("assert_value", True)
        for assertion in criteria.get("env_assertions") or ()
    )


def _done(action: Mapping[str, Any], state: State) -> bool:
    return any(_is(action, call) for call in state.calls)


def _is(action: Mapping[str, Any], call: Tau2Call) -> bool:
    """Return True if `call` is `action`. Without `compare_args`, tau2 compares only the arguments
    that the call has.
    """
    name, arguments = call
    compared = action.get("compare_args")
    if compared is None:
        compared = arguments.keys()
    expected = action["arguments"]
    return name == action["name"] and all(
        (key in arguments) == (key in expected) and arguments.get(key) == expected.get(key)
        for key in compared
    )


END_MARKERS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""The markers in the user's line that end an episode."""

MOST_ERRORS = 10
"""The number of failed calls of both sides that ends an episode with reward 0, as in tau2."""

# tau2's rules for the agent, reworded.
INSTRUCTIONS = """You are a customer service agent. Help the user within the policy below, and follow it in everything.
In each turn either write to the user or call tools, never both."""  # noqa: E501


@runtime_checkable
class UsesTools(Protocol):
    """A user simulator that can call tools."""

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        """Use `tools`. `call(name, arguments)` returns a tool's result."""
        ...


class Tau2Environment(Environment):
    """One episode. `make_user(seed)` makes the user, and `threads` run slow work. `info` is in the
    episode's result.
    """

    blocking = False  # tools take about a millisecond; the rest is awaited

    def __init__(
        self,
        domain: Tau2Domain,
        make_user: Callable[[int], UserSimulator],
        threads: BlockingRunner,
        info: Mapping[str, Any],
    ) -> None:
        self._domain = domain
        self._make_user = make_user
        self._threads = threads
        self._info = info
        self._state: State | None = None
        self._user: UserSimulator | None = None
        self._task: Mapping[str, Any] = {}
        self._texts: list[str] = []
        self._over = False
        self._errors: Counter[str] = Counter()
        self._user_errors = 0

    @property
    def state(self) -> State | None:
        """The episode's databases. None before `reset` and after the end."""
        return self._state

    async def reset(self, task: Task, seed: int) -> Observation:
        """Return the policy as the system message, the user's first line, and the agent's tools."""
        self._task, self._texts, self._errors = task.data, [], Counter()
        self._state = await self._threads.run_in_thread(self._domain.begin, task.data)
        self._user = user = self._make_user(seed)
        if isinstance(user, OpenAIUser):
            user.adopt_prompt(
                f"{self._domain.guidelines}\n<scenario>\n{{instruction}}\n</scenario>"
            )
        if self._domain.user_tools:
            if not isinstance(user, UsesTools):
                raise UsageError(
                    f"tau2/{self._domain.name} needs a user simulator with tools (adopt_tools); "
                    f"{type(user).__name__} has none"
                )
            user.adopt_tools(self._domain.user_tools, self._user_calls)
        instruction = scenario(task.data)
        line = checked_line(await user.reset(instruction))
        self._over = _ends(line)
        system = f"<instructions>\n{INSTRUCTIONS}\n</instructions>\n{self._domain.policy}"
        return Observation(
            [{"role": "system", "content": system}, {"role": "user", "content": line}],
            self._domain.tools,
            {**self._info, "instruction": instruction},
        )

    async def step(self, action: Action) -> StepResult:
        """Execute the calls in order. If there are none, send the text to the user. If the user's
        first line ended the conversation, do neither: the episode is done.
        """
        state, user = self._state, self._user
        if state is None or user is None:
            raise EnvironmentFailure("step was called before reset or after the episode ended")
        if self._over:
            return await self._graded([], state)
        if action.content.strip():
            self._texts.append(action.content)
        elif not action.tool_calls:
            raise ActionError("Your reply was empty. Write to the user, or call a tool.")
        if action.tool_calls:
            messages: list[Message] = [
                tool_message(call, self._called(state, call.name, call.arguments or {}))
                for call in action.tool_calls
            ]
        else:
            line = checked_line(await user.step(action.content))
            messages = [{"role": "user", "content": line}]
            self._over = _ends(line)
        if self._over or state.errors >= MOST_ERRORS:
            return await self._graded(messages, state)
        return StepResult(messages)

    async def _graded(self, messages: Sequence[Message], state: State) -> StepResult:
        self._state = None
        if state.errors >= MOST_ERRORS:
            graded = {"reward": 0.0, "too_many_errors": True}
        else:
            graded = await self._threads.run_in_thread(
                grade, self._domain, self._task, state, self._texts
            )
        return StepResult(messages, graded["reward"], True, info={"reward_info": graded})

    def metrics(self) -> Mapping[str, float]:
        """Return the number of failed calls, in total and by tool, and the user's metrics."""
        user = self._user.metrics() if self._user is not None else {}
        errors = {"user_tool_errors": float(self._user_errors)}
        return {**tool_error_metrics(self._errors), **errors, **user}

    async def close(self) -> None:
        self._state = None
        if self._user is not None:
            await self._user.close()

    def _called(self, state: State, name: str, arguments: Mapping[str, Any]) -> str:
        text, failed = state.call("assistant", name, arguments)
        self._errors[name] += failed
        return text

    def _user_calls(self, name: str, arguments: Mapping[str, Any]) -> str:
        assert self._state is not None
        text, failed = self._state.call("user", name, arguments)
        self._user_errors += failed
        return text


def _ends(line: str) -> bool:
    return any(end in line for end in END_MARKERS)


def scenario(task: Mapping[str, Any]) -> str:
    """Return the user's scenario as text: the persona, and each part of the instructions under its
    name.
    """
    user = task["user_scenario"]
    persona, instructions = user.get("persona"), user["instructions"]
    if isinstance(instructions, str):
        parts = {"Instructions": instructions}
    else:
        parts = {name.replace("_", " ").capitalize(): text for name, text in instructions.items()}
    if persona:
        parts = {"Persona": persona.strip(), **parts}
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts.items() if text)
