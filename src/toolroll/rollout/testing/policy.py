"""Policies of the embedded engine, and their replies."""

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
