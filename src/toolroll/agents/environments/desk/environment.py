"""`Desk`: one conversation at the service desk.

Invariants: every episode has its own in-memory database. The reward is 1.0 if the final database
equals the one after the reference actions, and the replies contain the required facts. Otherwise it
is 0.0. Every tool call results in an observation, whatever its arguments. Nothing is executed after
`done`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping

from toolroll.agents.environments.desk.database import final_state, open_database
from toolroll.agents.environments.desk.judge import judge
from toolroll.agents.environments.desk.member import DeskUser, details
from toolroll.agents.environments.desk.policy import POLICY
from toolroll.agents.environments.desk.tools import TOOLS, ToolError, call_tool
from toolroll.agents.users.stop import is_stop
from toolroll.parsers.types import ToolCall
from toolroll.rollout.errors import ActionError, UsageError
from toolroll.rollout.types import (
    Action,
    Environment,
    EnvironmentOptions,
    Message,
    Observation,
    StepResult,
    Task,
    UserSimulator,
)


class Desk(Environment):
    """One conversation at the desk. Its state is the episode's database and the messages so far.

    `policy` is the system message.
    """

    blocking = False

    def __init__(self, options: EnvironmentOptions, policy: str = POLICY) -> None:
        self._options = options
        self._policy = policy
        self._task: Task | None = None
        self._db: sqlite3.Connection | None = None
        self._user: UserSimulator | None = None
        self._done = False
        self._replies: list[str] = []
        self._tool_errors: Counter[str] = Counter()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start `task`. `seed` is passed to the user simulator, if there is one. Nothing else is
        random.
        """
        await self.close()
        self._task, self._done, self._replies, self._tool_errors = task, False, [], Counter()
        self._db = open_database(task.data.get("rows"))
        self._user = self._options.user(seed) if self._options.user else DeskUser(task.data)
        instruction = (
            f"You write to your library. {task.data['opening']} {' '.join(details(task.data))}"
        )
        opening = await self._user.reset(instruction)
        tools = [tool for _, tool in TOOLS.values()]
        return Observation(
            [{"role": "system", "content": self._policy}, {"role": "user", "content": opening}],
            tools,
        )

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or send the text to the member.

        Raise `ActionError` if the reply is empty, and `UsageError` before `reset` and after `done`.
        Errors of the user simulator are raised too.
        """
        if self._db is None or self._user is None or self._task is None:
            raise UsageError("desk: step was called before reset(task, seed)")
        if self._done:
            raise UsageError("desk: the episode is over: make a new environment for the next one")
        if not action.tool_calls and not action.content.strip():
            raise ActionError("The reply is empty: call a tool, or write something to the member.")
        if action.content.strip():
            self._replies.append(action.content)
        if action.tool_calls:
            messages = [self._call(self._db, call) for call in action.tool_calls]
        else:
            line = await self._user.step(action.content)
            self._done = is_stop(line)
            messages = [{"role": "user", "content": line}]
        if not self._done:
            return StepResult(messages)
        reward, reason = judge(self._task, final_state(self._db), self._replies)
        return StepResult(messages, reward, True, info={"reward_reason": reason} if reason else {})

    def _call(self, db: sqlite3.Connection, call: ToolCall) -> Message:
        message: Message = {"role": "tool", "tool_call_id": call.id, "name": call.name}
        try:
            if self._done:
                raise ToolError("not run: the chat was handed to a person by the call before")
            content = json.dumps(call_tool(db, call.name, call.arguments), ensure_ascii=False)
            self._done = call.name == "transfer_to_person"
        except ToolError as error:
            self._tool_errors[call.name] += 1
            content = f"Error: {error}"
        return message | {"content": content}

    def metrics(self) -> Mapping[str, float]:
        """Return `tool_errors` (in total and by tool) and the user's metrics."""
        errors = {f"tool_errors/{name}": float(count) for name, count in self._tool_errors.items()}
        return {
            "tool_errors": float(self._tool_errors.total()),
            **errors,
            **(self._user.metrics() if self._user else {}),
        }

    async def close(self) -> None:
        """Close the database and the user."""
        db, self._db = self._db, None
        if db is not None:
            db.close()
            if self._user is not None:
                await self._user.close()
