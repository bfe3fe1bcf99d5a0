"""The settings of `toolroll run`. Options on the command line take precedence over a YAML file, and
the file takes precedence over the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints, did_you_mean


class RunConfig(BaseModel):
    """The settings of one run. The options of `toolroll run` are generated from these fields, and a
    YAML file for --config uses the same names.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    env: str = Field(
        description="An environment: a name from `toolroll envs`, FILE.py:NAME or MODULE:NAME."
    )
    env_args: dict[str, Any] = Field(
        default={},
        description="Arguments for the class or function that makes the environment.",
    )
    model: str = Field(
        description="Folder or name of the served model's tokenizer; `embedded` for the one in the "
        "package. With --baseline-url: the name of the model at that address.",
    )
    engine: str = Field(
        default="http://127.0.0.1:30000",
        description="Address of SGLang or its router, without /v1.",
    )
    parser: str = Field(
        default="auto",
        description="The model's tool call format, a name of SGLang's --tool-call-parser; auto: "
        "infer it from the chat template.",
    )
    chat_template: str | None = Field(
        default=None,
        description="A Jinja file that replaces the tokenizer's chat template.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template."
    )
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="Context length in tokens; needed only if the engine does not report it.",
    )
    engine_timeout: float = Field(
        default=600.0,
        ge=0,
        description="Seconds to keep trying if a server does not answer at all. After that, the "
        "run ends.",
    )
    allow_model_mismatch: bool = Field(
        default=False,
        description="Only warn if the engine serves a model with another tokenizer.",
    )
    split: str | None = Field(
        default=None,
        description="A split of the environment's tasks; default: the first split.",
    )
    tasks: str | None = Field(
        default=None,
        description="Which tasks: 3, 0-9 or 0-4,7; default: all.",
    )
    samples: int = Field(default=1, ge=1, description="Episodes of each task.")
    max_steps: int = Field(
        default=30,
        ge=1,
        description="Maximum number of the model's turns in one episode.",
    )
    seed: int = Field(
        default=0,
        description="The run's seed. Each episode's own seed is derived from it.",
    )
    do_nothing: bool = Field(
        default=True,
        description="Also play the do-nothing baseline: an agent that calls no tool.",
    )
    allow_unequal: bool = Field(
        default=False,
        description="Compute pass@k and pass^k even if tasks have unequal numbers of samples.",
    )
    agent: str = Field(
        default="tool-calling",
        description="The name of an agent, from the entry points `toolroll.agents`.",
    )
    on_invalid_call: Literal["feedback", "respond", "stop"] = Field(
        default="feedback",
        description="After an invalid call: return the error to the model (feedback), send the "
        "reply's text to the user if it has text and no valid call (respond), or end the episode "
        "(stop).",
    )
    parallel_calls: Literal["all", "first", "refuse"] | None = Field(
        default=None,
        description="If a turn has several calls: execute all, execute only the first, or refuse "
        "all; default: the environment's rule.",
    )
    on_length: Literal["stop", "continue"] = Field(
        default="stop",
        description="After a turn that --max-new-tokens truncated: end the episode (stop), or "
        "continue the episode (continue).",
    )
    history: Literal["fork", "preserve"] = Field(
        default="fork",
        description="If the template rewrites earlier turns: start a new sequence (fork), or keep "
        "the earlier tokens (preserve).",
    )
    verify: Literal["off", "sample", "always"] = Field(
        default="sample",
        description="When to check sequences with transformers: never (off), at the end of an "
        "episode (sample), or also after every turn (always).",
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None)
    presence_penalty: float | None = Field(default=None)
    repetition_penalty: float | None = Field(default=None)
    max_new_tokens: int = Field(default=1024, ge=1, description="Maximum tokens of one turn.")
    stop: list[str] | None = Field(
        default=None,
        description="A stop string; may be given several times.",
    )
    sampling_seed: bool = Field(
        default=False,
        description="Send each episode's seed to the engine. SGLang uses it only with "
        "--enable-deterministic-inference.",
    )
    user_model: str | None = Field(default=None, description="The model that plays the user.")
    user_url: str | None = Field(
        default=None,
        description="OpenAI-compatible address of the user's model; default: --baseline-url if it "
        "is given, otherwise --engine with /v1.",
    )
    user_strategy: Literal["llm", "react", "verify", "reflection"] = Field(
        default="llm",
        description="How the user model replies; the names are tau-bench's.",
    )
    user_api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key of the user's model.",
    )
    baseline_url: str | None = Field(
        default=None,
        description="Play the model at this OpenAI-compatible address, without recording tokens.",
    )
    api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key of the baseline.",
    )
    concurrency: int = Field(default=64, ge=1, description="Number of concurrent episodes.")
    processes: int = Field(
        default=1,
        ge=1,
        description="Number of processes on this machine; each plays its share of --concurrency.",
    )
    ray: str | None = Field(
        default=None,
        description="Distribute the episodes over the Ray cluster at this address; `local` starts "
        "a cluster on this machine.",
    )
    ray_workers: int = Field(
        default=4,
        ge=1,
        description="Number of processes on the cluster; each plays its share of --concurrency.",
    )
    gc: bool = Field(
        default=True,
        description="Run Python's garbage collector less often.",
    )
    episode_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Time limit for one attempt at an episode, in seconds.",
    )
    step_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Time limit for one step of the environment, in seconds.",
    )
    max_observation_bytes: int = Field(
        default=1_000_000,
        ge=1,
        description="Limit of the text that one reset or step returns, in bytes. With more, the "
        "attempt fails.",
    )
    reruns: int = Field(
        default=2,
        ge=0,
        description="How often to retry an episode that failed for infrastructure reasons.",
    )
    give_up_after: int | None = Field(
        default=100,
        ge=1,
        description="End the run after this many failed attempts in a row.",
    )
    max_lost: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Exit with status 1 if a larger share of the episodes has no reward.",
    )
    out: Path | None = Field(
        default=None,
        description="Folder of the run; the same command continues a run that was stopped.",
    )
    sync: Literal["always", "end"] = Field(
        default="end",
        description="When to sync episodes to disk: after each one, or at the end of the run.",
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
        return self.model_dump(include=set(_SAMPLING.split()), exclude_none=True)

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
        return self.model_dump(mode="json", exclude=set(FREE))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default values of the settings in `identity`."""
        return {
            name: field.get_default()
            for name, field in cls.model_fields.items()
            if name not in FREE and not field.is_required()
        }


_SAMPLING = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "max_new_tokens stop"
)
PANELS: Mapping[str, str] = {
    "What is played": "env_args split tasks samples max_steps seed do_nothing allow_unequal",
    "Model and engine": "model engine parser chat_template chat_template_kwargs context_length "
    "engine_timeout allow_model_mismatch",
    "Agent": "agent on_invalid_call parallel_calls on_length history verify",
    "Sampling": f"{_SAMPLING} sampling_seed",
    "Simulated user": "user_model user_url user_strategy user_api_key_env",
    "Baseline": "baseline_url api_key_env",
    "Execution": "concurrency processes ray ray_workers gc",
    "Limits and failures": "episode_timeout step_timeout max_observation_bytes reruns "
    "give_up_after max_lost",
    "Files": "out sync",
}
"""The settings in each panel of `toolroll run --help`, separated by spaces."""

FREE = frozenset(
    "engine tasks samples concurrency user_url user_api_key_env baseline_url api_key_env "
    "episode_timeout step_timeout reruns "
    "max_observation_bytes give_up_after max_lost engine_timeout verify processes ray ray_workers "
    "do_nothing gc allow_unequal allow_model_mismatch out sync".split()
)
"""The settings that may differ when a run is continued, such as addresses, the number of episodes,
concurrency, time limits and the handling of failures.
"""


def load_config(path: Path | None, given: dict[str, Any]) -> RunConfig:
    """Return the settings in the YAML file `path`, if there is one. The settings in `given`, from
    the command line, override them, except for values that are None.

    Raise `UsageError` if a setting is unknown, missing or not valid.
    """
    data = {} if path is None else _settings_in(path)
    data |= {name: value for name, value in given.items() if value is not None}
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(complaints(error, lambda name: f"--{name.replace('_', '-')}")) from error


def _settings_in(path: Path) -> dict[str, Any]:
    """Return the settings in the file of --config. Raise `UsageError` if the file does not exist,
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
        raise UsageError(f"--config {path} must hold a mapping from setting names to values")
    for name in loaded:
        if name not in RunConfig.model_fields:
            hint = did_you_mean(str(name), RunConfig.model_fields)
            raise UsageError(f"--config {path}: there is no setting {name!r}{hint}")
    return loaded


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None if `text` is None. `text` is the value of the
    command-line option `option`. Raise `UsageError` if `text` is anything else.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object")
    return value
