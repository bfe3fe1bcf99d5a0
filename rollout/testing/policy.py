"""What the embedded engine says: policies and faults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One request as a policy sees it: `text` is the decoded prompt, control tokens included; `call` counts the requests of this
    routing key from 0, `index` all of them."""

    input_ids: npt.NDArray[np.int32]
    text: str
    routing_key: str
    call: int
    index: int
    sampling_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What to say. `output_ids` in the place of `text` gives exact ids (no stop token is added to them); without `stop` the text
    has no stop token and ends as if it were cut by length."""

    text: str = ""
    output_ids: Sequence[int] | None = None
    stop: bool = True


Policy = Callable[[PolicyRequest], "str | Reply | Awaitable[str | Reply]"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request, exactly one of: an HTTP `status` with `body`; the connection is dropped (`drop`);
    no answer for `hang` seconds; the answer's JSON goes through `garble`; the answer is aborted after `abort_after` tokens;
    the weights
    change to `weight_version` after `switch_after` tokens."""

    status: int | None = None
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False
    hang: float | None = None
    garble: Callable[[dict[str, Any]], Any] | None = None
    abort_after: int | None = None
    weight_version: str | None = None
    switch_after: int = 0


FaultPlan = Callable[[PolicyRequest], "Fault | None"]


def script(replies: Mapping[str, Sequence[str]], default: str = "I am done.") -> Policy:
    """A policy that says `replies[routing_key][call]`, and `default` where there is none."""

    def say(request: PolicyRequest) -> str:
        lines = replies.get(request.routing_key, ())
        return lines[request.call] if request.call < len(lines) else default

    return say


def echo(request: PolicyRequest) -> str:
    """Answers every prompt with its number of tokens."""
    return f"I have read {len(request.input_ids)} tokens."
