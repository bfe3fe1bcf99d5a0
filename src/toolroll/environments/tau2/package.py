"""Import tau2's domains from the inspect-evals wheel, without inspect_ai.

The wheel (MIT license) contains the data and the tools of tau2-bench (MIT license, Sierra
Research). The tools keep their state in inspect_ai's store. During the import, stand-in modules
replace inspect_ai, so that the tools use this module's store, which belongs to one episode. This
module is written for inspect-evals 0.28.0.

Invariants: nothing is imported before it is needed. `sys.modules` is restored. Two episodes never
share a store.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
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
from toolroll.rollout.runs.provenance import checkout_commit, package_version

VERSION = "0.28.0"
INSTALL = f"pip install --no-deps inspect-evals=={VERSION}"
WHEEL = "inspect_evals"
WHEEL_COMMIT = "377cecff73b873e63430a0acfce00e0eff024855"
"""The commit of tau2-bench that the wheel's data come from."""
DATA_VARIABLE = "TAU2_DATA_DIR"
"""tau2-bench's own environment variable for its data folder."""

_PACKAGE = f"{WHEEL}.tau2"
_import_lock = threading.RLock()

ToolStore = dict[tuple[type, str | None], Any]
"""The state of one episode. It maps (class of tools, instance name) to the object."""

STORE: ContextVar[ToolStore] = ContextVar("tau2_store")


class Tau2ToolError(Exception):
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
def in_store(store: ToolStore) -> Iterator[None]:
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
        data = Path(folder) / "tau2" / "data"
        if (data / "domains").is_dir():
            return data
    return None


class Data:
    """The folder that tau2's data are read from: of a checkout of tau2-bench (`path` is the
    checkout or its folder `data`), or of the wheel if `path` is None.
    """

    def __init__(self, path: str | None) -> None:
        self.checkout = path is not None
        if path is None:
            wheel = data_folder()
            if wheel is None:
                raise UsageError(f"tau2 is not installed: {INSTALL}")
            self.folder, version = wheel, package_version("inspect-evals")
            self.revision: str | None = f"{WHEEL_COMMIT} (in inspect-evals {version})"
            return
        root = Path(path).expanduser().resolve()
        folders = [root / "data" / "tau2", root / "tau2", root]
        self.folder = next((folder for folder in folders if (folder / "domains").is_dir()), root)
        if not (self.folder / "domains").is_dir():
            raise UsageError(
                f"{path} has no data of tau2-bench; name a checkout of tau2-bench or its folder "
                f"data (setting data, or the environment variable {DATA_VARIABLE})"
            )
        self.revision = checkout_commit(self.folder.parent.parent)

    def file(self, folder: str, stem: str) -> Path:
        """Return the file `stem` with any suffix in `folder`. Raise `UsageError` if there is
        none.
        """
        file = next(iter(sorted((self.folder / folder).glob(f"{stem}.*"))), None)
        if file is None:
            raise UsageError(f"tau2's data have no file {self.folder / folder / stem}.*")
        return file

    def text(self, folder: str, stem: str) -> str:
        """Return the text of the file `stem` in `folder`."""
        return self.file(folder, stem).read_text(encoding="utf-8")


def default_data() -> str | None:
    """Return the path in the environment variable `TAU2_DATA_DIR`, or None if it is not set."""
    return os.environ.get(DATA_VARIABLE) or None


@cache
def load_modules() -> Mapping[str, ModuleType]:
    """Import the domains' modules once. The keys of the result are the modules' names below
    `inspect_evals.tau2`.
    """
    data = data_folder()
    if data is None:
        raise UsageError(f"tau2 is not installed: {INSTALL}")
    names = (
        "airline.tools airline.AirlineAgentTools retail.tools retail.RetailAgentTools "
        "telecom.tools telecom.user_tools telecom.environment"
    ).split()
    with _import_lock, _stand_ins(data.parent):
        return {name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names}


@contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Provide the names of inspect_ai, and the wheel's package without its `__init__`, which would
    import all of inspect_ai.
    """
    stubs = {
        "inspect_ai": _module("inspect_ai"),
        "inspect_ai.tool": _module(
            "inspect_ai.tool", Tool=object, ToolError=Tau2ToolError, tool=lambda make: make
        ),
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


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module
