"""`Domain`: the data that all episodes of one tau2 domain share, and the state of one episode.

Invariants: shared objects never change. The state of an episode is in its own store. The error of a
tool is returned as the tool's result.
"""

from __future__ import annotations

import copy
import gzip
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from toolroll.agents.environments.tau2.copies import copies, digest, quick_digest
from toolroll.agents.environments.tau2.package import (
    Store,
    ToolError,
    data_folder,
    in_store,
    load_modules,
)
from toolroll.agents.environments.tau2.schemas import tool_schema
from toolroll.rollout.types import Tool

Call = tuple[str, Mapping[str, Any]]
READ_ONLY = frozenset({"calculate", "transfer_to_human_agents"})
"""Tools that are not methods of the classes and that change nothing."""


@dataclass(frozen=True)
class Domain:
    """One domain. `functions` maps the names of the agent's tools to their functions.
    `user_functions` maps the names of the simulated user's tools, which only telecom has.
    """

    name: str
    policy: str
    guidelines: str
    tasks: Sequence[Mapping[str, Any]]
    splits: Mapping[str, Sequence[str]]
    tools: Sequence[Tool]
    user_tools: Sequence[Tool]
    functions: Mapping[str, Callable[..., Any]]
    user_functions: Mapping[str, Callable[..., Any]]
    fresh: Mapping[tuple[type, str | None], Callable[[], Any]]
    """The functions that create the objects in the store of a new episode."""
    _expected: dict[tuple[str, Callable[[Any], str]], str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, task: Mapping[str, Any]) -> State:
        """Return the state of a new episode, after the task's initial actions."""
        state = State(self, {key: make() for key, make in self.fresh.items()})
        for action in (task.get("initial_state") or {}).get("initialization_actions") or ():
            state.do(action["env_type"], action["func_name"], action["arguments"])
        return state

    def is_expected(self, task: Mapping[str, Any], database: Any) -> bool:
        """Return True if `database` equals the database after the task's reference actions."""
        return quick_digest(database) == self._digest(task, quick_digest) or digest(
            database
        ) == self._digest(task, digest)

    def _digest(self, task: Mapping[str, Any], of: Callable[[Any], str]) -> str:
        """Apply the digest function `of` to the database after the task's reference actions.

        The digest is cached by task and digest function.
        """
        with self._lock:
            if (task["id"], of) not in self._expected:
                state = self.begin(task)
                for action in (task["evaluation_criteria"] or {}).get("actions") or ():
                    if action["name"] not in READ_ONLY:
                        with suppress(ToolError):  # some reference actions fail
                            state.do("assistant", action["name"], action["arguments"])
                self._expected[task["id"], of] = of(state.database)
            return self._expected[task["id"], of]


class State:
    """One episode's databases, and the calls that each side ("assistant" or "user") has made."""

    def __init__(self, domain: Domain, store: Store) -> None:
        self._domain = domain
        self._store = store
        self.calls: dict[str, list[Call]] = {"assistant": [], "user": []}

    def call(self, side: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool of `side`. Return its result, and True if the result is an error."""
        self.calls[side].append((name, arguments))
        functions = self._domain.functions if side == "assistant" else self._domain.user_functions
        if name not in functions:
            return f"Error: there is no tool named {name!r}", True
        try:
            with in_store(self._store):
                return _finish(functions[name](**copy.deepcopy(dict(arguments)))), False
        except Exception as error:  # noqa: BLE001 - the benchmark's rule: an error is a result
            return f"Error: {error}", True

    def do(self, side: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call the method `name` of the object with the tools of `side`. Unlike `call`, this also
        works for methods that are not tools, such as those for assertions and initial actions.
        """
        with in_store(self._store):
            if self._domain.name != "telecom":
                return getattr(next(iter(self._store.values())), name)(
                    **copy.deepcopy(dict(arguments))
                )
            environment = load_modules()["telecom.environment"].get_environment()
            found = getattr(
                environment.tools if side == "assistant" else environment.user_tools, name
            )(**arguments)
            environment.sync_tools()
            return found

    @property
    def database(self) -> Any:
        """The agent's database."""
        return next(iter(self._store.values())).db


def _finish(running: Any) -> str:
    """Return the result of a tool's coroutine, which must not wait."""
    try:
        running.send(None)
    except StopIteration as done:
        return str(done.value)
    running.close()
    raise RuntimeError("a tool of tau2 waited for something")


def load_domain(name: str) -> Domain:
    """Read a domain of the wheel. Raise `UsageError` if the wheel is not installed."""
    modules = load_modules()
    data = data_folder()
    assert data is not None
    folder = data / "domains" / name
    functions = {make.__name__: make() for make in vars(modules[f"{name}.tools"])[_ALL[name]]}
    user_functions: dict[str, Callable[..., Any]] = {}
    if name == "telecom":
        user_functions = {
            make.__name__: make() for make in modules["telecom.user_tools"].all_telecom_user_tools
        }
    guidelines = (
        "simulation_guidelines_tools.txt" if user_functions else "simulation_guidelines.txt"
    )
    return Domain(
        name=name,
        policy=_policy(folder, name),
        guidelines=(data / "user_simulator" / guidelines).read_text(encoding="utf-8"),
        tasks=_tasks(folder),
        splits=orjson.loads((folder / "split_tasks.json").read_bytes()),
        tools=[tool_schema(tool, function) for tool, function in functions.items()],
        user_tools=[tool_schema(tool, function) for tool, function in user_functions.items()],
        functions=functions,
        user_functions=user_functions,
        fresh=_fresh(name),
    )


_ALL = {
    "airline": "all_airline_tools",
    "retail": "all_retail_tools",
    "telecom": "all_telecom_agent_tools",
}


def _fresh(name: str) -> dict[tuple[type, str | None], Callable[[], Any]]:
    """Return functions that create the initial objects of the wheel's store."""
    modules = load_modules()
    store: Store = {}
    with in_store(store):
        if name == "telecom":
            modules["telecom.environment"].get_environment()
        elif name == "airline":
            modules["airline.AirlineAgentTools"].get_airline_tools()
        else:
            modules["retail.tools"].get_retail_tools()
    return {key: copies(made) for key, made in store.items()}


def _tasks(folder: Path) -> list[Mapping[str, Any]]:
    packed = folder / "tasks.json.gz"
    raw = (
        gzip.decompress(packed.read_bytes())
        if packed.is_file()
        else (folder / "tasks.json").read_bytes()
    )
    found: list[Mapping[str, Any]] = orjson.loads(raw)
    return found


def _policy(folder: Path, name: str) -> str:
    if name != "telecom":
        return f"<policy>\n{(folder / 'policy.txt').read_text(encoding='utf-8')}\n</policy>"
    parts = {"main_policy": "main_policy.txt", "tech_support_policy": "tech_support_manual.txt"}
    return "\n".join(
        f"<{tag}>\n{(folder / file).read_text(encoding='utf-8')}\n</{tag}>"
        for tag, file in parts.items()
    )
