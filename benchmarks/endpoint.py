"""The endpoint under load: many sessions at once with whole conversations, on an embedded engine.

    python benchmarks/endpoint.py --sessions 500 --turns 20 --prompt-tokens 10000

This process runs only the endpoint. The engine and the clients run in a second process, so that the
measured memory and CPU time are those of the endpoint. At the end every reply is compared with the
trajectory of its session; lost, mixed up or duplicate replies are counted. Tokens of the embedded
tokenizer are shorter than a model's (1.4 characters instead of 4 to 5), so costs per character have
less weight here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import re
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.server import Endpoint, EndpointServer, EndpointSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer
from toolroll.rollout.types import GenerateRequest

if TYPE_CHECKING:
    from benchmarks.tables import Table

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
TOKENS_OF_ADVICE = 7
"""Number of tokens of "Be brief. " in the embedded tokenizer."""
EVERY = 5
"""CPU and memory are measured after the first turn, whose whole prompt is tokenized, and after
these numbers of turns.
"""


def stretches(turns: int) -> list[tuple[int, int]]:
    """Return the turns between two measurements, as pairs of turns played before and after."""
    looks = [0, *sorted({1, *range(EVERY, turns, EVERY), turns})]
    return list(itertools.pairwise(looks))


class TurnError(Exception):
    """A turn did not get its own complete reply."""


# --- the second process: engine and clients -------------------------------------------------------


def policy(request: PolicyRequest) -> str:
    """Reply with the name of the session, to detect mix-ups. Every second turn is a call."""
    name = request.routing_key
    text = f"This is turn {request.call} of {name}, and it goes on for a while, as answers do."
    return (
        text
        if request.call % 2
        else text + '<tool_call>{"name": "look", "arguments": {"at": "' + name + '"}}</tool_call>'
    )


class Talk:
    """The conversation of one client. It keeps the position of each reply's ids and their hash."""

    def __init__(self, name: str, prompt_tokens: int) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = [
            {
                "role": "system",
                "content": f"You are the agent of {name}. "
                + "Be brief. " * max(1, prompt_tokens // TOKENS_OF_ADVICE),
            },
            {"role": "user", "content": f"Begin, {name}."},
        ]
        self.replies: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []

    async def turn(self, http: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "m", "messages": self.messages, "tools": [TOOL], "max_tokens": 256}
        began = time.perf_counter()
        async with http.post(
            f"{url}/sessions/{self.name}/v1/chat/completions", json=body
        ) as response:
            answer = await response.json()
        if response.status != 200:
            raise TurnError(
                f"turn {len(self.replies) + 1} of {self.name} was refused: "
                f"{answer['error']['message']}"
            )
        self.seconds.append(time.perf_counter() - began)
        choice = answer["choices"][0]
        message, ids = choice["message"], choice["token_ids"]
        if choice["finish_reason"] == "length":
            raise TurnError(
                f"turn {len(self.replies) + 1} of {self.name} was cut: the engine's context is full"
            )
        if re.findall(r"talk-\d+", message["content"]) != [self.name]:
            raise TurnError(f"{self.name} was answered {message['content']!r}")
        start = len(answer["prompt_token_ids"])
        self.replies.append((start, start + len(ids), hash((*answer["prompt_token_ids"], *ids))))
        self.messages.append(message)
        calls = message.get("tool_calls") or ()
        self.messages += [
            {"role": "tool", "tool_call_id": it["id"], "content": f"Seen by {self.name}."}
            for it in calls
        ]
        if not calls:
            self.messages.append({"role": "user", "content": f"Go on, {self.name}."})

    async def wrong(self, http: aiohttp.ClientSession, url: str) -> int:
        """Return the number of replies that are not in their position in the trajectory, plus the
        number of trained tokens that belong to no reply.
        """
        async with http.get(f"{url}/sessions/{self.name}/trajectories") as response:
            found = (await response.json())["trajectories"]
        if len(found) != 1:
            return len(self.replies)
        ids, mask = found[0]["input_ids"], found[0]["loss_mask"]
        lost = sum(
            hash(tuple(ids[:stop])) != key or sum(mask[start:stop]) != stop - start
            for start, stop, key in self.replies
        )
        return lost + abs(sum(mask) - sum(stop - start for start, stop, _ in self.replies))


async def second_process(sessions: int, turns: int, prompt_tokens: int) -> None:
    tokenizer = load_embedded_tokenizer()
    async with (
        EmbeddedEngine(tokenizer, policy, keep_log=False) as engine,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as http,
    ):
        print(engine.url, flush=True)
        url = (await asyncio.to_thread(sys.stdin.readline)).strip()
        talks = [Talk(f"talk-{at}", prompt_tokens) for at in range(sessions)]
        for first, behind in stretches(turns):
            began = time.perf_counter()

            async def several(talk: Talk, count: int) -> None:
                for _ in range(count):
                    await talk.turn(http, url)

            await asyncio.gather(*(several(talk, behind - first) for talk in talks))
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        wrong = sum([await talk.wrong(http, url) for talk in talks])
        latencies = sorted(value for talk in talks for value in talk.seconds)
        print(
            json.dumps(
                {
                    "wrong": wrong,
                    "replies": len(latencies),
                    "p50": at(latencies, 0.5),
                    "p99": at(latencies, 0.99),
                }
            ),
            flush=True,
        )


def at(values: list[float], share: float) -> float:
    """Return the quantile `share` of sorted `values`."""
    return values[min(len(values) - 1, int(share * len(values)))]


# --- this process: the endpoint -------------------------------------------------------------------


def resident() -> int:
    """Return the bytes of this process in memory, after garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def said_by(second: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next line of the second process. If there is none, it has printed the error."""
    line = await second.readline()
    if not line:
        raise SystemExit(1)
    return dict(json.loads(line))


async def bare_cpu(engine: Engine, sessions: int, length: int, vocabulary: int) -> float:
    """Return the seconds of CPU of one call of `/generate` with `length` ids, with one concurrent
    call per session.
    """
    ids = np.arange(length, dtype=np.int32) % (vocabulary - 100)
    prompts = [GenerateRequest(ids, {"max_new_tokens": 64}, f"talk-{at}") for at in range(sessions)]
    await asyncio.gather(*map(engine.generate, prompts))
    used = time.process_time()
    for _ in range(4):
        await asyncio.gather(*map(engine.generate, prompts))
    return (time.process_time() - used) / (4 * sessions)


async def measure(sessions: int, turns: int, prompt_tokens: int) -> dict[str, Any]:
    tokenizer = load_embedded_tokenizer()
    template = ChatTemplate(tokenizer)
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--second",
        "--sessions", str(sessions), "--turns", str(turns), "--prompt-tokens", str(prompt_tokens),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        address = (await child.stdout.readline()).decode().strip()
        client = Engine(EngineConfig(engine=address, vocab_size=len(tokenizer)))
        async with Model(
            client, template, get_parser("hermes", template.encoder.control)
        ) as served:
            core = Endpoint(served, EndpointSettings(port=0, default_max_tokens=256))
            async with EndpointServer(core) as server, AsyncExitStack() as stack:
                stack.enter_context(paced_garbage())
                before, rows, bare = resident(), list[dict[str, float]](), math.nan
                child.stdin.write(f"{server.url}\n".encode())
                for first, played in stretches(turns):
                    used = time.process_time()
                    told = await said_by(child.stdout)
                    used = time.process_time() - used
                    lives = [core.sessions.find(f"talk-{at}") for at in range(sessions)]
                    tokens = sum(live.session.tokens for live in lives)
                    row = {"turns": played, "played": played - first, "tokens": tokens, **told}
                    row |= {
                        "bytes_per_token": (resident() - before) / tokens,
                        "cpu_ms": 1000 * used / (sessions * (played - first)),
                    }
                    rows.append(row)
                    if played == turns:
                        bare = await bare_cpu(
                            client, sessions, max(1, tokens // sessions), len(tokenizer)
                        )
                    child.stdin.write(b"\n")
                end = await said_by(child.stdout)
        return {**end, "rows": rows, "bare_ms": 1000 * bare}
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    from benchmarks.tables import Table, number  # not importable if this file runs as a script

    sessions, turns = (50, 10) if quick else (500, 20)
    head = (
        "prompt tokens,after turns,tokens,bytes per token,ms of CPU per turn,over a bare /generate"
    )
    made = Table("The endpoint under load", head.split(","))
    for prompt_tokens in (200, 10_000):
        found = asyncio.run(measure(sessions, turns, prompt_tokens))
        for row in found["rows"]:
            cpu = row["cpu_ms"]
            cells = (row["tokens"], row["bytes_per_token"], cpu, cpu - found["bare_ms"])
            made.rows.append([f"{prompt_tokens:,}", str(row["turns"]), *map(number, cells)])
        made.notes.append(
            f"{sessions} sessions, {prompt_tokens:,} prompt tokens: {found['replies']:,} replies, "
            f"{found['wrong']} lost or mixed up; latency p50 {1000 * found['p50']:.0f} ms, "
            f"p99 {1000 * found['p99']:.0f} ms."
        )
    return made


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--sessions", type=int, default=500)
    options.add_argument("--turns", type=int, default=20)
    options.add_argument(
        "--prompt-tokens",
        type=int,
        default=200,
        help="of each session's system text, about (at most 30000)",
    )
    options.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.second:
        try:
            asyncio.run(second_process(given.sessions, given.turns, given.prompt_tokens))
        except TurnError as error:
            raise SystemExit(str(error)) from error
        return
    found = asyncio.run(measure(given.sessions, given.turns, given.prompt_tokens))
    for row in found["rows"]:
        print(
            f"after {row['turns']:3.0f} turns: {row['tokens']:9.0f} tokens, "
            f"{row['bytes_per_token']:6.1f} bytes per token, "
            f"{given.sessions * row['played'] / row['seconds']:6.0f} turns/s, {row['cpu_ms']:.2f} "
            f"ms of CPU per turn, "
            f"{row['cpu_ms'] - found['bare_ms']:.2f} of it over a bare /generate"
        )
    print(
        f"{found['replies']} replies, {found['wrong']} lost or mixed up; a bare /generate: "
        f"{found['bare_ms']:.2f} ms of CPU; "
        f"latency p50 {1000 * found['p50']:.0f} ms, p99 {1000 * found['p99']:.0f} ms with "
        f"{given.sessions} at once"
    )
    if found["wrong"] or found["replies"] != given.sessions * given.turns:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
