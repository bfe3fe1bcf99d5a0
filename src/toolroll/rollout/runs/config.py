"""The settings of `toolroll run`: the command line over a YAML file over the defaults."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.usage_errors import complaints


class RunConfig(BaseModel):
    """One run. A YAML file given with --config holds the same names."""

    model_config = ConfigDict(extra="forbid")

    env: str
    env_args: dict[str, Any] = Field(
        default={},
        description="JSON: arguments of the class or function that makes the environment.",
    )
    engine: str = "http://127.0.0.1:30000"
    model: str = Field(
        description="folder or name of the tokenizer; `embedded` for the one in the package"
    )
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    parser: str = "qwen25"
    agent: str = "tool-calling"
    split: str | None = None
    tasks: str | None = None
    samples: int = Field(default=1, ge=1)
    max_steps: int = Field(default=30, ge=1)
    concurrency: int = Field(default=64, ge=1)
    seed: int = 0
    history: Literal["fork", "preserve"] = "fork"
    verify: Literal["off", "sample", "always"] = "sample"
    on_invalid_call: Literal["feedback", "respond", "stop"] = "feedback"
    parallel_calls: Literal["all", "first", "refuse"] = "all"
    on_length: Literal["stop", "continue"] = "stop"
    temperature: float = Field(default=1.0, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int = Field(default=1024, ge=1)
    stop: list[str] | None = None
    user_model: str | None = None
    user_url: str | None = None
    user_strategy: Literal["llm", "react", "verify", "reflection"] = "llm"
    user_api_key_env: str | None = None
    context_length: int | None = Field(default=None, ge=1)
    endpoint: str | None = None
    api_key_env: str | None = None
    episode_timeout: float | None = Field(default=None, gt=0)
    step_timeout: float | None = Field(default=None, gt=0)
    max_observation_bytes: int = Field(default=1_000_000, ge=1)
    reruns: int = Field(default=2, ge=0)
    give_up_after: int | None = Field(default=100, ge=1)
    engine_timeout: float = Field(default=600.0, ge=0)
    sampling_seed: bool = False
    processes: int = Field(
        default=1, ge=1, description="of this machine; each plays its share of the concurrency"
    )
    ray: str | None = Field(
        default=None, description="a Ray cluster's address; `local` starts one here"
    )
    ray_workers: int = Field(default=4, ge=1)
    floor: bool = True
    allow_unequal: bool = False
    gc: bool = True
    allow_model_mismatch: bool = Field(
        default=False, description="only warn if the engine serves a model with another tokenizer"
    )
    out: Path | None = None
    sync: Literal["always", "end"] = "end"

    @model_validator(mode="after")
    def _one_spread(self) -> RunConfig:
        if self.ray is not None and self.processes > 1:
            raise ValueError(
                "--processes is for this machine and --ray for a cluster, with its own "
                "--ray-workers: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _baseline(self) -> RunConfig:
        if self.endpoint is not None and self.agent == "tool-calling":
            self.agent = "baseline"
        return self

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that are sent to the engine."""
        names = (
            "temperature top_p top_k min_p frequency_penalty presence_penalty "
            "repetition_penalty max_new_tokens stop"
        ).split()
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def agent_settings(self) -> dict[str, Any]:
        """What the agent is made with."""
        names = ["on_invalid_call", "parallel_calls", "step_timeout", "max_observation_bytes"]
        baseline = ["endpoint", "model", "api_key_env", "engine_timeout"]
        names += baseline if self.endpoint is not None else ["on_length", "verify"]
        return {name: getattr(self, name) for name in names}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the episodes follow from: those in which a run that goes on must
        agree with its folder.
        """
        return {
            name: value for name, value in self.model_dump(mode="json").items() if name not in FREE
        }

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of every setting of `identity` that has one."""
        fields = cls.model_fields.items()
        return {
            name: field.get_default()
            for name, field in fields
            if name not in FREE and not field.is_required()
        }


FREE = frozenset(
    "engine tasks samples concurrency user_url user_api_key_env endpoint api_key_env "
    "episode_timeout step_timeout reruns "
    "max_observation_bytes give_up_after engine_timeout verify processes ray ray_workers floor gc "
    "allow_unequal allow_model_mismatch out sync".split()
)
"""What may differ when a run goes on: where things are served, how much is played, how failures
are met, what is shown.
"""


def default(name: str) -> Any:
    """What the setting `name` is where nothing is given."""
    return RunConfig.model_fields[name].get_default()


def load_config(path: Path | None, given: dict[str, Any]) -> RunConfig:
    """The settings in `path`, overruled by those `given` on the command line (None: not given)."""
    data: dict[str, Any] = {}
    if path is not None:
        data |= _settings_in(path)
    data |= {name: value for name, value in given.items() if value is not None}
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        words = "; ".join(
            f"--{name.replace('_', '-')}: {said}" if name else said
            for name, said in complaints(error)
        )
        raise UsageError(words) from error


def _settings_in(path: Path) -> dict[str, Any]:
    """What the file --config holds. Raises `UsageError` where it is none, cannot be read, or
    names a setting that is unknown.
    """
    if not path.is_file():
        raise UsageError(f"--config {path}: there is no such file")
    try:
        loaded = yaml.safe_load(path.read_bytes()) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"--config {path} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {path} must hold a mapping of settings")
    for name in loaded:
        if name not in RunConfig.model_fields:
            close = difflib.get_close_matches(str(name), RunConfig.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--config {path}: there is no setting {name!r}{hint}")
    return loaded


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """The JSON object in a command-line option."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object")
    return value
