"""Load a domain's data and functions from the `tau_bench` package.

Invariants: nothing is imported before it is needed. Importing tau-bench does not require litellm,
and does not let litellm download its price list. `sys.modules` and the environment variables are
restored. This module is written for tau-bench's commit 59a200c6.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toolroll.agents.chat_client import FINISHED
from toolroll.rollout.errors import UsageError, UserSimulatorError
from toolroll.rollout.types import Tool

COMMIT = "59a200c6d575d595120f1cb70fea53cef0632f6b"
INSTALL = f"pip install --no-deps git+https://github.com/sierra-research/tau-bench@{COMMIT}"

_PRICE_LIST_SWITCH = "LITELLM_LOCAL_MODEL_COST_MAP"
_ATTEMPTS = 3
_import_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class TauBenchDomain:
    """One domain of tau-bench as its package defines it. All episodes share it, and it never
    changes.

    `tasks` are the package's own task objects for one split. `invoke[name]` is a tool:
    `invoke[name](data=..., **arguments)`. `user_prompt` is the package's prompt for a simulated
    user, with the placeholder `{instruction}`. `to_hashable` and `consistent_hash` are the
    package's functions that define the reward.
    """

    name: str
    split: str
    tasks: Sequence[Any]
    data: Mapping[str, Any]
    invoke: Mapping[str, Callable[..., Any]]
    tools_info: Sequence[Tool]
    terminate_tools: frozenset[str]
    wiki: str
    user_prompt: str
    to_hashable: Callable[[Any], Any]
    consistent_hash: Callable[[Any], str]


def installed(package: str, domain: str) -> bool:
    """Return True if `package` is installed and is this benchmark. PyPI has a different package of
    the same name.
    """
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return bool(folders) and any(
        (Path(folder) / "envs" / domain / "env.py").is_file() for folder in folders or ()
    )


def load_domain(package: str, domain: str, split: str) -> TauBenchDomain:
    """Return the domain with its database and the tasks of `split`, as the package loads them.

    Raise `UsageError` if the package is not installed.
    """
    if not installed(package, domain):
        raise UsageError(f"tau-bench is not installed: {INSTALL}")
    envs = import_module(f"{package}.envs")
    base = import_module(f"{package}.envs.base")
    users = import_module(f"{package}.envs.user")
    # "human" is the only strategy whose constructor does not call a model. With task_index=None,
    # tau-bench would draw an index that may be out of range.
    env = envs.get_env(domain, user_strategy="human", user_model="", task_split=split, task_index=0)
    prompt = object.__new__(users.LLMUserSimulationEnv).build_system_prompt(
        instruction="{instruction}"
    )
    return TauBenchDomain(
        name=domain,
        split=split,
        tasks=env.tasks,
        data=env.data,
        invoke={name: tool.invoke for name, tool in env.tools_map.items()},
        tools_info=env.tools_info,
        terminate_tools=frozenset(env.terminate_tools),
        wiki=env.wiki,
        user_prompt=prompt,
        to_hashable=base.to_hashable,
        consistent_hash=base.consistent_hash,
    )


def import_module(name: str) -> ModuleType:
    """Import a module of tau-bench. During the import, a stand-in replaces litellm, unless litellm
    is already imported.
    """
    with _import_lock:
        if name in sys.modules:
            return sys.modules[name]
        with _stand_in_for_litellm():
            return importlib.import_module(name)


@contextmanager
def _stand_in_for_litellm() -> Iterator[None]:
    """Replace litellm, whose `completion` tau-bench imports. The stand-in loads litellm at the
    first call.
    """
    if "litellm" in sys.modules:
        yield
        return
    stand_in = ModuleType("litellm")
    vars(stand_in).update(completion=whole_completion, provider_list=[])
    sys.modules["litellm"] = stand_in
    try:
        yield
    finally:
        if sys.modules.get("litellm") is stand_in:
            del sys.modules["litellm"]


def whole_completion(*args: Any, **kwargs: Any) -> Any:
    """Call litellm's `completion`, up to `_ATTEMPTS` times if the answer is unfinished. After that,
    or if the token limit truncated an answer, raise `UserSimulatorError`.
    """
    finish = ""
    for _ in range(_ATTEMPTS):
        answer = import_litellm().completion(*args, **kwargs)
        finish = answer.choices[0].finish_reason if answer.choices else "no choices"
        if finish in FINISHED:
            return answer
        if finish == "length":  # the same request would have the same limit
            raise UserSimulatorError(
                "the token limit truncated the user model's answer (finish_reason 'length')"
            )
    raise UserSimulatorError(
        f"{_ATTEMPTS} answers of the model were unfinished (the last finish_reason: {finish!r})"
    )


def import_litellm() -> ModuleType:
    """Import litellm, and prevent it from downloading its price list during the import.

    Raise `UsageError` if it is not installed.
    """
    with _import_lock, _local_price_list():
        try:
            return importlib.import_module("litellm")
        except ModuleNotFoundError as error:
            if error.name != "litellm":
                raise
            raise UsageError(
                "tau-bench's own user simulators need litellm: pip install litellm (or use a model "
                "behind an OpenAI-compatible endpoint as the user: --user-model)"
            ) from error


@contextmanager
def _local_price_list() -> Iterator[None]:
    """Set the variable that prevents litellm from downloading a price list during its import."""
    before = os.environ.get(_PRICE_LIST_SWITCH)
    os.environ[_PRICE_LIST_SWITCH] = "True" if before is None else before
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PRICE_LIST_SWITCH, None)
