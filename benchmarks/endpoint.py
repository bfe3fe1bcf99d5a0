"""Requests through the endpoint: many sessions at once with whole conversations and tools.

This process runs only the endpoint. The engine's stub and the clients run in processes of their
own, so that the measured memory and CPU time are those of the endpoint. At the end every reply is
compared with the trajectory of its session, and those that are not in their place are counted.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jinja2

from benchmarks.clock import HELPERS, cpu
from benchmarks.conversations import other_digits, tokenizer, workload
from benchmarks.loop import served_model
from benchmarks.stub import stub
from benchmarks.tables import Table, number
from benchmarks.world import Material, material, replies
from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.rollout.runtime.garbage import paced_garbage

SESSIONS, TURNS = 128, 20
STOPS = (1, 5, 10, 20)
"""Measured after these numbers of turns."""


# --- the clients, in a second process -------------------------------------------------------------


class Talk:
    """The conversation of one client. It keeps the place of each reply's ids and their hash."""

    def __init__(self, at: int, given: dict[str, Any]) -> None:
        self.name = f"talk-{at}"
        self._at, self._given, self._other = at, given, other_digits(at)
        self._messages = list(given["first"][at % len(given["first"])])
        self._replies: list[tuple[int, int, int]] = []

    async def turn(self, http: aiohttp.ClientSession, url: str) -> None:
        """Send a request, and append its answer and what follows it."""
        body = {"model": "m", "messages": self._messages, "tools": self._given["tools"]}
        address = f"{url}/sessions/{self.name}/v1/chat/completions"
        async with http.post(address, json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"{self.name} was refused: {answer}")
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        ids = [*prompt, *choice["token_ids"]]
        self._replies.append((len(prompt), len(ids), hash(tuple(ids))))
        self._messages.append(choice["message"])
        at = self._at + len(self._replies)
        text = lambda kind: self._other(self._given[kind][at % len(self._given[kind])])
        calls = choice["message"].get("tool_calls") or ()
        self._messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": text("results")}
            for call in calls
        ]
        if not calls:
            self._messages.append({"role": "user", "content": text("users")})

    async def misplaced(self, http: aiohttp.ClientSession, url: str) -> int:
        """Return the number of replies that are not in their place in the trajectory, plus the
        number of trained tokens that belong to no reply.
        """
        async with http.get(f"{url}/sessions/{self.name}/trajectories") as response:
            trajectories = (await response.json())["trajectories"]
        if len(trajectories) != 1:
            return len(self._replies)
        ids, mask = trajectories[0]["input_ids"], trajectories[0]["loss_mask"]
        wrong = sum(
            hash(tuple(ids[:stop])) != key or sum(mask[start:stop]) != stop - start
            for start, stop, key in self._replies
        )
        return wrong + abs(sum(mask) - sum(stop - start for start, stop, _ in self._replies))


async def clients() -> None:
    """Play the sessions that standard input describes. Before each stretch, wait for a line."""
    given = json.loads(await asyncio.to_thread(sys.stdin.readline))
    url, talks = given["url"], [Talk(at, given) for at in range(given["sessions"])]

    async def several(talk: Talk, count: int) -> None:
        for _ in range(count):
            await talk.turn(http, url)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as http:
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(several(talk, int(line)) for talk in talks))
            print(asyncio.get_running_loop().time() - began, flush=True)
        print(sum([await talk.misplaced(http, url) for talk in talks]), flush=True)


# --- this process: the endpoint -------------------------------------------------------------------


@dataclass
class Stretch:
    """The measurements of some turns of all sessions; `tokens` and `memory` in bytes at their
    end.
    """

    first: int
    last: int
    requests: int
    seconds: float
    cpu: float
    renders: int
    tokens: int
    memory: int


@contextmanager
def counted_renders() -> Iterator[list[int]]:
    """Count the renders of all Jinja templates, in all threads of this process."""
    count, render = [0], jinja2.Template.render

    def counted(self: jinja2.Template, *args: Any, **kwargs: Any) -> str:
        count[0] += 1
        return render(self, *args, **kwargs)

    jinja2.Template.render = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        jinja2.Template.render = render  # type: ignore[method-assign]


def resident() -> int:
    """Return the bytes of this process in memory, after a full collection, and after unused memory
    was given back to the system (glibc).
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def measure(
    engine: str, tok: Any, given: Material, sessions: int, stops: tuple[int, ...]
) -> tuple[list[Stretch], int]:
    """Play, and return the measurements and the number of misplaced replies."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.endpoint", stdin=pipe, stdout=pipe,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    HELPERS.add(child.pid)
    stretches = []
    try:
        async with served_model(engine, tok) as served, AsyncExitStack() as stack:
            core = Endpoint(
                served, EndpointSettings(port=0, sampling_params={"max_new_tokens": 512})
            )
            server = await stack.enter_async_context(EndpointServer(core))
            stack.enter_context(paced_garbage())
            renders = stack.enter_context(counted_renders())
            told = {"url": server.url, "sessions": sessions, "first": given.first}
            told |= {"tools": given.tools, "results": given.results, "users": given.users}
            child.stdin.write(json.dumps(told).encode() + b"\n")
            empty = resident()
            for first, last in zip((0, *stops), stops, strict=False):
                renders[0], used = 0, cpu()
                child.stdin.write(b"%d\n" % (last - first))
                seconds = float(await child.stdout.readline())
                used = cpu() - used
                lives = [core.sessions.find(f"talk-{at}") for at in range(sessions)]
                tokens = sum(live.session.tokens for live in lives)
                requests, memory = sessions * (last - first), resident() - empty
                counts = (requests, seconds, used, renders[0], tokens, memory)
                stretches.append(Stretch(first, last, *counts))
            child.stdin.write(b"\n")
            misplaced = int(await child.stdout.readline())
        return stretches, misplaced
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, talks = tokenizer(), workload()
    given = material(talks)
    stops = STOPS[:-1] if quick else STOPS
    with stub(replies(talks, tok)) as url:
        asyncio.run(measure(url, tok, given, 2, (2,)))  # imports
        stretches, misplaced = asyncio.run(measure(url, tok, given, SESSIONS, stops))
    head = "turns,requests/s,ms of CPU per request,renders per request,tokens per session"
    made = Table(
        f"Requests through the endpoint: {SESSIONS} sessions at once",
        [*head.split(","), "KiB per session", "bytes per token"],
    )
    for stretch in stretches:
        cells = (
            stretch.requests / stretch.seconds,
            1000 * stretch.cpu / stretch.requests,
            stretch.renders / stretch.requests,
            stretch.tokens / SESSIONS,
            stretch.memory / SESSIONS / 1024,
            stretch.memory / stretch.tokens,
        )
        made.rows.append([f"{stretch.first + 1} to {stretch.last}", *map(number, cells)])
    later = stretches[1:]
    requests = sum(stretch.requests for stretch in later)
    made.figures |= {
        "endpoint.cpu": 1000 * sum(stretch.cpu for stretch in later) / requests,
        "endpoint.rate": requests / sum(stretch.seconds for stretch in later),
        "endpoint.renders": sum(stretch.renders for stretch in later) / requests,
        "endpoint.memory": stretches[-1].memory / SESSIONS / 1024,
    }
    total = sum(stretch.requests for stretch in stretches)
    made.notes += [
        f"{total:,} replies, {misplaced} misplaced. The clients run on the same cores: requests/s "
        "includes their time, CPU does not. Memory is the growth of the resident process.",
    ]
    return made


if __name__ == "__main__":
    asyncio.run(clients())
