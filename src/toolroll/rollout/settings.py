"""The settings of rollouts. Each setting is defined once, with its name, default and help text:
here, or in the class that is its only user.

The first classes are parts. The others combine them:

    RolloutArgs      the model that is played                 Model.from_args
    RunSettings      the episodes of a run                    Runner
    RunConfig        RolloutArgs, RunSettings, AgentSettings  toolroll run
    EpisodeSettings  the same for trainers                    the adapters
    ServeArgs        RolloutArgs, EndpointSettings            toolroll serve
    EngineConfig     EngineSettings, time limits, retries     Engine

`EmbeddedEngineSettings` are those of the embedded engine, which replaces SGLang in tests.

A class that needs another default overrides it, with a comment that says why. Names that a
framework prescribes are translated by its adapter, and those of slime's published tau-bench example
by `read_args`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from yarl import URL

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints, did_you_mean

_USER_INFO = re.compile(r"([a-z][a-z0-9+.-]*://)([^/?#]*)@(.*)", re.IGNORECASE | re.DOTALL)


def split_credentials(url: str) -> tuple[str, str | None]:
    """Return `url` without its user and password, and the Authorization header that sends them.

    The header is None if `url` has no user and password. They must not appear in messages.
    """
    match = _USER_INFO.fullmatch(url)
    if match is None:
        return url, None
    scheme, info, address = match.groups()
    user, _, password = info.partition(":")
    encoded = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return f"{scheme}{address}", f"Basic {encoded}"


def _engine_address(value: str) -> str:
    """Return the address without `/generate`. Raise `ValueError` if it cannot be an engine's."""
    public = split_credentials(value)[0]
    url = public.rstrip("/").removesuffix("/generate")
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"the engine's address must begin with http:// or https://, not {public!r}"
        )
    try:
        host = URL(url).raw_host or ""
        host.encode("idna")
    except ValueError as error:
        raise ValueError(f"the engine's address {public!r} is not valid: {error}") from error
    if url.endswith("/v1"):
        raise ValueError(
            f"{public!r} is an OpenAI-compatible address; give the engine's own, without /v1: "
            f"{url.removesuffix('/v1')}"
        )
    if not host:
        raise ValueError(f"the engine's address {public!r} has no host")
    return value.rstrip("/").removesuffix("/generate")


def _parser_name(value: str) -> str:
    """Return the name. Raise `ValueError` if there is no such parser."""
    from toolroll.parsers.registry import get_parser  # imports all formats

    if value != "auto" and not value.startswith("sglang:"):  # SGLang is a large import
        get_parser(value)
    return value


# The types of settings that several classes have, or whose default differs somewhere.

EnvironmentName = Annotated[
    str,
    Field(description="An environment: a name from `toolroll envs`, FILE.py:NAME or MODULE:NAME."),
]
EngineAddress = Annotated[
    str,
    AfterValidator(_engine_address),
    Field(description="Address of SGLang or its router, without /v1."),
]
ModelName = Annotated[
    str,
    Field(
        description="Folder or name of the served model's tokenizer; `embedded` for the one in the "
        "package."
    ),
]
EngineTimeout = Annotated[
    float,
    Field(
        ge=0,
        description="Seconds to keep trying if a server does not answer at all; 0: fail after a "
        "few retries.",
    ),
]
MaxResumes = Annotated[
    int,
    Field(
        ge=0,
        description="Maximum number of times that one turn is resumed after the engine aborted it "
        "(for a weight update).",
    ),
]
RoutedExperts = Annotated[
    bool,
    Field(
        description="Record the experts of each token of an MoE model; SGLang needs "
        "--enable-return-routed-experts."
    ),
]
Verify = Annotated[
    Literal["off", "sample", "always"],
    Field(
        description="When to check the recorded tokens with transformers: never (off), before an "
        "episode or a session is returned (sample), or also after every turn (always)."
    ),
]
Reruns = Annotated[
    int,
    Field(
        ge=0,
        description="How often to retry an episode that failed for infrastructure reasons.",
    ),
]
Affinity = Annotated[
    int,
    Field(
        ge=1,
        description="Number of a task's samples that a router sends to one worker, whose cache "
        "then holds their first prompt; 1: each sample goes to any worker.",
    ),
]
GiveUpAfter = Annotated[
    int | None,
    Field(gt=0, description="End the run after this many failed attempts in a row."),
]


