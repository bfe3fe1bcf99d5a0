"""The reference actions of a task, and the reward of an episode."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.environments.desk.database import final_state, open_database
from toolroll.agents.environments.desk.tools import call_tool
from toolroll.parsers.types import ToolCall
from toolroll.rollout.types import Action, Task


def reference(task: Task) -> list[Action]:
    """Return the actions that earn 1.0 in `task` with the scripted member."""
    data = task.data
    calls = [Action("", (ToolCall("find_member", {"card": data["card"]}, ""),))]
    if "requests" in data:
        return [_WELCOME, *calls, *(step for one in data["requests"] for step in settled(one))]
    more = [Action("I see. Anything else?") for _ in data.get("more", ())]
    reply = " ".join(["All settled.", *(f"Please note: {text}." for text in data["told"])])
    return [_WELCOME, *more, *calls, *settled({"actions": data["actions"], "reply": reply})]


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


def is_told(wanted: str, replies: Sequence[str]) -> bool:
    """Return True if one of `replies` contains `wanted` as a separate word or number ("3" is not in
    "13" or "3.50").
    """
    pattern = re.compile(rf"(?<!\w)(?<!\d[.-]){re.escape(normalise(wanted))}(?!\w|[.-]\d)")
    return any(pattern.search(normalise(reply)) for reply in replies)


_CODE = re.compile(r"\b[arhf][1-4]\b")


def judge(task: Task, state: object, replies: Sequence[str]) -> tuple[float, str | None]:
    """Return 1.0 if `state` equals the reference's state and the replies contain the required
    facts. Otherwise return 0.0 and the reason.

    If a rule's code is required, any other code in the replies results in 0.0, so that reciting the
    list of rules earns nothing.
    """
    told = [str(text) for text in task.data["told"]]
    codes = {normalise(text) for text in told} & set(_CODE.findall(normalise(" ".join(told))))
    extra = {code for reply in replies for code in _CODE.findall(normalise(reply))} - codes
    untold = [text for text in told if not is_told(text, replies)]
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
