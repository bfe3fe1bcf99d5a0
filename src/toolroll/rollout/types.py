"""The data types of a rollout, and its interfaces, such as `Environment` and `Agent`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from toolroll.parsers.types import ToolCall
from toolroll.rollout.media import Image

Message = dict[str, Any]
"""One chat message in OpenAI's format: role, content, and tool_calls, tool_call_id or name."""

Tool = dict[str, Any]
"""One tool in OpenAI's format. "function" has its name, description and parameters."""

IdArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.int32]  # not a smaller type, in which sums and `-mask` wrap
LogprobArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.integer[Any]]  # uint8, uint16 or int32


class Status(Enum):
    """The outcome of an episode. The names are those of slime's tau-bench example."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class StopReason(StrEnum):
    """The reason why an episode ended, and the status that it gives. ABORTED means a failure that
    the model did not cause; the reward is then None.
    """

    DONE = "done", Status.COMPLETED  # reported by the environment
    INVALID_CALLS = "invalid_calls", Status.COMPLETED  # too many unreadable calls in a row
    MAX_TURNS = "max_turns", Status.TRUNCATED
    PROGRAM_TIMEOUT = "program_timeout", Status.TRUNCATED  # of a program agent
    LENGTH = "length", Status.TRUNCATED  # max_new_tokens truncated a turn
    CONTEXT_FULL = "context_full", Status.TRUNCATED  # the next prompt leaves no room to answer
    PLACEHOLDER = "placeholder", Status.TRUNCATED  # a sampled token for an image or a video
    ENGINE_ABORT = "engine_abort", Status.ABORTED  # for a weight update, and not resumed
    ENGINE_ERROR = "engine_error", Status.ABORTED
    ENVIRONMENT_ERROR = "environment_error", Status.ABORTED
    USER_ERROR = "user_error", Status.ABORTED
    TOKEN_ERROR = "token_error", Status.ABORTED  # the tokens could not be kept exact
    TEMPLATE_ERROR = "template_error", Status.ABORTED  # the chat template refuses the conversation
    TIME_LIMIT = "time_limit", Status.ABORTED
    INTERNAL_ERROR = "internal_error", Status.ABORTED

    status: Status

    def __new__(cls, reason: str, status: Status) -> StopReason:
        member = str.__new__(cls, reason)
        member._value_, member.status = reason, status
        return member


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A span of tokens [start, stop) that was sampled with the weights `version`."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to the engine's `/generate`.

    `session_id` becomes the routing key. `extra`: further top-level fields of the request's JSON.
    `routed_experts_start`: the first token whose experts are unknown. `images`: of `input_ids`.
    """

    input_ids: IdArray
    sampling_params: Mapping[str, Any]
    session_id: str
    return_logprob: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    routed_experts_start: int = 0
    images: Sequence[Image] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The engine's response, checked and unchanged.

    `output_ids` is int32 [n], including the stop token. `logprobs` is float32 [n] at the effective
    temperature, or None if logprobs were not requested. `finish_reason` is "stop", "length" or
    "abort". `matched` is the stop token id or stop string, or the placeholder token before which
    the turn was cut. `text` is the engine's own. `latency` is in seconds, over all attempts.
    `other_prompt`: how the ids that the engine read differ from a request with images, or None.
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
    routed_experts: ExpertArray | None = None
    """The rows [`routed_experts_start`, prompt + output - 1) of `Trajectory`'s; or None."""
    top_logprobs: Sequence[Sequence[tuple[float, int]]] | None = None
    """If `top_logprobs_num` was requested: the most likely (logprob, id) pairs at each position."""
    other_prompt: str | None = None

    @property
    def weight_version(self) -> str | None:
        """The weight version of the last sampled token, or None if the engine reports none."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled span [start, stop) of a trajectory's sequence, including the stop token.

    Positions in `weight_versions` count from the start of the sequence. `sampling_params` are the
    parameters that the engine got. If the span is not trained (mask 0), `excluded` is the reason:
    "context" if an earlier sequence contains the turn, else the one given to `Session.exclude`.
    `prompt_tokens` and `cached_tokens` are the engine's counts. `latency` is in seconds. `reward`
    is the turn's share of the episode's reward.
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
    reward: float = 0.0

    @property
    def length(self) -> int:
        """The number of sampled tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The tokens [start, stop) of a transcript's messages from `first` to `last`, both included."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One training sequence: a path from the root of a session's token tree to a leaf.

    `input_ids` is int32 [n]. `loss_mask` is int32 [n], and is 1 only for tokens that the engine
    sampled at that position. `logprobs` is float32 [n], and is NaN for tokens that were not sampled
    or whose logprobs were not requested. `prompt_length` is the number of tokens before the first
    turn that no earlier sequence contains (in a transcript: before the first trained turn).
    `source` is "transcript" if the tokens were made from the text of messages. RL adapters refuse
    transcripts. `fork_reason` says why the session forked into this sequence. `spans` are the
    tokens of a transcript's messages. `lineage`: labels that a client sent, such as a thread id.
    `media`: the images in the sequence. `routed_experts`: the experts of each token except the
    last, [n - 1, layers * top_k], from the request that processed the token first; or None.
    """

    input_ids: IdArray
    loss_mask: MaskArray
    logprobs: LogprobArray
    turns: tuple[Turn, ...]
    prompt_length: int
    source: Literal["engine", "transcript"] = "engine"
    fork_reason: str | None = None
    spans: tuple[MessageSpan, ...] = ()
    routed_experts: ExpertArray | None = None
    lineage: Mapping[str, str] = field(default_factory=dict)
    media: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        n, mask, logprobs = len(self.input_ids), len(self.loss_mask), len(self.logprobs)
        rows = n - 1 if self.routed_experts is None else len(self.routed_experts)
        if mask != n or logprobs != n or rows != n - 1:
            raise ValueError(
                f"a trajectory's lists must be equally long: input_ids {n}, loss_mask {mask}, "
                f"logprobs {logprobs}, and routed_experts one shorter: {rows}"
            )
        if not 0 <= self.prompt_length <= n:
            raise ValueError(f"prompt_length {self.prompt_length} is outside the {n} tokens")

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:  # without the arrays, which have thousands of numbers
        counts = f"{len(self)} tokens, {self.trained_tokens} trained, {len(self.turns)} turns"
        return f"<Trajectory: {counts}, source {self.source}, fork_reason {self.fork_reason!r}>"

    @property
    def response_length(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.input_ids) - self.prompt_length

    @property
    def trained_tokens(self) -> int:
        """The number of tokens with loss mask 1."""
        return int(self.loss_mask.sum())

    @property
    def weight_versions(self) -> tuple[WeightVersion, ...]:
        """The weight versions of all turns. Positions count from the start of the sequence."""
        return tuple(span for turn in self.turns for span in turn.weight_versions)


ParallelCalls = Literal["all", "first", "refuse"]
"""What to do with several tool calls in one turn: execute all in order, only the first, or none."""


# --- environments ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Versions of the library do not change its `id`. `index`: its place in the split."""

    id: str
    index: int
    split: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """The agent's action in one step: `content` without reasoning, and executable `tool_calls`."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of `Environment.reset`: the first messages (system and user), the tools, and
    further data in `info`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `Environment.step`: messages of tools (one per call, with its `tool_call_id`)
    and of users, the reward of this step, and the new list of tools if it changed.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    tools: Sequence[Tool] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(ABC):
    """The environment of one episode. It is made by an `EnvironmentFactory`, played, and closed.

    Methods may be plain or `async`. Plain methods run in a thread, off the event loop. If the model
    makes a mistake, raise `ActionError` in `step`: the model gets the message as the observation.
    Any other exception in `reset`, `step` or `truncated_reward`, even `SystemExit` or
    `CancelledError`, aborts this episode and no other.

    Example:

        class Guess(Environment):
            def reset(self, task: Task, seed: int) -> Observation:
                self.secret = random.Random(seed).randint(1, 9)
                return Observation([{"role": "user", "content": "Guess a digit from 1 to 9."}])

            def step(self, action: Action) -> StepResult:
                return StepResult(reward=float(str(self.secret) in action.content), done=True)
    """

    reward_mode: Literal["final", "sum"] = "final"
    """The episode's reward is the reward of its last step ("final"), or of all steps ("sum")."""

    parallel_calls: ParallelCalls = "all"
    """How to handle several tool calls in one turn. An agent's `CallPolicy` can override it."""

    blocking: bool = True
    """False if plain `reset` and `step` take only microseconds, and may run on the event loop."""

    can_wait: bool = True
    """False if an aborted episode must not be parked: it then starts again."""

    def check_task(self, task: Task) -> None:
        """Raise `UsageError` if `task` cannot be played. `toolroll run` asks before any `reset`."""
        return

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Start `task`. Derive all randomness from `seed`."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Execute `action`. This is not called after `done`."""

    def truncated_reward(self) -> float | Awaitable[float | None] | None:
        """Return the reward of an episode that ended before `done`, for example at a limit of turns
        or tokens. None means 0.0, or the sum of the step rewards if `reward_mode` is "sum".
        """
        return None

    def metrics(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Return finite numbers about this episode. This is called once, after the last step.

        Names other than `tool_errors`, `tool_errors/TOOL` and `user_*` get the prefix `env/`.
        Other values are left out. `info["metrics_error"]` names them, or an exception raised here.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release the resources of `reset`. This is called exactly once, even after a failure."""
        return None


class UserSimulator(Protocol):
    """The simulated user of one episode. It raises `UserSimulatorError` if it fails."""

    async def reset(self, instruction: str) -> str:
        """Return the user's first message."""
        ...

    async def step(self, content: str) -> str:
        """Return the user's answer to the agent's visible text."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return numbers about this user's requests, such as `user_calls` and `user_seconds`."""
        return {}

    async def close(self) -> None:
        """Release the simulator's resources, such as its connection. By default, it has none."""
        return


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """A run's options for each environment: the user simulator and the environment's settings."""

    user: Callable[[int], UserSimulator] | None = None
    """`user(seed)` returns the user simulator of one episode."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class EnvironmentFactory(Protocol):
    """A named environment. An entry point in the group `toolroll.environments` names a factory, a
    class or function that makes one, or an `Environment` class.
    """

    name: str
    description: str
    splits: tuple[str, ...]
    """The names of the splits. The first one is the default."""

    def missing(self) -> str | None:
        """Return the command that installs what is missing, or None if nothing is missing."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of `split`, in order. Raise `UsageError` for an unknown split."""
        ...

    def make(self, options: EnvironmentOptions) -> Environment:
        """Return a new environment for one episode."""
        ...

    def reference(self, task: Task) -> Sequence[Action] | None:
        """Return the actions that solve `task`, one per step, or None if there are none."""
        ...


# --- episodes -------------------------------------------------------------------------------------


@dataclass
class InteractionResult:
    """The result of an episode. Fields up to `response_length` are as in slime's tau-bench example.

    `tokens` (prompt and response), `loss_mask` and `logprobs` (both for the response only) are
    lists of the last trajectory, which contains the conversation as it ended. `logprobs` has 0.0
    for tokens that were not sampled, and is None if a token with mask 1 has no logprob. If the
    session forked, `trajectories` contains every sequence, and a trainer must use all of them.
    `reward` is None for an ABORTED episode.
    """

    prompt: str = field(repr=False)
    reward: float | None
    messages: list[Message] = field(repr=False)
    info: dict[str, Any]
    response: str = field(default="", repr=False)
    loss_mask: list[int] = field(default_factory=list, repr=False)
    tokens: list[int] = field(default_factory=list, repr=False)
    status: Status = Status.COMPLETED
    response_length: int = 0
    logprobs: list[float] | None = field(default=None, repr=False)
    weight_versions: tuple[WeightVersion, ...] = field(default=(), repr=False)
    trajectories: tuple[Trajectory, ...] = ()
    stop_reason: StopReason = StopReason.DONE
    metrics: dict[str, float] = field(default_factory=dict, repr=False)
    step_rewards: tuple[float, ...] = ()
    tools: list[Tool] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        *,
        prompt: str,
        reward: float | None,
        messages: list[Message],
        info: dict[str, Any],
        stop_reason: StopReason,
        metrics: Mapping[str, float] | None = None,
        step_rewards: Sequence[float] = (),
        tools: Sequence[Tool] = (),
    ) -> InteractionResult:
        """Return a result whose token and response fields come from the last trajectory."""
        last = trajectories[-1] if trajectories else None
        return cls(
            prompt,
            reward,
            messages,
            info,
            response=response_text(messages),
            loss_mask=last.loss_mask[last.prompt_length :].tolist() if last else [],
            tokens=last.input_ids.tolist() if last else [],
            status=stop_reason.status,
            response_length=last.response_length if last else 0,
            logprobs=_response_logprobs(last) if last else [],
            weight_versions=last.weight_versions if last else (),
            trajectories=tuple(trajectories),
            stop_reason=stop_reason,
            metrics=dict(metrics or {}),
            step_rewards=tuple(step_rewards),
            tools=list(tools),
        )


def _response_logprobs(trajectory: Trajectory) -> list[float] | None:
    if np.isnan(trajectory.logprobs[trajectory.loss_mask != 0]).any():
        return None
    logprobs = trajectory.logprobs[trajectory.prompt_length :]
    plain: list[float] = np.where(np.isnan(logprobs), 0.0, logprobs).tolist()
    return plain


def response_text(messages: Sequence[Message]) -> str:
    """Return the contents of all assistant messages, joined without a separator."""
    return "".join(str(m.get("content") or "") for m in messages if m.get("role") == "assistant")


@dataclass(frozen=True, slots=True)
class Episode:
    """One played sample of a task. `task_hash` and `environment`, hashes, are "" if unknown."""

    env: str
    task_id: str
    task_index: int
    sample: int
    seed: int
    result: InteractionResult
    model: str = ""
    task_hash: str = ""
    expected_calls: list[dict[str, Any]] = field(default_factory=list)
    """The `name` and `arguments` of each call of the task's reference."""
    environment: str = ""


class Agent(Protocol):
    """An agent for the runner: any object with this method, as in slime's tau-bench example."""

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
        """Play one episode. Raise only `CancelledError`, `UsageError`, `EngineUnreachableError`."""
        ...
