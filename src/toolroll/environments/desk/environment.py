"""`Desk`: one conversation at the service desk, with its scripted member, judge and factory.

Invariants: every episode has its own in-memory database. The reward is 1.0 if the final database
equals the one after the reference actions, and the replies contain the required facts. Otherwise it
is 0.0. Every tool call results in an observation, whatever its arguments. Nothing is executed after
`done`.
"""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from toolroll.agents.environments.factory import Factory, tool_error_metrics
from toolroll.agents.users.scripted import STOP_MARKER, is_stop
from toolroll.environments.desk.generate import generate
from toolroll.environments.desk.policy import BRIEF_POLICY, POLICY
from toolroll.environments.desk.tools import (
    TOOLS,
    ToolError,
    call_tool,
    final_state,
    handwritten,
    open_database,
)
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import (
    Action,
    Environment,
    EnvironmentOptions,
    Observation,
    StepResult,
    Task,
    UserSimulator,
)
from toolroll.rollout.errors import ActionError, UsageError
from toolroll.rollout.types import Message


def reference(task: Task) -> list[Action]:
    """Return the actions that earn 1.0 in `task` with the scripted member."""
    data = task.data
    look_up = Action("", (ToolCall("find_member", {"card": data["card"]}, ""),))
    if "requests" in data:
        return [_WELCOME, look_up, *chain.from_iterable(map(settled, data["requests"]))]
    more = [Action("I see. Anything else?") for _ in data.get("more", ())]
    reply = " ".join(["All settled.", *(f"Please note: {text}." for text in data["told"])])
    return [_WELCOME, *more, look_up, *settled({"actions": data["actions"], "reply": reply})]


_WELCOME = Action("Welcome! May I have your card number and your postcode?")


def settled(request: Mapping[str, Any]) -> list[Action]:
    """Return the calls that settle one request, followed by the reply. A request that a person must
    handle has no reply: its last call transfers the chat.
    """
    calls = [
        Action("", (ToolCall(name, dict(arguments), ""),)) for name, arguments in request["actions"]
    ]
    if request["actions"] and request["actions"][-1][0] == "transfer_to_person":
        return calls
    return [*calls, Action(request["reply"])]


def normalise(text: str) -> str:
    """Return `text` normalized for comparison: in lower case, with unified compatibility forms
    (such as full-width digits), without thousands separators, and with ordinals as numbers.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", plain)
    return re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", plain)


def is_told(expected: str, replies: Sequence[str]) -> bool:
    """Return True if one of `replies` contains `expected` as a separate word or number ("3" is not
    in "13" or "3.50").
    """
    pattern = re.compile(rf"(?<!\w)(?<!\d[.-]){re.escape(normalise(expected))}(?!\w|[.-]\d)")
    return any(pattern.search(normalise(reply)) for reply in replies)


_CODE = re.compile(r"\b[arhf][1-4]\b")


def judge(task: Task, state: object, replies: Sequence[str]) -> tuple[float, str | None]:
    """Return 1.0 if `state` equals the reference's state and the replies contain the required
    facts. Otherwise return 0.0 and the reason.

    If a rule's code is required, any other code in the replies results in 0.0, so that reciting the
    list of rules earns nothing.
    """
    required = [str(text) for text in task.data["told"]]
    codes = {text for text in map(normalise, required) if _CODE.fullmatch(text)}
    extra = {code for reply in replies for code in _CODE.findall(normalise(reply))} - codes
    untold = [text for text in required if not is_told(text, replies)]
    if state != _reference_state(task):
        return 0.0, "the database is not in the reference's final state"
    if untold:
        return 0.0, f"the member was not told {', '.join(map(repr, untold))}"
    if codes and extra:
        return 0.0, f"the member was told codes that do not apply: {', '.join(sorted(extra))}"
    return 1.0, None


def _reference_state(task: Task) -> object:
    db = open_database(task.data.get("rows"))
    try:
        for name, arguments in task.data["actions"]:
            call_tool(db, name, arguments)
        return final_state(db)
    finally:
        db.close()


class DeskUser(UserSimulator):
    """The scripted member. It sends the request, then one missing detail per turn. Then it agrees
    to at most `PATIENCE` questions, and ends the conversation.
    """

    PATIENCE = 3
    """The number of questions to which the member agrees after the last detail."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._opening = task["opening"]
        self._lines = details(task)
        self._calls = 0
        self._agreed = 0

    async def reset(self, instruction: str) -> str:
        """Return the request. `instruction` has no effect, because it is for models."""
        return str(self._opening)

    async def step(self, content: str) -> str:
        """Return the next detail. After the last detail, agree to a question, at most `PATIENCE`
        times. Otherwise return thanks and the stop marker.
        """
        self._calls += 1
        if self._lines:
            return self._lines.pop(0)
        if content.rstrip().endswith("?") and self._agreed < self.PATIENCE:
            self._agreed += 1
            return "Yes, please."
        return f"Thank you, that is all. {STOP_MARKER}"

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replies that the member received."""
        return {"user_calls": float(self._calls)}


def details(task: Mapping[str, Any]) -> list[str]:
    """Return what the member writes after the request, in order."""
    return [f"My card is {task['card']}, the postcode {task['postcode']}.", *task.get("more", ())]


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
        """Start `task`. `seed` is for the user simulator. Nothing else is random."""
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
        user = self._user.metrics() if self._user else {}
        return {**tool_error_metrics(self._tool_errors), **user}

    async def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
            if self._user is not None:
                await self._user.close()


_POLICIES = {"full": POLICY, "brief": BRIEF_POLICY}
_GENERATED = {"train": 10_000, "held-out": 1_000}


@cache
def _tasks(split: str) -> tuple[Task, ...]:
    if split == "test":
        rows = handwritten()["tasks"]
    else:
        rows = generate(_GENERATED[split], held_out=split == "held-out")
    return tuple(Task(row["id"], index, split, row) for index, row in enumerate(rows))


class DeskFactory(Factory):
    """The factory of the environment.

    The tasks of `test` are written by hand. The tasks of `train` and `held-out` are generated from
    a seed, each with its own library. No member, book, loan or hold of `test` occurs in them. No
    title and no card occurs in both `train` and `held-out`.

    The setting `policy` selects the system message. `full` (the default) states the rules. `brief`
    omits them, for a model that was trained on the rules.
    """

    name = "desk"
    description = (
        "The service desk of a lending library: 33 tasks and 11,000 generated ones, seven tools, "
        "no server and no download."
    )
    splits: tuple[str, ...] = ("test", "train", "held-out")
    setting = "policy"

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks in order. Raise `UsageError` for an unknown split."""
        self.check_split(split)
        return _tasks(split)

    def make(self, options: EnvironmentOptions) -> Desk:
        """Return a new desk. Raise `UsageError` for an unknown setting or policy."""
        self.check_settings(options.settings)
        return Desk(options, _POLICIES[options.settings.get("policy", "full")])

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise `UsageError` for an unknown setting or policy."""
        super().check_settings(settings)
        policy = settings.get("policy", "full")
        if policy not in list(_POLICIES):  # it need not be hashable
            raise UsageError(f"desk: policy must be full or brief, not {policy!r}")

    def reference(self, task: Task) -> Sequence[Action]:
        """Return the actions that earn 1.0."""
        return reference(task)


DESK = DeskFactory()
