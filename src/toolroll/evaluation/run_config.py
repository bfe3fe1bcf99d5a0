"""The settings of `toolroll run`. Options on the command line take precedence over a YAML file, and
the file takes precedence over the defaults.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.sglang_names import TEXTS
from toolroll.rollout.runtime.targets import absolute_target
from toolroll.rollout.settings import (
    AgentSettings,
    EngineTimeout,
    EnvironmentName,
    EnvironmentSettings,
    GiveUpAfter,
    MaxResumes,
    ModelName,
    Reruns,
    RolloutArgs,
    RunSettings,
    Settings,
)

DEFAULT_SAMPLING: Mapping[str, Any] = {"temperature": 1.0}
_OF_ENGINE: Mapping[str, Any] = {"max_new_tokens": 32768}
"""Defaults for SGLang. The endpoint of a baseline has its own."""


def _as_text(value: Any) -> Any:
    """Return `tasks: 3` and `tasks: [0, 4]` of a YAML file as the option's text."""
    numbers = value if isinstance(value, list) else [value]
    if numbers and all(type(number) is int for number in numbers):
        return ",".join(map(str, numbers))
    return value


class SamplingOptions(Settings):
    """The sampling parameters that have an option of their own, with SGLang's names."""

    temperature: float | None = Field(
        default=None,
        ge=0,
        description="0 is greedy; default, as for top_p, top_k, min_p and repetition_penalty: what "
        "the model's generation_config.json says, else 1.",
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None)
    presence_penalty: float | None = Field(default=None)
    repetition_penalty: float | None = Field(default=None)
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of one turn; default: 32768, or what the context leaves.",
    )
    stop: list[str] | None = Field(
        default=None,
        description="A stop string; may be given several times.",
    )
    lora_path: str | None = Field(
        default=None,
        min_length=1,
        description="The LoRA adapter that samples: its name in SGLang (--lora-paths).",
    )


