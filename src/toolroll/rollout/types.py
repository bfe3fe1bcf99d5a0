"""The nouns of a rollout, and the two protocols (`Environment`, `Agent`) between its parts.

Frozen, slotted dataclasses without behaviour beyond their own checks. Every list of a `Trajectory`
is aligned to the whole sequence; each framework's own form is a slice of it. Field names are the
field's: `input_ids`, `loss_mask`, `logprobs`, `finish_reason`, `weight_version`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from toolroll.parsers.types import ToolCall

Message = dict[str, Any]
"""One chat message in OpenAI's format: role, content, and tool_calls / tool_call_id / name where
they apply.
"""

Tool = dict[str, Any]
"""One tool in OpenAI's format: {"type": "function", "function": {"name", "description",
"parameters"}}.
"""

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.uint8]
LogprobArray = npt.NDArray[np.float32]


class Status(Enum):
    """Outcome of an episode (the published names)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class StopReason(StrEnum):
    """Why an episode ended. `status_of` gives the `Status` that belongs to each."""

    DONE = "done"  # reported by the environment
    # too many unreadable calls in a row, or the policy is to stop at the first
    INVALID_CALLS = "invalid_calls"
    MAX_STEPS = "max_steps"
    LENGTH = "length"  # a turn was cut by max_new_tokens
    CONTEXT_FULL = "context_full"  # the next prompt leaves no room to answer
    ENGINE_ABORT = "engine_abort"  # the engine aborted (a weight update, say) and was not resumed
    ENGINE_ERROR = "engine_error"
    ENVIRONMENT_ERROR = "environment_error"
    USER_ERROR = "user_error"
    TOKEN_ERROR = "token_error"  # the tokens could not be kept exact
    TEMPLATE_ERROR = "template_error"  # the chat template refuses the conversation
    TIME_LIMIT = "time_limit"
    INTERNAL_ERROR = "internal_error"


_TRUNCATED = frozenset({StopReason.MAX_STEPS, StopReason.LENGTH, StopReason.CONTEXT_FULL})
_COMPLETED = frozenset({StopReason.DONE, StopReason.INVALID_CALLS})


def status_of(reason: StopReason) -> Status:
    """The status that `reason` stands for. What the model did not cause is ABORTED: its reward
    is None, never 0.
    """
    if reason in _COMPLETED:
        return Status.COMPLETED
    return Status.TRUNCATED if reason in _TRUNCATED else Status.ABORTED


Record = TypeVar("Record")


def _pickled_by_field(kind: type[Record]) -> type[Record]:
    """Let a frozen dataclass be pickled as its values: as dataclasses with slots do it, in
    Python, an episode takes twice as long.
    """
    values = attrgetter(*(part.name for part in fields(kind)))  # type: ignore[arg-type]
    kind.__reduce__ = lambda self: (kind, values(self))  # type: ignore[method-assign]
    return kind


# --- tokens ---------------------------------------------------------------------------------------


