"""`RecordedRun`: what `run.json` records of an environment's run, to play it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolroll.evaluation.run_config import RunConfig
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.provenance import Provenance, latest
from toolroll.rollout.runs.run_directory import SETTINGS_NAME, difference, read_run_file
from toolroll.rollout.runtime.targets import is_target

_OF_ONE_RUN = frozenset({"date", "command", "options"})
_TARGETS = frozenset({"env", "agent"})
RUNNING = _TARGETS | {"command", "trust_remote_code"}
"""The settings whose value may be code, or a program, that is run."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The settings and the latest provenance of the run of an environment."""

    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """All that is recorded, by name."""
        return {**self.provenance.get("options", {}), **self.provenance, **self.settings}

    @property
    def values(self) -> dict[str, Any]:
        """The settings of `toolroll run`. `env` says where the environment's file is."""
        values = {**self.settings, **self.provenance.get("options", {})}
        return {name: values[name] for name in RunConfig.model_fields if name in values}

    def differences(self, settings: Mapping[str, Any], provenance: Provenance) -> list[str]:
        """Return one line for each value that differs in a new run."""
        then, now = ({**self.provenance, **self.settings}, {**provenance, **settings})
        return difference(*({n: f[n] for n in f.keys() - _OF_ONE_RUN} for f in (then, now)))


def recorded_runs(folder: Path) -> dict[str, RecordedRun]:
    """Return the runs in `folder` by environment, or {} if there is no `run.json`."""
    file = read_run_file(folder)
    return {
        env: RecordedRun(settings, latest(file["provenance"].get(env, ())))
        for env, settings in file["environments"].items()
    }


def recorded_run(path: Path, env: str | None) -> RecordedRun:
    """Return the run of `env` in `path`, the folder of a run or its `run.json`.

    `env` may be None if there is only one environment, and may name the environment's file. Raise
    `UsageError` if the run cannot be found.
    """
    runs = recorded_runs(path.parent if path.name == SETTINGS_NAME else path)
    if env in runs:
        return runs[env]
    if len(runs) != 1 or not (env is None or is_target(env)):
        names = ", ".join(runs) or "it has none"
        raise UsageError(f"--from {path}: name one of its environments: {names}")
    return next(iter(runs.values()))


def refuse_code(values: Mapping[str, Any], names: Collection[str], *, how: str) -> None:
    """Raise `UsageError` if one of the recorded `values` with these `names` is code that would be
    run: files of somebody else run nothing by surprise. `how`: what the user can do.
    """
    for name in names:
        value = values.get(name)
        if value and (name not in _TARGETS or is_target(str(value))):
            raise UsageError(
                f"{SETTINGS_NAME} names code that would be run ({name}: {value}): {how}, or give "
                "--trust if you trust its author"
            )