class RunConfig(RunSettings, RolloutArgs, EnvironmentSettings, AgentSettings, SamplingOptions):
    """The settings of one run. The options of `toolroll run` are generated from these fields, and a
    YAML file for --config uses the same names.
    """

    env: EnvironmentName  # pyright: ignore[reportGeneralTypeIssues] (required here)
    model: ModelName  # pyright: ignore[reportGeneralTypeIssues]
    engine_timeout: EngineTimeout = 600.0  # an evaluation outlives a restart of its engine
    max_resumes: MaxResumes = 3  # a trainer wants a partial episode, an evaluation its result
    reruns: Reruns = 2  # an evaluation wants every episode, a caller in Python each failure
    give_up_after: GiveUpAfter = 100  # nobody watches a long run
    tasks: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        default=None,
        description="Which tasks: 3, 0-9 or 0-4,7; default: all.",
    )
    do_nothing: bool = Field(
        default=True,
        description="Also play the do-nothing baseline: an agent that calls no tool.",
    )
    allow_unequal: bool = Field(
        default=False,
        description="Compute pass@k and pass^k even if tasks have unequal numbers of samples.",
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
    baseline_url: str | None = Field(
        default=None,
        description="Play the model that --model names at this OpenAI-compatible address, without "
        "recording tokens.",
    )
    api_key_env: str | None = Field(
        default=None,
        description="The environment variable that holds the API key of the baseline and, without "
        "--user-url or --baseline-url, of the user's model.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        description="Number of processes; each plays its share of --concurrency. More than "
        "one needs Ray.",
    )
    ray: str | None = Field(
        default=None,
        description="Run the processes on the Ray cluster at this address; default: on this "
        "machine.",
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

    @field_validator("sampling_params")
    @classmethod
    def _known(cls, params: dict[str, Any]) -> dict[str, Any]:
        return params  # the command checks them, unless the server of a baseline does

    @model_validator(mode="before")
    @classmethod
    def _one_home(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_one_home(values)

    @model_validator(mode="before")
    @classmethod
    def _baseline(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("baseline_url") is None or values.get("agent") not in (None, "tool-calling"):
            return values
        return {**values, "agent": "baseline"}

    def params_of(self, seed: int) -> dict[str, Any]:
        """Return the sampling parameters of the episode whose seed is `seed`."""
        return self._sampling | super().params_of(seed)

    @property
    def _sampling(self) -> dict[str, Any]:
        chosen = self.model_dump(include=set(SamplingOptions.model_fields), exclude_none=True)
        return {**DEFAULT_SAMPLING, **(_OF_ENGINE if self.baseline_url is None else {}), **chosen}

    def with_defaults(self, defaults: Mapping[str, Any]) -> RunConfig:
        """Return the settings with those sampling parameters of `defaults` that are not set."""
        unset = {name: defaults[name] for name in defaults if getattr(self, name) is None}
        return self.model_copy(update=unset)

    @property
    def agent_settings(self) -> dict[str, Any]:
        """The settings that are passed to the function that makes the agent."""
        settings = super().agent_settings
        if self.baseline_url is None:
            return settings
        del settings["on_length"], settings["verify"]
        server = {name: getattr(self, name) for name in ("model", "api_key_env", "engine_timeout")}
        return settings | server | {"endpoint": self.baseline_url}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the episodes. A run can be continued only if they are the
        same.
        """
        return self.model_dump(mode="json", exclude=set(FREE)) | self._sampling

    @property
    def options(self) -> dict[str, Any]:
        """The other settings that are needed to play the run again, without secrets. `env` says
        where the environment's file is.
        """
        from toolroll.rollout.runs.provenance import without_secrets  # slow to import

        free = self.model_dump(mode="json", include=set(FREE - {"out", "sync"}))
        hidden = {name: without_secrets(free[name]) for name in free if isinstance(free[name], str)}
        return free | hidden | {"env": absolute_target(self.env)}


PANELS: Mapping[str, str] = {
    "What is played": "env_args split tasks samples max_turns seed do_nothing allow_unequal",
    "Model and engine": "model engine parser chat_template chat_template_kwargs "
    "trust_remote_code context_length "
    "engine_timeout max_resumes allow_model_mismatch return_routed_experts",
    "Agent": "agent command agent_args on_invalid_call parallel_calls on_length history verify",
    "Sampling": " ".join([*SamplingOptions.model_fields, "sampling_params sampling_seed"]),
    "Simulated user": "user_model user_url user_strategy",
    "Baseline": "baseline_url api_key_env",
    "Execution": "concurrency cache_share session_cache affinity processes ray pace_gc",
    "Limits and failures": "episode_timeout step_timeout max_observation_bytes reruns "
    "give_up_after max_lost",
    "Files": "out sync",
}
"""The settings in each panel of `toolroll run --help`, separated by spaces."""

FREE = frozenset(
    "engine tasks samples concurrency cache_share affinity user_url baseline_url "
    "api_key_env episode_timeout step_timeout reruns max_resumes "
    "max_observation_bytes give_up_after max_lost engine_timeout verify processes ray do_nothing "
    "pace_gc allow_unequal allow_model_mismatch session_cache out sync".split()
)
"""The settings that may differ when a run is continued, such as addresses, the number of episodes,
concurrency, time limits and the handling of failures.
"""


def sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters in the `settings` of a run."""
    options = {name: settings.get(name) for name in SamplingOptions.model_fields}
    params = options | (settings.get("sampling_params") or {})
    return {name: value for name, value in params.items() if value is not None}


def played_with(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the split, the model, the environment's arguments and the sampling parameters in the
    `settings` of a run.
    """
    names = {name: settings[name] for name in ("split", "model", "env_args") if settings.get(name)}
    return names | sampling_of(settings)


def with_one_home(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `values`, with each of the `sampling_params` that has an option of its
    own moved there. Raise `UsageError` if both are given and differ.
    """
    params = values.get("sampling_params")
    if not isinstance(params, Mapping):
        return dict(values)
    for name, value in params.items():
        if isinstance(value, str) and name not in TEXTS:
            raise UsageError(f"--sampling-params: {name} cannot be the text {value!r}")
    own = {name: params[name] for name in SamplingOptions.model_fields if name in params}
    for name, value in own.items():
        if values.get(name, value) != value:
            raise UsageError(
                f"--{name.replace('_', '-')} is {values[name]!r}, and --sampling-params says "
                f"{value!r}: give one of them"
            )
    return {**values, **own, "sampling_params": {k: params[k] for k in params.keys() - own.keys()}}


def load_config(
    path: Path | None, options: dict[str, Any], recorded: Mapping[str, Any] = {}
) -> RunConfig:
    """Return the settings in the YAML file `path`, if there is one. They override those of a
    `recorded` run. `options`, from the command line, override both, except for values that are
    None.

    Raise `UsageError` if a setting is unknown, missing or not valid.
    """
    values = {} if path is None else _settings_in(path)
    env = options["env"] or values.get("env")
    if env is None:
        raise UsageError("name an environment, as in toolroll run desk, or give --config or --from")
    if values.get("env", env) != env:
        raise UsageError(
            f"--config {path}: env is {values['env']!r}, but the command plays {env!r}: "
            "name the environment only in the command"
        )
    chosen = with_one_home({name: value for name, value in options.items() if value is not None})
    values = with_one_home(values)
    in_file = values.keys() - chosen.keys()
    values = {**recorded, **values, **chosen}
    for name in sorted(FREE & values.keys()):
        if "***" in str(values[name]) and values[name] == recorded.get(name):
            raise UsageError(f"{values[name]} lacks its secret: give --{name.replace('_', '-')}")

    def name_of(name: str) -> str:
        in_config = name.partition(".")[0] in in_file
        return f"--config {path}: {name}" if in_config else f"--{name.replace('_', '-')}"

    return RunConfig.read(values, name_of=name_of)


def _settings_in(path: Path) -> dict[str, Any]:
    """Return the settings in the file of --config. Raise `UsageError` if the file does not exist,
    cannot be read, or contains an unknown setting.
    """
    if not path.is_file():
        raise UsageError(f"--config {path}: there is no such file")
    try:
        data = path.read_bytes()
        loaded = yaml.safe_load(data) or {}
        pairs = getattr(yaml.compose(data, yaml.SafeLoader), "value", ())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise UsageError(f"--config {path} cannot be read: {line}{problem}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {path} must hold a mapping from setting names to values")
    names = [key.value for key, _ in pairs]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"--config {path} sets {twice[0]} more than once")
    RunConfig.check_names(loaded, where=f"--config {path}")
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
        raise UsageError(f"{option} is not JSON: {error}: {text:.200}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object")
    return value
