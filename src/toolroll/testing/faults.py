"""Faults that the embedded engine can inject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from toolroll.testing.policy import PolicyRequest


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one request. The fields can be combined.

    Attributes:
        status: Respond with this HTTP status, `body` and `headers` instead of the answer. For a
            malformed answer, use 200 and a body that is not JSON.
        drop: Close the connection without an answer.
        hang: Delay the answer by this number of seconds.
        garble: A function that gets the JSON of the answer and returns the JSON to send.
        abort_after: Abort the request after this many tokens. Only for scripted replies.
        weight_version: The weight version of the engine after `switch_after` tokens of this answer.
            Only for scripted replies.
        evict: Empty the prefix cache before the request. Only for scripted replies.
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
    evict: bool = False


FaultPlan = Callable[[PolicyRequest], "Fault | None"]


class FaultedError(Exception):
    """An injected fault replaced the answer. `response` is sent instead. It is None if the fault
    closed the connection.
    """

    def __init__(self, response: web.Response | None) -> None:
        super().__init__("injected fault")
        self.response = response


def fault_at(faults: Mapping[int, Fault]) -> FaultPlan:
    """Return a plan that injects `faults[i]` into the request with the index `i`, from 0
    (`PolicyRequest.index`).
    """
    return lambda request: faults.get(request.index)


async def inject(http: web.Request, fault: Fault) -> None:
    """Inject the faults that come before the answer: `hang`, `drop` and `status`. Raise
    `FaultedError` if the fault replaces the answer.
    """
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
