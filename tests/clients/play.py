"""Play one client against the endpoint, and judge what the session holds."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.endpoints import endpoint
from support.looking import FIRST
from support.patience import PATIENCE

from clients.table import Client, Dialect, Expected
from toolroll.rollout.testing import PolicyRequest, load_embedded_tokenizer

PROGRAMS = Path(__file__).parent / "programs"
SYSTEM, TASK = FIRST[0]["content"], FIRST[1]["content"]
ROOM, TIGHT = 100_000, 20
"""Context lengths: for all prompts, and too short for the first one."""
ROUTES = ("chat/completions", "responses", "messages")


@dataclass(frozen=True)
class Played:
    """What two runs of a client left: one with room, and one with too short a context."""

    turns: tuple[int, ...]
    """The number of trained turns of each sequence."""
    forks: tuple[str, ...]
    """The reason of each fork."""
    sampled: int
    trained: int
    last: str
    """The last line of the program's output."""
    overflow: str
    """The same line if the context is too short."""
    requests: int
    """The number of completion requests that were sent then."""

    def differences(self, expected: Expected) -> list[str]:
        """Name what differs from `expected`."""
        pairs = {
            "turns": (self.turns, expected.turns),
            "trained tokens": (self.trained, self.sampled),
            "forks": (len(self.forks), len(expected.forks)),
            "overflow": (self.overflow, f"error: {expected.overflow}"),
            "requests at overflow": (self.requests, expected.requests),
        }
        lines = [f"{name}: {got}, not {want}" for name, (got, want) in pairs.items() if got != want]
        lines += [
            f"fork: {reason!r} does not contain {piece!r}"
            for reason, piece in zip(self.forks, expected.forks, strict=False)
            if piece not in reason
        ]
        if not self.last.startswith("answer:"):
            lines.append(f"no answer: {self.last}")
        return lines


async def play(
    client: Client, dialect: Dialect, command: Sequence[str | Path], *, stream: bool
) -> Played:
    """Run `command`, the client's program. Every sampled token must be trained exactly once, from
    the prompt that the engine got.
    """
    tokenizer = load_embedded_tokenizer()
    variables = {"CLIENT_DIALECT": dialect, "CLIENT_STREAM": "01"[stream]}

    def reply(request: PolicyRequest) -> str:
        return client.replies[min(request.call, len(client.replies) - 1)]

    async with endpoint(tokenizer, reply, split="random", context_length=ROOM) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        last = await _run(command, {**variables, "CLIENT_URL": f"{bench.url}/sessions/s"})
        trajectories = await bench.trajectories()
        sampled = sum(len(entry.output_ids or ()) for entry in bench.engine.log)
    async with endpoint(tokenizer, reply, context_length=TIGHT) as bench:
        overflow = await _run(command, {**variables, "CLIENT_URL": f"{bench.url}/sessions/s"})
        requests = sum(
            count
            for (method, route, _), count in bench.endpoint.metrics.requests.items()
            if method == "POST" and route.endswith(ROUTES)
        )
    spans = [
        [turn for turn in sequence["turns"] if turn["excluded"] is None]
        for sequence in trajectories
    ]
    return Played(
        turns=tuple(map(len, spans)),
        forks=tuple(str(each["fork_reason"]) for each in trajectories if each["fork_reason"]),
        sampled=sampled,
        trained=sum(turn["stop"] - turn["start"] for turns in spans for turn in turns),
        last=last,
        overflow=overflow,
        requests=requests,
    )


async def _run(command: Sequence[str | Path], variables: dict[str, str]) -> str:
    """Run `command` in an empty home folder. Return the last line of its output."""
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "CLIENT_SYSTEM": SYSTEM,
                "CLIENT_TASK": TASK,
                **variables,
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        lines = output.decode().splitlines()
        assert lines and process.returncode == 0, errors.decode()[-3000:]
        return lines[-1]