class Settings(BaseModel):
    """The base of all settings. Raise `UsageError` for an unknown name or a wrong value."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __init__(self, **values: Any) -> None:
            self.check_names(values, where=type(self).__name__)
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UsageError(complaints(error)) from error

    @field_validator("*", mode="before")
    @classmethod
    def _check_switch(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if value is False and "off" in get_args(kind):  # YAML reads the word off as false
            return "off"
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value

    @classmethod
    def read(
        cls, values: Mapping[str, Any], *, name_of: Callable[[str], str] = str, where: str = ""
    ) -> Self:
        """Return `values`, which come from a file or from other code, as an instance.

        `name_of` converts a setting to the name that the user knows, such as a flag. `where` is the
        start of error messages.
        """
        cls.check_names(values, name_of=name_of, where=where)
        try:
            return cls(**values)
        except UsageError as error:
            if isinstance(error.__cause__, ValidationError):
                prefix = f"{where}: " if where else ""
                raise UsageError(f"{prefix}{complaints(error.__cause__, name_of)}") from error
            raise

    @classmethod
    def check_names(
        cls, names: Iterable[str], *, name_of: Callable[[str], str] = str, where: str = ""
    ) -> None:
        """Raise `UsageError` if one of `names` is not a setting."""
        for name in names:
            if name not in cls.model_fields:
                everything = f"; there are {', '.join(sorted(map(name_of, cls.model_fields)))}"
                hint = did_you_mean(
                    name, cls.model_fields, everything, beginnings=True, name_of=name_of
                )
                prefix = f"{where}: " if where else ""
                raise UsageError(f"{prefix}there is no setting {name_of(name)!r}{hint}")

    def filled(self, **values: Any) -> Self:
        """Return the settings with `values` for those that were not set. None has no effect."""
        missing = {
            name: value
            for name, value in values.items()
            if value is not None and name not in self.model_fields_set
        }
        return type(self)(**{**self.model_dump(exclude_unset=True), **missing})

    def part(self, *kinds: type[Settings]) -> dict[str, Any]:
        """Return the settings that `kinds` have, by name."""
        names: Iterable[str] = {name for kind in kinds for name in kind.model_fields}
        return {name: getattr(self, name) for name in names}


# --- the parts ------------------------------------------------------------------------------------


class EngineSettings(Settings):
    """What an engine client needs besides the address."""

    engine_timeout: EngineTimeout = 0.0
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="Context length in tokens; needed only if the engine does not report it.",
    )
    allow_model_mismatch: bool = Field(
        default=False, description="Only warn if the engine serves a model with another tokenizer."
    )
    session_cache: bool = Field(
        default=True,
        description="Let SGLang keep the prefixes of running episodes and sessions, if it was "
        "started to do so (docs/sglang.md).",
    )


class ModelSettings(EngineSettings):
    """How the model's prompts are made, and how its replies are read."""

    parser: Annotated[str, AfterValidator(_parser_name)] = Field(
        default="auto",
        description="The model's tool call format, a name of SGLang's --tool-call-parser; auto: "
        "infer it from the chat template.",
    )
    chat_template: str | None = Field(
        default=None,
        description="A Jinja file, Jinja text, or a Python function FILE.py:NAME that renders; it "
        "replaces the tokenizer's chat template.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the tokenizer class that the model's folder contains."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template."
    )
    history: Literal["fork", "scaffold", "preserve"] = Field(
        default="fork",
        description="If the template rewrites earlier turns: start a new sequence (fork), do so "
        "unless it only removes the generation prompt's scaffold (scaffold), or keep the earlier "
        "tokens (preserve).",
    )
    verify: Verify = "sample"
    max_resumes: MaxResumes = 0
    max_observation_bytes: int = Field(
        default=1_000_000,
        ge=1,
        description="Limit of the text that one reset or step returns, in bytes. With more, the "
        "attempt fails.",
    )


class ProcessSettings(Settings):
    """How a process plays."""

    concurrency: int = Field(default=64, ge=1, description="Number of concurrent episodes.")
    cache_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the engine's KV cache that the episodes may fill; with more of them, "
        "some wait between turns; 0: none waits.",
    )
    pace_gc: bool = Field(default=True, description="Run Python's garbage collector less often.")


