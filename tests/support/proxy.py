"""`CountingProxy`: a reverse proxy between a router and a worker, which records all requests; and
the check of episodes by what the worker answered.

Invariants: bytes pass unchanged in both directions; if a client disconnects, the worker's
connection is closed too; `requests` has every request in the order of arrival. It runs in a thread
with its own event loop, so that tests of any loop can use it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from support.episodes import trained_nowhere
from support.http import app_server, in_thread

from toolroll.rollout.types import Trajectory

_HOP_BY_HOP = frozenset(
    "connection keep-alive transfer-encoding te trailer upgrade host content-length "
    "content-encoding".split()
)


@dataclass(slots=True)
class SeenRequest:
    """One request as the worker got it. `status` of the answer; None while there is none, or
    where the client hung up. `answer`: the bytes of its body so far.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int | None = None
    hung_up: bool = False
    answer: bytearray = field(default_factory=bytearray)

    @property
    def routing_key(self) -> str | None:
        return self.headers.get("x-smg-routing-key")

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class CountingProxy:
    """`url` stands for the worker at `target`."""

    target: str
    url: str = ""
    requests: list[SeenRequest] = field(default_factory=list)

    def generations(self) -> list[SeenRequest]:
        return [seen for seen in list(self.requests) if seen.path == "/generate"]

    def clear(self) -> None:
        self.requests.clear()


@contextmanager
def counting_proxy(target: str) -> Iterator[CountingProxy]:
    """A proxy before the worker at `target` until the context closes."""
    with in_thread(_serving(CountingProxy(target))) as proxy:
        yield proxy


@asynccontextmanager
async def _serving(proxy: CountingProxy) -> AsyncIterator[CountingProxy]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        app = web.Application(client_max_size=256 * 2**20)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _pass_on(proxy, session, request)

        app.router.add_route("*", "/{path:.*}", handle)
        async with app_server(app, handler_cancellation=True, shutdown_timeout=1.0) as proxy.url:
            yield proxy


async def _pass_on(
    proxy: CountingProxy, session: aiohttp.ClientSession, request: web.Request
) -> web.StreamResponse:
    seen = SeenRequest(
        request.method,
        request.path,
        {name.lower(): value for name, value in request.headers.items()},
        await request.read(),
    )
    proxy.requests.append(seen)
    headers = {
        name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
    }
    try:
        async with session.request(
            request.method,
            f"{proxy.target}{request.raw_path}",
            data=seen.body or None,
            headers=headers,
        ) as upstream:
            kept = {
                name: value
                for name, value in upstream.headers.items()
                if name.lower() not in _HOP_BY_HOP
            }
            if "Content-Encoding" in upstream.headers:
                kept["Content-Encoding"] = upstream.headers["Content-Encoding"]
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                seen.answer += chunk
                await response.write(chunk)
            seen.status = upstream.status  # before the client sees the end
            await response.write_eof()
            return response
    except (asyncio.CancelledError, ConnectionResetError):
        seen.status, seen.hung_up = None, True
        raise
    except aiohttp.ClientConnectionError as error:
        return web.Response(status=502, text=f"{proxy.target}: {error}")


# --- episodes, and what the worker answered -------------------------------------------------------

CLOSE = 1e-4
"""The largest difference between two computations of a logprob in float32."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    session: str
    input_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


def engine_answers(proxy: CountingProxy) -> list[EngineAnswer]:
    """The complete answers that passed through `proxy`. The client may hang up at the end of a
    stream, before the proxy has passed on the end of the connection."""
    return [_answer(seen) for seen in proxy.generations() if b'"finish_reason":{' in seen.answer]


def _answer(seen: SeenRequest) -> EngineAnswer:
    lines = bytes(seen.answer).split(b"\n")
    if seen.answer.startswith(b"data:"):  # each event has everything so far
        lines = [line[6:] for line in lines if line.startswith(b"data: {")][-1:]
    sampled = json.loads(lines[0])["meta_info"]["output_token_logprobs"]
    return EngineAnswer(
        session=str(seen.routing_key),
        input_ids=seen.json()["input_ids"],
        output_ids=[entry[1] for entry in sampled],
        logprobs=[entry[0] for entry in sampled],
    )


def judge_answers(trajectories: Sequence[Trajectory], answers: Sequence[EngineAnswer]) -> None:
    """Each of `answers`, which are those of one session, is one turn and trained exactly once, with
    the engine's ids and logprobs. Nothing else is trained."""
    turns = [turn for part in trajectories for turn in part.turns]
    assert all(turn.excluded in (None, "context") for turn in turns)  # trained in another sequence
    assert trained_nowhere(trajectories, answers) == 0


def largest_error(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between the logprobs of trained tokens and those that transformers
    computes with the model in `folder`."""
    import torch

    model, largest = _model(folder), 0.0
    for part in trajectories:
        trained = torch.tensor(np.flatnonzero(part.loss_mask))
        ids = torch.tensor(part.input_ids.astype(np.int64))
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, trained - 1]
            logprobs = torch.log_softmax(model.lm_head(hidden), dim=-1)
        expected = logprobs.gather(1, ids[trained, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(part.logprobs[trained] - expected).max()))
    return largest


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
