"""`TokenSource`: the source of the embedded engine's tokens: a script or a language model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolroll.testing.faults import Fault
from toolroll.testing.generation import Generation
from toolroll.testing.policy import LoggedRequest, PolicyRequest
from toolroll.testing.wire import EngineRequest

TopLogprobs = Sequence[tuple[float, int]]
"""Pairs of logprob and id, the most likely first."""

ABORTED: dict[str, Any] = {
    "type": "abort",
    "message": "Aborted",
    "status_code": None,
    "err_type": None,
}
"""The finish_reason of a request that was aborted while it ran."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or a part of one. `finish` is SGLang's `finish_reason`, or None for a part.

    `logprobs` and `top_logprobs` have one entry per id in `ids`. `input_logprobs` and
    `input_top_logprobs` have one entry for each prompt position after the first requested one.
    Logprobs that were not requested may be missing.
    """

    ids: list[int]
    text: str
    finish: dict[str, Any] | None
    logprobs: list[float]
    top_logprobs: Sequence[TopLogprobs] = ()
    input_logprobs: Sequence[float] = ()
    input_top_logprobs: Sequence[TopLogprobs] = ()
    routed_experts: str | None = None


Report = Callable[[Answer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request that has started. `limit`: the maximum number of sampled tokens. `calls`: the
    number of policy calls so far for each routing key, in all requests.
    """

    request: EngineRequest
    entry: LoggedRequest
    seen: PolicyRequest
    fault: Fault
    generation: Generation
    limit: int
    calls: defaultdict[str, int]

    @property
    def first_input(self) -> int | None:
        """The first prompt position whose logprob is requested, or None if none is requested."""
        start = self.request.logprob_start_len
        requested = self.request.return_logprob and 0 <= start < len(self.entry.input_ids)
        return start if requested else None

    @property
    def stream_interval(self) -> int:
        """The number of tokens between two parts of a stream."""
        return max(1, int(self.request.params.get("stream_interval") or 1))

    def count_call(self) -> None:
        """Count this request as a new call of its routing key."""
        self.entry.call = self.seen.call
        self.calls[self.entry.routing_key] += 1


class TokenSource:
    """The base class of token sources. A subclass must define `sample`. The other methods do
    nothing by default.
    """

    def check(self, request: EngineRequest) -> None:
        """Raise `RefusedError` if the request has parameters that are not supported."""

    async def sample(self, turn: Turn, report: Report | None) -> Answer:
        """Return the answer. If the request is aborted, return the tokens sampled until then, with
        the finish reason `ABORTED`. Set `cached_tokens` of the log entry. If `report` is given,
        call it with each part of a streamed answer.
        """
        raise NotImplementedError

    async def update_weights(self, folder: str, updated: Callable[[], None]) -> None:
        """Load new weights. Call `updated` before the first token is sampled with them.

        Raise `ModelFolderError` if the weights do not fit.
        """

    def pause(self) -> None:
        """Sample nothing until `resume`."""

    def resume(self) -> None:
        """Continue after `pause`."""

    async def aclose(self) -> None:
        """Wait until no answer is sampled any more."""
