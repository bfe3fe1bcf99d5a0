"""Policies of the embedded engine, their requests and replies, and the request log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyRequest:
    """One request. It is the argument of a policy.

    `input_ids`: the prompt. `call`: the number of earlier requests with this routing key for which
    the policy was called. A request that fails before that (a fault, a full queue) does not count,
    so its retry has the same number. `index`: the number of all earlier requests, including refused
    ones, but not those whose body cannot be read.
    """

    input_ids: npt.NDArray[np.int32]
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    routing_key: str
    call: int
    index: int
    sampling_params: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The decoded prompt, including control tokens. It is decoded on first use, because
        decoding a long prompt is expensive.
        """
        return self.decode(self.input_ids.tolist())


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of a policy.

    `output_ids` sets exact ids instead of `text`, and no stop token is added. If `stop` is False,
    no stop token is added to the text. The finish reason is then "length", unless the text itself
    contains a stop. `hold` pauses the answer after `hold_after` tokens until the event is set. So a
    test can abort the request or change the weights at exactly that token, without a clock.
    """

    text: str = ""
    output_ids: Sequence[int] | None = None
    stop: bool = True
    hold: asyncio.Event | None = None
    hold_after: int = 0


Policy = Callable[[PolicyRequest], "str | Reply | Awaitable[str | Reply]"]


def script(replies: Mapping[str, Sequence[str]], default: str = "I am done.") -> Policy:
    """Return a policy whose reply is `replies[routing_key][call]`, or `default` if there is no such
    reply.

    The routing key of an episode of `toolroll run` is `ENVIRONMENT/TASK#SAMPLE`. The routing key of
    a request to `toolroll serve` is the name of its session. At the first request whose key is
    not in `replies`, the policy logs a warning with this key and some of the keys in `replies`.
    """
    unknown: set[str] = set()

    def say(request: PolicyRequest) -> str:
        key = request.routing_key
        if replies and key not in replies and not unknown:
            unknown.add(key)
            some = ", ".join(map(repr, list(replies)[:3]))
            logger.warning("no replies for %r, so it gets %r; the keys are %s", key, default, some)
        lines = replies.get(key, ())
        return lines[request.call] if request.call < len(lines) else default

    return say


def echo(request: PolicyRequest) -> str:
    """Reply to every prompt with its number of tokens."""
    return f"I have read {len(request.input_ids)} tokens."


@dataclass(slots=True)
class LoggedRequest:
    """One request and its answer as it was sampled, before a fault's `garble` changes it.

    Attributes:
        input_ids: The received ids, int32.
        output_ids: The sampled ids, including the stop token. `logprobs` has one value per id.
        status: The HTTP status, or 0 if there is no answer (yet).
        arrival: The position in the order of arrival, from 0.
        finished: The position in the order of completion, from 0. None while the request runs.
        matched: The stop string or the stop token id that ended the answer, or None.
        weight_versions: SGLang's `weight_versions`: a dict with `version`, `start` and `end` for
            each run of output ids with the same version.
        headers: The request's headers, with names in lower case.
        session_id: The session whose prefix the request marks, or None.
        aborted: True if the request was aborted, also by `Fault.abort_after`, or if the client
            disconnected.
        faulted: True if a fault was injected.
        call: The request's `PolicyRequest.call`, or None if the policy (or language model) was
            not called.
        lora_path: The LoRA adapter that the request named, or None.
    """

    rid: str
    routing_key: str
    input_ids: npt.NDArray[np.int32]
    sampling_params: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    arrival: int = 0
    call: int | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    matched: int | str | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int = 0
    status: int = 0
    aborted: bool = False
    faulted: bool = False
    finished: int | None = None
    session_id: str | None = None
    lora_path: str | None = None