class EnvironmentSettings(Settings):
    """The environment, and which of its tasks are played."""

    env: EnvironmentName = ""
    env_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments for the class or function that makes the environment.",
    )
    split: str | None = Field(
        default=None,
        description="A split of the environment's tasks; default: the first split.",
    )


class EpisodeLimits(Settings):
    """The limits of an episode, and its seed."""

    max_turns: int = Field(
        default=30, ge=1, description="Maximum number of the model's turns in one episode."
    )
    seed: int = Field(
        default=0, description="The seed. Each episode's own seed is derived from it."
    )
    reruns: Reruns = 0


class AgentSettings(Settings):
    """The agent, and its rules for a reply."""

    agent: str = Field(
        default="tool-calling",
        description="The name of an agent, from the entry points `toolroll.agents`.",
    )
    command: str | None = Field(
        default=None, description="The command that the agent `program` runs in each task's folder."
    )
    agent_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments for the agent."
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
        description="After a turn that max_new_tokens truncated: end the episode (stop), or "
        "continue the episode (continue).",
    )
    step_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Time limit for one step of the environment, in seconds.",
    )

    @property
    def agent_settings(self) -> dict[str, Any]:
        """The settings that are passed to the function that makes the agent."""
        excluded = {"agent", "command", "agent_args"}
        names = {*AgentSettings.model_fields, "verify", "max_observation_bytes"} - excluded
        command = {} if self.command is None else {"command": self.command}
        return self.model_dump(include=names) | command | self.agent_args


# --- for Python -----------------------------------------------------------------------------------


class RolloutArgs(ModelSettings, ProcessSettings):
    """The model that is played: its engine, tokenizer, template and parser."""

    engine: EngineAddress = "http://127.0.0.1:30000"
    model: ModelName = ""
    return_routed_experts: RoutedExperts = False


class RunSettings(EpisodeLimits, ProcessSettings):
    """The episodes of a run. `model` is the name that is stored with each episode."""

    sampling_params: dict[str, Any] = Field(
        default_factory=dict, description="Sampling parameters, by SGLang's names."
    )
    model: ModelName = ""
    samples: int = Field(default=1, ge=1, description="Episodes of each task.")
    episode_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Time limit for one attempt at an episode, in seconds.",
    )
    give_up_after: GiveUpAfter = None
    affinity: Affinity = 1
    sampling_seed: bool = Field(
        default=False,
        description="Send each episode's seed to the engine. SGLang uses it only with "
        "--enable-deterministic-inference.",
    )

    @field_validator("sampling_params")
    @classmethod
    def _one_reply(cls, params: dict[str, Any]) -> dict[str, Any]:
        if params.get("n", 1) != 1:
            raise ValueError(f"n must be 1, not {params['n']!r}, because a turn has one reply")
        return params

    def params_of(self, seed: int) -> dict[str, Any]:
        """Return the sampling parameters of the episode whose seed is `seed`."""
        return dict(self.sampling_params) | ({"sampling_seed": seed} if self.sampling_seed else {})


class EmbeddedEngineSettings(Settings):
    """The options of `toolroll engine`. If `tokenizer`, `script` or `latency` is given, the engine
    sends scripted replies instead of a model's, and `model` must be None.
    """

    model: str | None = Field(
        default=None,
        description="Folder of a small Llama model, which is sampled with numpy; default: "
        "`desk-1m`, the model in the package; not with --script, --tokenizer or --latency, which "
        "are for scripted replies.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Folder or name of the tokenizer for scripted replies; default: `embedded`, "
        "the one in the package.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=30000, ge=0, le=65535, description="0: any free port.")
    script: Path | None = Field(
        default=None,
        description='JSON file of scripted replies: {"ENV/TASK#SAMPLE": ["reply", ...]} for '
        'toolroll run, {"SESSION": ["reply", ...]} for toolroll serve; without --script, but with '
        "--tokenizer or --latency, each reply gives the number of tokens in its prompt.",
    )
    context_length: int | None = Field(
        default=None,
        ge=1,
        description="In tokens; default: the model's, or 32768 for a script.",
    )
    latency: float = Field(default=0.0, ge=0, description="Seconds that each scripted reply takes.")
    seed: int = Field(default=0, description="The seed of the sampling.")