@_pickled_by_field
@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Tokens [start, stop) were sampled under weights `version`. Positions count from the list
    they stand in.
    """

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of the engine's `/generate`.

    `input_ids_json` may hold the same ids as JSON text ("1,2,3", without brackets), and
    `highest_id` the highest of them as unsigned numbers: the session keeps both, so that encoding
    and checking a request cost O(new tokens). `session_id` becomes the routing key. `extra` are
    further top-level fields of the body.
    """

    input_ids: IdArray
    sampling_params: Mapping[str, Any]
    session_id: str
    return_logprob: bool = True
    input_ids_json: bytes | None = None
    highest_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's answer, checked and unchanged.

    `output_ids` int32 [n], the stop token included; `logprobs` float32 [n] at the effective
    temperature, or None if they were not requested. `finish_reason` is "stop", "length" or
    "abort"; `matched` the stop token id or stop string. `text` is the engine's own detokenised text
    (it lacks the stop token: docs of SGLang 0.5.23), for logs only. `latency` in seconds, over all
    attempts.
    """

    output_ids: IdArray
    logprobs: LogprobArray | None
    finish_reason: str
    matched: int | str | None = None
    text: str = ""
    weight_versions: tuple[WeightVersion, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    latency: float = 0.0
    attempts: int = 1
    rid: str = ""
    routed_experts: npt.NDArray[np.int32] | None = None
    """[prompt + output - 1, layers * top_k] if `return_routed_experts` was set: all
    tokens but the last one.
    """
    top_logprobs: Sequence[Sequence[tuple[float, int]]] | None = None
    """For each sampled token the likeliest ones, (logprob, id), where `top_logprobs_num` asked
    for them.
    """

    @property
    def weight_version(self) -> str | None:
        """The version of the last sampled token, None if the engine reports none."""
        return self.weight_versions[-1].version if self.weight_versions else None


@_pickled_by_field
@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled span [start, stop) of a trajectory's sequence, stop token included.

    `weight_versions` count from the start of the sequence. `sampling_params` are the effective
    ones: logprobs depend on the temperature. `excluded` says why the span is not trained (mask 0)
    although it was sampled: "context" for a fork's history, else the policy's reason.
    `prompt_tokens` and `cached_tokens` as the engine counted them; `latency` in seconds.
    """

    start: int
    stop: int
    finish_reason: str
    matched: int | str | None = None
    weight_versions: tuple[WeightVersion, ...] = ()
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    latency: float = 0.0
    excluded: str | None = None

    @property
    def length(self) -> int:
        """How many tokens were sampled."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Tokens [start, stop) that show the messages `first` to `last` of a transcript."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf path of a session: a training sequence.

    `input_ids` int32 [n]; `loss_mask` uint8 [n], 1 only on tokens that the engine sampled at that
    place; `logprobs` float32 [n], NaN if the token was not sampled. `prompt_length` tokens
    precede the first sampled one that may be trained. `source` is "engine", or "transcript" where
    the tokens were made from text: RL adapters refuse those. `fork_reason` says why this sequence
    was begun anew; None for the first. `spans`, of a transcript: which messages stand where.
    """

    input_ids: IdArray
    loss_mask: MaskArray
    logprobs: LogprobArray
    turns: tuple[Turn, ...]
    prompt_length: int
    source: Literal["engine", "transcript"] = "engine"
    fork_reason: str | None = None
    spans: tuple[MessageSpan, ...] = ()
    routed_experts: npt.NDArray[np.int32] | None = None
    """[n - 1, layers * top_k], as the engine gave them with the last turn: the experts of every
    token but the last.
    """

    def __post_init__(self) -> None:
        n = len(self.input_ids)
        if len(self.loss_mask) != n or len(self.logprobs) != n:
            raise ValueError(
                f"a trajectory's lists must be equally long: input_ids {n}, loss_mask "
                f"{len(self.loss_mask)}, "
                f"logprobs {len(self.logprobs)}"
            )
        if not 0 <= self.prompt_length <= n:
            raise ValueError(
                f"prompt_length {self.prompt_length} is outside the sequence of {n} tokens"
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def response_length(self) -> int:
        """How many tokens follow the prompt."""
        return len(self.input_ids) - self.prompt_length

    @property
    def trained_tokens(self) -> int:
        """How many tokens carry loss."""
        return int(self.loss_mask.sum())

    @property
    def weight_versions(self) -> tuple[WeightVersion, ...]:
        """The spans of all turns, in sequence positions."""
        return tuple(span for turn in self.turns for span in turn.weight_versions)


ParallelCalls = Literal["all", "first", "refuse"]
"""Several tool calls in one turn: execute all in order, only the first, or none of them."""


# --- environments ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a benchmark: `id` is stable between versions of the library, `index` its place
    in the split.
    """

    id: str
    index: int
    split: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """The agent's action in one step: visible `content` (reasoning never stands in it) and
    executable `tool_calls`.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of `Environment.reset`: the first messages (system and user), the tools, and
    free `info`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `Environment.step`.

    `messages`: tool messages (one per call, with its `tool_call_id`) and user messages. `reward`:
    this step's, or None if it has none. `tools`: the new list if it changed, else None.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    tools: Sequence[Tool] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """One episode's world, made by an `EnvironmentFactory`, played once, closed.

    Its methods may be plain or `async`; plain ones run in a thread, off the event loop. An
    `ActionError` raised by `step` is the model's fault and goes back to it as the observation;
    whatever else `reset`, `step` or `truncated_reward` raise, `SystemExit` and `CancelledError`
    included, aborts the episode and no other one.
    """

    reward_mode: Literal["final", "sum"] = "final"
    """An episode's reward is the last one given, or the sum of all."""

    parallel_calls: ParallelCalls = "all"
    """The rule in training and in evaluation, unless an agent's `CallPolicy` overrides it."""

    blocking: bool = True
    """False if plain `reset` and `step` return in microseconds and need no thread."""

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Begin `task`; everything random in it follows from `seed`."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Execute `action`. Not called again after `done`."""

    def truncated_reward(self) -> float | None:
        """The reward of an episode that ran out of steps or of context; None: the runner takes
        0.0.
        """
        return None

    def metrics(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Return numbers of this episode's world (tool errors, user tokens ...); read once after
        the last step.

        Finite numbers are kept; `info["metrics_error"]` names the others, and any error.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Free what `reset` took. Called exactly once, also after a failure."""
        return None


class UserSimulator(Protocol):
    """Who plays the user in one episode. Its failure is a `UserSimulatorError`, never reward 0."""

    async def reset(self, instruction: str) -> str:
        """The user's first line."""
        ...

    async def step(self, content: str) -> str:
        """The user's answer to the agent's visible text."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """user_calls, user_prompt_tokens, user_completion_tokens, user_seconds, user_retries."""
        ...

    async def close(self) -> None:
        """Free the connection."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Options that a run sets for every environment it makes: the user simulator's factory, and an
    environment's own keys."""

    user: Callable[[int], UserSimulator] | None = None
    """`user(seed)` makes the user simulator of one episode."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class EnvironmentFactory(Protocol):
    """A benchmark by name: what an entry point of the group `toolroll.environments` names (the
    object itself or its class)."""

    name: str
    description: str
    splits: tuple[str, ...]
    """The first one is the default."""

    def missing(self) -> str | None:
        """Return the command that installs what is missing, None if nothing is."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`, in order; `UsageError` for an unknown split."""
        ...

    def make(self, options: EnvironmentOptions) -> Environment:
        """A fresh environment for one episode."""
        ...

    def reference(self, task: Task) -> Sequence[Action] | None:
        """The actions that solve `task`, in order, one a step; None where the benchmark gives
        none.
        """
        ...


# --- episodes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class InteractionResult:
    """The result of one episode: the published fields, then ours.

    `tokens` (prompt + response) and `loss_mask`, `logprobs` (over the response) are views of the
    last trajectory: the conversation as it ended. Where a chat template made the session fork,
    `trajectories` holds every sequence, and a trainer must take them all. `reward` is None for an
    ABORTED episode.
    """

    prompt: str
    reward: float | None
    messages: list[Message]
    info: dict[str, Any]
    response: str = ""
    loss_mask: Any = None
    tokens: Any = None
    status: Status = Status.COMPLETED
    response_length: int = 0
    logprobs: Any = None
    weight_versions: tuple[WeightVersion, ...] = ()
    trajectories: tuple[Trajectory, ...] = ()
    stop_reason: StopReason = StopReason.DONE
    metrics: dict[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    tools: list[Tool] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        messages: list[Message],
        stop_reason: StopReason,
        **given: Any,
    ) -> InteractionResult:
        """Return a result whose fields over the response are those of the last trajectory.

        `given`: the fields that do not follow from the trajectories, messages and stop reason.
        """
        last = trajectories[-1] if trajectories else None
        cut = last.prompt_length if last else 0
        no_ids = np.zeros(0, dtype=np.int32)
        return cls(
            messages=messages,
            response=response_text(messages),
            loss_mask=last.loss_mask[cut:] if last else no_ids,
            tokens=last.input_ids if last else no_ids,
            status=status_of(stop_reason),
            response_length=last.response_length if last else 0,
            logprobs=last.logprobs[cut:] if last else np.zeros(0, dtype=np.float32),
            weight_versions=last.weight_versions if last else (),
            trajectories=tuple(trajectories),
            stop_reason=stop_reason,
            **given,
        )


def response_text(messages: Sequence[Message]) -> str:
    """Return everything that the assistant wrote in `messages`."""
    return "".join(str(m.get("content") or "") for m in messages if m.get("role") == "assistant")


@dataclass(frozen=True, slots=True)
class Episode:
    """One played (task, sample): who and which, and the result."""

    env: str
    task_id: str
    task_index: int
    sample: int
    seed: int
    result: InteractionResult
    model: str = ""


class Agent(Protocol):
    """An agent that the runner can play: anything with the published `asolve`."""

    async def asolve(
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Mapping[str, Any],
        task_index: int | None = None,
        max_num_steps: int = 30,
        *,
        task: Task | None = None,
        seed: int = 0,
        session_id: str | None = None,
    ) -> InteractionResult:
        """Play one episode of `env` to its end. Raises only `CancelledError` and `UsageError`."""
        ...
