"""Import tau2's domains from the inspect-evals wheel, without inspect_ai.

The wheel (MIT license) contains the data and the tools of tau2-bench (MIT license, Sierra
Research). The tools keep their state in inspect_ai's store. During the import, stand-in modules
replace inspect_ai, so that the tools use this module's store, which belongs to one episode. This
module is written for inspect-evals 0.26.0.

Invariants: nothing is imported before it is needed. `sys.modules` is restored. Two episodes never
share a store.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from toolroll.rollout.errors import UsageError

VERSION = "0.26.0"
INSTALL = f"pip install --no-deps inspect-evals=={VERSION}"
WHEEL = "inspect_evals"

_PACKAGE = f"{WHEEL}.tau2"
_import_lock = threading.RLock()

Store = dict[tuple[type, str | None], Any]
"""The state of one episode. It maps (class of tools, instance name) to the object."""

STORE: ContextVar[Store] = ContextVar("tau2_store")


class ToolError(Exception):
    """Raised by a tool for a mistake in the call."""


class StoreModel(BaseModel):
    """The base class of the wheel's tool classes."""

    model_config = ConfigDict(arbitrary_types_allowed=True)


def store_as(kind: type[Any], instance: str | None = None) -> Any:
    """Return the current episode's object of the class `kind` with the name `instance`. If it does
    not exist, create it.
    """
    store = STORE.get()
    if (kind, instance) not in store:
        store[kind, instance] = kind()
    return store[kind, instance]


@contextmanager
def in_store(store: Store) -> Iterator[None]:
    """Make `store` the store of the current episode."""
    token = STORE.set(store)
    try:
        yield
    finally:
        STORE.reset(token)


def data_folder() -> Path | None:
    """Return the folder with tau2's data in the wheel, or None if the wheel is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        found = Path(folder) / "tau2" / "data"
        if (found / "domains").is_dir():
            return found
    return None


@cache
def load_modules() -> Mapping[str, ModuleType]:
    """Import the domains' modules once. The keys of the result are the modules' names below
    `inspect_evals.tau2`.
    """
    data = data_folder()
    if data is None:
        raise UsageError(f"tau2 is not installed: {INSTALL}")
    names = (
        "airline.tools",
        "airline.AirlineAgentTools",
        "retail.tools",
        "retail.RetailAgentTools",
        "telecom.tools",
        "telecom.user_tools",
        "telecom.environment",
    )
    with _import_lock, _stand_ins(data.parent):
        return {name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names}


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Provide the names of inspect_ai, and the wheel's package without its `__init__`, which would
    import all of inspect_ai.
    """
    stubs = {
        "inspect_ai": _module("inspect_ai"),
        "inspect_ai.tool": _module("inspect_ai.tool", Tool=object, ToolError=ToolError, tool=_tool),
        "inspect_ai.util": _module("inspect_ai.util", StoreModel=StoreModel, store_as=store_as),
        "inspect_ai.model": _module("inspect_ai.model", Content=object, ContentText=object),
        "toml": _module("toml", load=lambda file: tomllib.loads(file.read())),
        _PACKAGE: _module(_PACKAGE, __path__=[str(folder)]),
    }

    def ours(name: str) -> bool:
        return name in stubs or name.split(".")[0] in ("inspect_ai", WHEEL)

    before = {name: module for name, module in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _tool(make: Any) -> Any:
    """Return `make` unchanged. It replaces inspect_ai's decorator."""
    return make


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module
