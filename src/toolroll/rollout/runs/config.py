"""The settings of `toolroll run`. Options on the command line take precedence over a YAML file, and
the file takes precedence over the defaults.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints

_MODEL: JsonDict = {"panel": "Model and engine"}
_PLAYED: JsonDict = {"panel": "What is played"}
_AGENT: JsonDict = {"panel": "Agent"}
_SAMPLING: JsonDict = {"panel": "Sampling"}
_USER: JsonDict = {"panel": "Simulated user"}
_BASELINE: JsonDict = {"panel": "Baseline"}
_EXECUTION: JsonDict = {"panel": "Execution"}
_FAILURES: JsonDict = {"panel": "Limits and failures"}
_FILES: JsonDict = {"panel": "Files"}


class RunConfig(BaseModel):
    """The settings of one run. The options of `toolroll run` are generated from these fields, and a
    YAML file for --config uses the same names.
    """

    model_config = ConfigDict(extra="forbid")

    env: str = Field(
        description="An environment: a name of `toolroll envs`, FILE.py:NAME or MODULE:NAME."
    )
    env_args: dict[str, Any] = Field(
        default={},
        description="The arguments of the class or function that makes the environment.",
        json_schema_extra=_PLAYED,
    )
    model: str = Field(
        description="Folder or name of the served model's tokenizer; `embedded` for the one in the "
        "package. With --baseline-url: the name of the model at that address.",
        json_schema_extra=_MODEL,
    )
    engine: str = Field(
        default="http://127.0.0.1:30000",
        description="Address of SGLang or its router, without /v1.",
        json_schema_extra=_MODEL,
    )
    parser: str = Field(
        default="auto",
        description="The model's tool call format, a name of SGLang's --tool-call-parser; auto: "
        "infer it from the chat template.",
        json_schema_extra=_MODEL,
    )
    chat_template: str | None = Field(
        default=None,
        description="A Jinja file that replaces the tokenizer's chat template.",
        json_schema_extra=_MODEL,
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template.", json_schema_extra=_MODEL
    )
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="In tokens; needed only if the engine does not report it.",
        json_schema_extra=_MODEL,
    )
    engine_timeout: float = Field(
        default=600.0,
        ge=0,
        description="Seconds to wait for a server that does not answer at all.",
        json_schema_extra=_MODEL,
    )
    allow_model_mismatch: bool = Field(
        default=False,
        description="Only warn if the engine serves a model with another tokenizer.",
        json_schema_extra=_MODEL,
    )
    split: str | None = Field(
        default=None,
        description="A split of the environment's tasks; default: its first.",
        json_schema_extra=_PLAYED,
    )
    tasks: str | None = Field(
        default=None,
        description="Which tasks: 3, 0-9 or 0-4,7; default: all.",
        json_schema_extra=_PLAYED,
    )
    samples: int = Field(
        default=1, ge=1, description="Episodes of each task.", json_schema_extra=_PLAYED
    )
    max_steps: int = Field(
        default=30,
        ge=1,
        description="Limit of the model's turns in one episode.",
        json_schema_extra=_PLAYED,
    )
    seed: int = Field(
        default=0,
        description="The run's seed. Each episode's own seed is derived from it.",
        json_schema_extra=_PLAYED,
    )
    do_nothing: bool = Field(
        default=True,
        description="Also play the do-nothing baseline: an agent that calls no tool.",
        json_schema_extra=_PLAYED,
    )
    allow_unequal: bool = Field(
        default=False,
        description="Compute pass@k even if tasks have unequal numbers of samples.",
        json_schema_extra=_PLAYED,
    )
    agent: str = Field(
        default="tool-calling",
        description="An agent's name (entry points `toolroll.agents`).",
        json_schema_extra=_AGENT,
    )
    on_invalid_call: Literal["feedback", "respond", "stop"] = Field(
        default="feedback",
        description="After a call that cannot be parsed: return the error to the model "
        "(feedback), take the text as a reply (respond), or end the episode (stop).",
        json_schema_extra=_AGENT,
    )
    parallel_calls: Literal["all", "first", "refuse"] | None = Field(
        default=None,
        description="If a turn has several calls: execute all, execute only the first, or refuse "
        "all; default: the environment's rule.",
        json_schema_extra=_AGENT,
    )
    on_length: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do after a turn that was cut by --max-new-tokens.",
        json_schema_extra=_AGENT,
    )
    history: Literal["fork", "preserve"] = Field(
        default="fork",
        description="If the template rewrites earlier turns: start a new sequence (fork), or keep "
        "what was served (preserve).",
        json_schema_extra=_AGENT,
    )
    verify: Literal["off", "sample", "always"] = Field(
        default="sample",
        description="When to check sequences with transformers: never (off), at the end of an "
        "episode (sample), or also after every turn (always).",
        json_schema_extra=_AGENT,
    )
    temperature: float = Field(
        default=1.0, ge=0, description="0 is greedy.", json_schema_extra=_SAMPLING
    )
    top_p: float | None = Field(default=None, gt=0, le=1, json_schema_extra=_SAMPLING)
    top_k: int | None = Field(default=None, json_schema_extra=_SAMPLING)
    min_p: float | None = Field(default=None, ge=0, le=1, json_schema_extra=_SAMPLING)
    frequency_penalty: float | None = Field(default=None, json_schema_extra=_SAMPLING)
    presence_penalty: float | None = Field(default=None, json_schema_extra=_SAMPLING)
    repetition_penalty: float | None = Field(default=None, json_schema_extra=_SAMPLING)
    max_new_tokens: int = Field(
        default=1024, ge=1, description="Limit of tokens in one turn.", json_schema_extra=_SAMPLING
    )
    stop: list[str] | None = Field(
        default=None,
        description="A stop string; may be given several times.",
        json_schema_extra=_SAMPLING,
    )
    sampling_seed: bool = Field(
        default=False,
        description="Send each episode's seed to the engine.",
        json_schema_extra=_SAMPLING,
    )
    user_model: str | None = Field(
        default=None, description="The model that plays the user.", json_schema_extra=_USER
    )
    user_url: str | None = Field(
        default=None,
        description="OpenAI-compatible address of the user's model; default: --baseline-url, or "
        "--engine with /v1.",
        json_schema_extra=_USER,
    )
    user_strategy: Literal["llm", "react", "verify", "reflection"] = Field(
        default="llm",
        description="How the user model replies; the names are tau-bench's.",
        json_schema_extra=_USER,
    )
    user_api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key of the user's model.",
        json_schema_extra=_USER,
    )
    baseline_url: str | None = Field(
        default=None,
        description="Play the model at this OpenAI-compatible address, without recording tokens.",
        json_schema_extra=_BASELINE,
    )
    api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key of the baseline.",
        json_schema_extra=_BASELINE,
    )
    concurrency: int = Field(
        default=64, ge=1, description="Episodes at the same time.", json_schema_extra=_EXECUTION
    )
    processes: int = Field(
        default=1,
        ge=1,
        description="Number of processes on this machine; each plays its share of --concurrency.",
        json_schema_extra=_EXECUTION,
    )
    ray: str | None = Field(
        default=None,
        description="Distribute the episodes over the Ray cluster at this address; `local` starts "
        "a cluster on this machine.",
        json_schema_extra=_EXECUTION,
    )
    ray_workers: int = Field(
        default=4,
        ge=1,
        description="Number of processes on the cluster; each plays its share of --concurrency.",
        json_schema_extra=_EXECUTION,
    )
    gc: bool = Field(
        default=True,
        description="Run Python's garbage collector less often.",
        json_schema_extra=_EXECUTION,
    )
    episode_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds for one attempt at an episode.",
        json_schema_extra=_FAILURES,
    )
    step_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds for one step of the environment.",
        json_schema_extra=_FAILURES,
    )
    max_observation_bytes: int = Field(
        default=1_000_000,
        ge=1,
        description="Limit of text in one reset or step, in bytes; more is a failure.",
        json_schema_extra=_FAILURES,
    )
    reruns: int = Field(
        default=2,
        ge=0,
        description="How often to retry an episode that failed for infrastructure reasons.",
        json_schema_extra=_FAILURES,
    )
    give_up_after: int | None = Field(
        default=100,
        ge=1,
        description="End the run after this many failed attempts in a row.",
        json_schema_extra=_FAILURES,
    )
    out: Path | None = Field(
        default=None,
        description="Folder of the run; the same command continues a run that was stopped.",
        json_schema_extra=_FILES,
    )
    sync: Literal["always", "end"] = Field(
        default="end",
        description="When to sync episodes to disk: after each one, or at the end of the run.",
        json_schema_extra=_FILES,
    )

    @model_validator(mode="after")
    def _one_spread(self) -> RunConfig:
        if self.ray is not None and self.processes > 1:
            raise ValueError(
                "give either --processes (on this machine) or --ray (on a cluster, with "
                "--ray-workers), not both"
            )
        return self

    @model_validator(mode="after")
    def _baseline(self) -> RunConfig:
        if self.baseline_url is not None and self.agent == "tool-calling":
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
        """The settings that are passed to the function that creates the agent."""
        names = ["on_invalid_call", "parallel_calls", "step_timeout", "max_observation_bytes"]
        if self.baseline_url is None:
            names += ["on_length", "verify"]
            return {name: getattr(self, name) for name in names}
        names += ["model", "api_key_env", "engine_timeout"]
        return {name: getattr(self, name) for name in names} | {"endpoint": self.baseline_url}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the episodes. A run can be continued only if they are the
        same.
        """
        return {
            name: value for name, value in self.model_dump(mode="json").items() if name not in FREE
        }

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default values of the settings in `identity`."""
        fields = cls.model_fields.items()
        return {
            name: field.get_default()
            for name, field in fields
            if name not in FREE and not field.is_required()
        }


OLD_NAMES = {"floor": "do_nothing", "endpoint": "baseline_url"}
"""The new name of each setting that an earlier version named differently. Options and YAML files
may still use the old names.
"""

FREE = frozenset(
    "engine tasks samples concurrency user_url user_api_key_env baseline_url api_key_env "
    "episode_timeout step_timeout reruns "
    "max_observation_bytes give_up_after engine_timeout verify processes ray ray_workers "
    "do_nothing gc allow_unequal allow_model_mismatch out sync".split()
)
"""The settings that may differ when a run is continued, such as addresses, the number of episodes,
concurrency, time limits and the handling of failures.
"""


def load_config(path: Path | None, given: dict[str, Any]) -> RunConfig:
    """Return the settings in the file `path`. The settings in `given`, from the command line,
    override them (None means "not given").
    """
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
    """Return the settings in the file of --config. Raises `UsageError` if the file does not exist,
    cannot be read, or contains an unknown setting.
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
        if name not in RunConfig.model_fields and name not in OLD_NAMES:
            close = difflib.get_close_matches(str(name), RunConfig.model_fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--config {path}: there is no setting {name!r}{hint}")
    return {OLD_NAMES.get(str(name), str(name)): value for name, value in loaded.items()}


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """Return the JSON object in the value of a command-line option."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object")
    return value
