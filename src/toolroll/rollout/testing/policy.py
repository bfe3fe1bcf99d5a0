"""Policies of the embedded engine, and their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PolicyRequest:
    """One request as a policy sees it.

    `input_ids`: the prompt. `call` counts the requests of this routing key that a policy has
    answered, from 0: a request that failed is not counted, so its repetition has the same number.
    `index` counts all requests, refused ones included.
    """

    input_ids: npt.NDArray[np.int32]
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    routing_key: str
    call: int
    index: int
    sampling_params: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The decoded prompt, control tokens included; decoded on first use, as long prompts are
        costly to decode.
        """
        return self.decode(self.input_ids.tolist())


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of a policy.

    `output_ids` instead of `text` gives exact ids (no stop token is added to them); without
    `stop` the text has no stop token and ends as if it were cut by length. `hold` stops the answer
    after `hold_after` tokens until the event is set: a request that is aborted, or whose weights
    change, at exactly that token needs no clock.
    """

    text: str = ""
    output_ids: Sequence[int] | None = None
    stop: bool = True
    hold: asyncio.Event | None = None
    hold_after: int = 0


Policy = Callable[[PolicyRequest], "str | Reply | Awaitable[str | Reply]"]


def script(replies: Mapping[str, Sequence[str]], default: str = "I am done.") -> Policy:
    """Return a policy that replies `replies[routing_key][call]`, or `default` if there is none."""

    def say(request: PolicyRequest) -> str:
        lines = replies.get(request.routing_key, ())
        return lines[request.call] if request.call < len(lines) else default

    return say


def echo(request: PolicyRequest) -> str:
    """Reply to every prompt with its number of tokens."""
    return f"I have read {len(request.input_ids)} tokens."
