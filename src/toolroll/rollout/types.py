"""The data types of a rollout: messages, requests to the engine and their completions, and
trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
