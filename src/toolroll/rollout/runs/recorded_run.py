"""`RecordedRun`: what `run.json` records of an environment's run, to play it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.provenance import Provenance
from toolroll.rollout.runs.run_config import RunConfig
from toolroll.rollout.runs.run_directory import (
    SETTINGS_NAME,
    difference,
    read_provenance,
    read_settings,
)

_OF_ONE_RUN = frozenset({"date", "command", "options"})


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The settings and the latest provenance of the run of an environment."""

    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, env: str | None) -> Self:
        """Return the run of `env` in `path`, a run's folder or its `run.json`.

        `env` may be None if there is only one environment, and may name the environment's file.
        Raise `UsageError` if the run cannot be found.
        """
        folder = path.parent if path.name == SETTINGS_NAME else path
        runs, provenance = read_settings(folder), read_provenance(folder)
        name = env if env in runs else next(iter(runs)) if len(runs) == 1 else None
        if name is None:
            raise UsageError(
                f"--from {path}: name one of its environments: {', '.join(runs) or 'it has none'}"
            )
        return cls(runs[name], provenance.get(name, {}))

    @property
    def values(self) -> dict[str, Any]:
        """The settings of `toolroll run`."""
        recorded = {**self.settings, **self.provenance.get("options", {})}
        return {name: recorded[name] for name in RunConfig.model_fields if name in recorded}

    def differences(self, settings: Mapping[str, Any], provenance: Provenance) -> list[str]:
        """Return one line for each value that differs in a new run."""
        then, now = ({**self.provenance, **self.settings}, {**provenance, **settings})
        return difference(*({n: f[n] for n in f.keys() - _OF_ONE_RUN} for f in (then, now)))
