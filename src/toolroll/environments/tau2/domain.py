"""`Tau2Domain`: the data that all episodes of one tau2 domain share, and the state of one episode.

A deep copy of airline's database takes 0.25 s, most of it for the flights. A tool can change a
flight only through `_get_flight` (inspect-evals 0.28.0). So episodes share the flights and copy a
flight when that method first returns it. The small tables are copied.

Invariants: shared objects never change. The state of an episode is in its own store. The error of a
tool is returned as the tool's result.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import inspect
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel, Field, TypeAdapter, create_model

from toolroll.agents.environments.factory import openai_tool
from toolroll.environments.tau2.package import (
    Data,
    Tau2ToolError,
    ToolStore,
    in_store,
    load_modules,
)
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.signature import read_docstring
from toolroll.rollout.types import Tool

_TOOLS_OF_ONE_DATABASE = {"db", "initialized"}


def copies(tools: Any) -> Callable[[], Any]:
    """Return a function that makes copies of `tools`, one of the wheel's tool objects.

    Reading a database from its JSON takes a third of the time of a deep copy. This leaves out all
    other fields of the tools, so tools that have some (telecom's, with a small database) are copied
    deeply. Of airline's database, the flights are shared.
    """
    kind = type(tools)
    if set(kind.model_fields) != _TOOLS_OF_ONE_DATABASE:
        return lambda: copy.deepcopy(tools)
    if "flights" in type(tools.db).model_fields:
        return _airline_copies(tools)
    database, text = type(tools.db), tools.db.model_dump_json()
    return lambda: kind(db=database.model_validate_json(text), initialized=True)


def _airline_copies(tools: Any) -> Callable[[], Any]:
    database = type(tools.db)
    parts = {
        name: TypeAdapter(database.model_fields[name].annotation)
        for name in ("users", "reservations")
    }
    texts = {name: part.dump_json(getattr(tools.db, name)) for name, part in parts.items()}
    kind = _with_own_flights(type(tools))

    def make() -> Any:
        small = {name: part.validate_json(texts[name]) for name, part in parts.items()}
        return kind(
            db=database.model_construct(flights=dict(tools.db.flights), **small), initialized=True
        )

    return make


def _with_own_flights(kind: type[Any]) -> type[Any]:
    """Return a subclass of `kind` whose objects copy a flight when they first read it."""

    def get_flight(self: Any, flight_number: str) -> Any:
        flight = kind._get_flight(self, flight_number)
        if flight_number not in self._own:
            self._own.add(flight_number)
            flight = self.db.flights[flight_number] = copy.deepcopy(flight)
        return flight

    body = {
        "__module__": kind.__module__,
        "__annotations__": {"_own": set},
        "_own": set(),
        "_get_flight": get_flight,
    }
    return type(kind.__name__, (kind,), body)


def quick_digest(database: Any) -> str:
    """Return a hash of a database. Databases with equal hashes are equal. If the hashes differ,
    compare `digest`, because the databases may differ only in the order of keys.
    """
    return hashlib.sha256(database.model_dump_json().encode()).hexdigest()


def digest(database: Any) -> str:
    """Return a hash that does not depend on the order of keys. Two databases have equal digests if
    their tau2 hashes are equal.
    """
    data = orjson.loads(database.model_dump_json())
    return hashlib.sha256(orjson.dumps(data, option=orjson.OPT_SORT_KEYS)).hexdigest()


# Other headings, such as `Checks:`, are part of the description.
_SECTION = re.compile(r"^\s*(?:Args|Returns|Raises):\s*$", re.MULTILINE)


def tool_schema(name: str, function: Callable[..., Any]) -> Tool:
    """Return `{"type": "function", "function": {name, description, parameters}}`. Nested models
    keep their `$defs`.
    """
    description = _SECTION.split(inspect.getdoc(function) or "", maxsplit=1)[0]
    _, described = read_docstring(function)
    hints = typing.get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (
            hints.get(parameter.name, Any),
            Field(default=default, description=described.get(parameter.name)),
        )
    model: type[BaseModel] = create_model(name, **fields)
    parameters = model.model_json_schema()
    parameters.pop("title", None)
    for value in parameters.get("properties", {}).values():
        value.pop("title", None)
    return openai_tool(name, " ".join(description.split()), parameters)


Tau2Call = tuple[str, Mapping[str, Any]]
DEFAULT_BASIS = ("DB", "COMMUNICATE")
"""tau2's reward basis for a task that names none. The wheel's airline and retail tasks are such."""


@dataclass(frozen=True)
class Tau2Domain:
    """One domain. `functions` maps the names of the agent's tools to their functions.
    `user_functions` maps the names of the simulated user's tools, which only telecom has.
    """

    name: str
    revision: str
    """The commit of tau2-bench that the data come from."""
    judged: int
    """The number of tasks whose reward depends on statements that a model must judge."""
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
                for action in task["evaluation_criteria"].get("actions") or ():
                    side = action.get("requestor") or "assistant"
                    state.call(side, action["name"], action["arguments"])  # some of them fail
                self._expected[task["id"], of] = of(state.database)
            return self._expected[task["id"], of]


class State:
    """One episode's databases, the calls that both sides ("assistant" and "user") have made, and
    the number of failed calls.
    """

    def __init__(self, domain: Tau2Domain, store: ToolStore) -> None:
        self._domain = domain
        self._store = store
        self.calls: list[Tau2Call] = []
        self.errors = 0

    def call(self, side: str, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool of `side`. Return its result, and True if the result is an error."""
        self.calls.append((name, arguments))
        functions = self._domain.functions if side == "assistant" else self._domain.user_functions
        try:
            if name not in functions:
                raise Tau2ToolError(f"there is no tool named {name!r}")
            with in_store(self._store):
                return _finish(functions[name](**copy.deepcopy(dict(arguments)))), False
        except Exception as error:  # noqa: BLE001 - the benchmark's rule: an error is a result
            self.errors += 1
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
            result = getattr(
                environment.tools if side == "assistant" else environment.user_tools, name
            )(**arguments)
            environment.sync_tools()
            return result

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


def load_domain(name: str, data: Data) -> Tau2Domain:
    """Read a domain. The tools are the wheel's. Raise `UsageError` if the wheel is not installed,
    or if a task needs something that is not supported.
    """
    modules = load_modules()
    folder = f"domains/{name}"
    functions = {make.__name__: make() for make in vars(modules[f"{name}.tools"])[_ALL[name]]}
    if data.checkout and name == "retail":
        functions["get_item_details"] = get_item_details
    user_functions: dict[str, Callable[..., Any]] = {}
    if name == "telecom":
        user_functions = {
            make.__name__: make() for make in modules["telecom.user_tools"].all_telecom_user_tools
        }
    guidelines = "simulation_guidelines_tools" if user_functions else "simulation_guidelines"
    tasks = _tasks(data, folder)
    digest_of_tasks = hashlib.sha256(data.file(folder, "tasks").read_bytes()).hexdigest()
    domain = Tau2Domain(
        name=name,
        revision=data.revision or f"without a commit (SHA-256 of the tasks: {digest_of_tasks})",
        judged=sum(map(_needs_judge, tasks)),
        policy=_policy(data, folder),
        guidelines=data.text("user_simulator", guidelines),
        tasks=tasks,
        splits=orjson.loads(data.file(folder, "split_tasks").read_bytes()),
        tools=[tool_schema(tool, function) for tool, function in functions.items()],
        user_tools=[tool_schema(tool, function) for tool, function in user_functions.items()],
        functions=functions,
        user_functions=user_functions,
        fresh=_fresh(name, data),
    )
    for task in domain.tasks:
        _check(domain, task)
    return domain


_ALL = {
    "airline": "all_airline_tools",
    "retail": "all_retail_tools",
    "telecom": "all_telecom_agent_tools",
}


async def get_item_details(item_id: str) -> str:
    """Get the inventory details of an item.

    Args:
        item_id: The item id, such as '6086499569'. Be careful the item id is different from the \
product id.
    """
    # tau2-bench has this tool since 1.0.0, so the wheel has none.
    for product in load_modules()["retail.tools"].get_retail_tools().db.products.values():
        if item_id in product.variants:
            return str(product.variants[item_id].model_dump_json())
    raise Tau2ToolError("Item not found")


def _check(domain: Tau2Domain, task: Mapping[str, Any]) -> None:
    """Raise `UsageError` if `task` needs something that is not supported. Newer data could."""
    criteria = task.get("evaluation_criteria") or {}
    names = {*domain.functions, *domain.user_functions}
    supported = {"ENV_ASSERTION", "COMMUNICATE", "ACTION", "NL_ASSERTION"}
    if domain.name != "telecom":  # no task of telecom compares its two databases
        supported.add("DB")
    initial = task.get("initial_state") or {}
    unsupported = [
        *sorted({action["name"] for action in criteria.get("actions") or ()} - names),
        *sorted(set(criteria.get("reward_basis") or ()) - supported),
        *(key for key in ("initialization_data", "message_history") if initial.get(key)),
    ]
    if unsupported:
        raise UsageError(
            f"tau2/{domain.name}: task {task['id']} (tau2-bench {domain.revision}) needs "
            f"{', '.join(unsupported)}, which toolroll does not support; use other data"
        )


def _needs_judge(task: Mapping[str, Any]) -> bool:
    criteria = task.get("evaluation_criteria") or {}
    basis = criteria.get("reward_basis", DEFAULT_BASIS)
    return "NL_ASSERTION" in basis and bool(criteria.get("nl_assertions"))


def _fresh(name: str, data: Data) -> dict[tuple[type, str | None], Callable[[], Any]]:
    """Return functions that create the initial objects of the wheel's store."""
    modules = load_modules()
    store: ToolStore = {}
    with in_store(store):
        if name == "telecom":
            modules["telecom.environment"].get_environment()
        elif name == "airline":
            modules["airline.AirlineAgentTools"].get_airline_tools()
        else:
            modules["retail.tools"].get_retail_tools()
    if data.checkout:
        for tools in store.values():
            stem = "user_db" if "UserTools" in type(tools).__name__ else "db"
            tools.db = type(tools.db).load(str(data.file(f"domains/{name}", stem)))
    return {key: copies(tools) for key, tools in store.items()}


def _tasks(data: Data, folder: str) -> list[Mapping[str, Any]]:
    file = data.file(folder, "tasks")
    content = file.read_bytes()
    tasks: list[Mapping[str, Any]] = orjson.loads(
        gzip.decompress(content) if file.suffix == ".gz" else content
    )
    return tasks


def _policy(data: Data, folder: str) -> str:
    if not folder.endswith("telecom"):
        return f"<policy>\n{data.text(folder, 'policy')}\n</policy>"
    parts = {"main_policy": "main_policy", "tech_support_policy": "tech_support_manual"}
    return "\n".join(f"<{tag}>\n{data.text(folder, stem)}\n</{tag}>" for tag, stem in parts.items())
