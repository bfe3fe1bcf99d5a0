"""tau2's reward for an episode. It is 1.0 if all criteria of the task are met, else 0.0.

For airline and retail, the final database must equal the database after the reference actions, and
the agent's texts must contain every required text (`communicate_info`). For telecom, the assertions
about the agent's side and the user's side must hold. If the reward basis of a telecom task contains
ACTION, the reference actions must also have been called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.environments.tau2.domain import Call, Domain, State


def grade(
    domain: Domain, task: Mapping[str, Any], state: State, texts: Sequence[str]
) -> dict[str, Any]:
    """Return `{"reward", "database", "communicated", "assertions", "actions"}`. A criterion that
    the task does not have is None.
    """
    criteria = task.get("evaluation_criteria") or {}
    found: dict[str, Any] = dict.fromkeys(("database", "communicated", "assertions", "actions"))
    if domain.name == "telecom":
        found["assertions"] = _assertions(criteria, state)
        if "ACTION" in (criteria.get("reward_basis") or ()):
            found["actions"] = all(_done(action, state) for action in criteria.get("actions") or ())
    else:
        if criteria.get("actions") is not None:
            found["database"] = domain.is_expected(task, state.database)
        text = "\n".join(texts).lower().replace(",", "")
        found["communicated"] = all(
            str(info).lower() in text for info in criteria.get("communicate_info") or ()
        )
    return {"reward": float(all(value is not False for value in found.values())), **found}


def _assertions(criteria: Mapping[str, Any], state: State) -> bool:
    return all(
        state.do(one["env_type"], one["func_name"], one["arguments"])
        == one.get("assert_value", True)
        for one in criteria.get("env_assertions") or ()
    )


def _done(action: Mapping[str, Any], state: State) -> bool:
    return any(_is(action, call) for call in state.calls[action.get("requestor") or "assistant"])


def _is(action: Mapping[str, Any], call: Call) -> bool:
    name, arguments = call
    if name != action["name"]:
        return False
    compared = action.get("compare_args")
    if name == "transfer_to_human_agents" or compared == []:
        return True
    if compared is None:
        return same(arguments, action["arguments"])
    return same(
        {key: arguments.get(key) for key in compared},
        {key: action["arguments"].get(key) for key in compared},
    )


def same(left: Any, right: Any) -> bool:
    """Return True if two JSON values are equal, except for the order of lists."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        rest = list(right)
        for item in left:
            at = next((index for index, other in enumerate(rest) if same(item, other)), None)
            if at is None:
                return False
            del rest[at]
        return not rest
    return bool(left == right)
