"""Faults that the embedded engine can inject, and functions that corrupt an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from toolroll.rollout.testing.policy import PolicyRequest


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one request. The fields can be combined.

    Attributes:
        status: The HTTP status, with `body` and `headers` (a 200 whose body is not JSON is a
            malformed answer).
        drop: Close the connection without an answer.
        hang: Delay the answer by these seconds.
        garble: Changes the JSON of the answer.
        abort_after: Abort the request after this many tokens.
        weight_version: The version that the weights have after `switch_after` tokens.
    """

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


class FaultedError(Exception):
    """An injected fault replaced the answer with `response`, or with None if the connection was
    dropped.
    """

    def __init__(self, response: web.Response | None) -> None:
        super().__init__("injected fault")
        self.response = response


def fault_at(faults: Mapping[int, Fault]) -> FaultPlan:
    """Return a plan that injects `faults[index]` into the request with the number `index`. All
    requests are counted, from 0.
    """
    return lambda request: faults.get(request.index)


async def inject(http: web.Request, fault: Fault) -> None:
    """Inject `fault` before the answer. Raises `FaultedError` if the fault replaces the answer."""
    if fault.hang is not None:
        await asyncio.sleep(fault.hang)
    if fault.drop:
        if http.transport is not None:
            http.transport.abort()
        raise FaultedError(None)
    if fault.status is not None:
        raise FaultedError(
            web.Response(status=fault.status, body=fault.body, headers=dict(fault.headers))
        )


def drop_logprob(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove one logprob: `Fault(garble=drop_logprob)`."""
    answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][:-1]
    return answer
