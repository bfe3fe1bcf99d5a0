"""Faults of the embedded engine: plans of them, and ways to corrupt an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from toolroll.rollout.testing.policy import PolicyRequest


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request.

    One of: an HTTP `status` with `body` and `headers` (status 200 with a body that is not JSON is a
    malformed answer); the connection is dropped without an answer (`drop`); the answer comes `hang`
    seconds later; its JSON goes through `garble`; it is aborted after `abort_after` tokens; the
    engine's weights change to `weight_version` after `switch_after` tokens. They can be
    combined.
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
    """An injected fault's answer; None if the connection was dropped."""

    def __init__(self, response: web.Response | None) -> None:
        super().__init__("injected fault")
        self.response = response


def fault_at(faults: Mapping[int, Fault]) -> FaultPlan:
    """The plan that does `faults[index]` to the engine's request number `index` (from 0, of all
    requests).
    """
    return lambda request: faults.get(request.index)


async def inject(http: web.Request, fault: Fault) -> None:
    """Do what comes before the answer; raise `FaultedError` if the fault is the answer."""
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
    """`Fault(garble=drop_logprob)`: one logprob fewer than ids."""
    answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][:-1]
    return answer


def shift_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """`Fault(garble=shift_logprobs)`: as many logprobs as ids, each beside its neighbour's id."""
    items = answer["meta_info"]["output_token_logprobs"]
    answer["meta_info"]["output_token_logprobs"] = items[1:] + items[:1]
    return answer


def drop_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """`Fault(garble=drop_ids)`: an answer without `output_ids`, as an engine too old to send
    them gives.
    """
    del answer["output_ids"]
    return answer
