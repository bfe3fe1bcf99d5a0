"""tau2's reward for an episode: 1.0 if every part of the task's reward basis holds, else 0.0.

- DB: the final database equals the database after the reference actions.
- COMMUNICATE: one of the agent's messages contains each required text (`communicate_info`).
- ENV_ASSERTION: the assertions about the agent's side and the user's side hold.
- ACTION: each reference action was called, by the agent or the user.
- NL_ASSERTION: a judge model confirms each statement. There is no judge here: `Tau2Factory` refuses
  such tasks, or leaves this part out.

A part without data in the task holds. If the task names no basis, it is DB and COMMUNICATE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.environments.tau2.domain import DEFAULT_BASIS, Call, Domain, State

PARTS = {
    "DB": "database",
    "COMMUNICATE": "communicated",
    "ENV_ASSERTION": "assertions",
    "ACTION": "actions",
}


def grade(
    domain: Domain, task: Mapping[str, Any], state: State, texts: Sequence[str]
) -> dict[str, Any]:
    """Return `{"reward", "database", "communicated", "assertions", "actions"}`. A part that is not
    in the task's reward basis is None. `texts` are the agent's texts, one per message.
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


def _database(domain: Domain, task: Mapping[str, Any], state: State) -> bool:
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


def _is(action: Mapping[str, Any], call: Call) -> bool:
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
