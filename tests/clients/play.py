"""Play one client against the endpoint, and judge what the session holds."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.client_scenario import FIRST
from support.endpoints import endpoint
from support.patience import PATIENCE
from support.vision import ExpandedEngine, image_tokens, vision_tokenizer

from clients.table import Client, Dialect, Expected
from toolroll.testing import PolicyRequest, load_embedded_tokenizer

PROGRAMS = Path(__file__).parent / "programs"
SYSTEM, TASK = FIRST[0]["content"], FIRST[1]["content"]
ROOM, TIGHT = 100_000, 20
"""Context lengths: for all prompts, and too short for the first one."""


@dataclass(frozen=True)
class Played:
    """What two runs of a client left: one with room, and one with too short a context."""

    turns: tuple[int, ...]
    """The number of trained turns of each sequence, in order of size."""
    forks: tuple[str, ...]
    """The reason of each fork."""
    sampled: int
    trained: int
    missing: tuple[str, ...]
    """The results of calls that the last prompt does not contain, and its images."""
    last: str
    """The last line of the program's output."""
    overflow: str
    """The same line if the context is too short."""
    requests: int
    """The number of requests whose prompt was then too long."""

    def _overflow(self, expected: str) -> tuple[str, str]:
        """Return what was reported and what was expected, in one form."""
        if expected.startswith("answer: "):
            return self.overflow[: len(expected)], expected
        return self.overflow, f"error: {expected}"

    def differences(self, expected: Expected) -> list[str]:
        """Name what differs from `expected`."""
        pairs = {
            "turns": (self.turns, expected.turns),
            "trained tokens": (self.trained, self.sampled),
            "forks": (len(self.forks), len(expected.forks)),
            "overflow": self._overflow(expected.overflow),
            "requests at overflow": (self.requests, expected.requests),
        }
        lines = [f"{name}: {got}, not {want}" for name, (got, want) in pairs.items() if got != want]
        lines += [
            f"fork: {reason!r} does not contain {piece!r}"
            for reason, piece in zip(self.forks, expected.forks, strict=False)
            if piece not in reason
        ]
        lines += [f"the last prompt does not contain {result!r}" for result in self.missing]
        if not self.last.startswith("answer:"):
            lines.append(f"no answer: {self.last}")
        return lines


def policy(client: Client) -> Callable[[PolicyRequest], str]:
    """Return the policy that plays `client.replies`, and repeats the last one."""
    calls = itertools.count()

    def reply(request: PolicyRequest) -> str:
        if client.aside and client.aside in request.text:
            return "A title"
        return client.replies[min(next(calls), len(client.replies) - 1)]

    return reply


async def play(
    client: Client, dialect: Dialect, command: Sequence[str | Path], *, stream: bool
) -> Played:
    """Run `command`, the client's program. Every sampled token must be trained exactly once, from
    the prompt that the engine got."""
    tokenizer = vision_tokenizer() if client.images else load_embedded_tokenizer()
    variables = {"CLIENT_DIALECT": dialect, "CLIENT_STREAM": "01"[stream]}
    options: dict[str, Any] = {}
    if dialect in client.drops:
        options["settings"] = {"server_tools": "drop"}
    if client.images:
        variables["CLIENT_IMAGES"] = "1"
        options |= {"images": image_tokens(tokenizer), "client": ExpandedEngine}
    async with endpoint(
        tokenizer, policy(client), split="random", context_length=ROOM, **options
    ) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        last = await _run(command, {**variables, "CLIENT_URL": f"{bench.url}/sessions/s"})
        trajectories = await bench.trajectories()
        sampled = sum(len(entry.output_ids or ()) for entry in bench.engine.log)
        prompt = tokenizer.decode(bench.engine.log[-1].input_ids) if bench.engine.log else ""
    async with endpoint(tokenizer, policy(client), context_length=TIGHT, **options) as bench:
        overflow = await _run(command, {**variables, "CLIENT_URL": f"{bench.url}/sessions/s"})
        requests = bench.endpoint.metrics.errors["context_length_exceeded"]
    spans = [
        [turn for turn in sequence["turns"] if turn["excluded"] is None]
        for sequence in trajectories
    ]
    images = max((len(sequence.get("media", ())) for sequence in trajectories), default=0)
    return Played(
        turns=tuple(sorted(map(len, spans))),
        forks=tuple(str(each["fork_reason"]) for each in trajectories if each["fork_reason"]),
        sampled=sampled,
        trained=sum(turn["stop"] - turn["start"] for turns in spans for turn in turns),
        missing=(
            *(result for result in client.results if result not in prompt),
            *(["its images"] if images != client.images else []),
        ),
        last=last,
        overflow=overflow,
        requests=requests,
    )


_QUIET = {
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
    "CONTINUE_METRICS_ENABLED": "0",
    "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
    "MASTRA_TELEMETRY_DISABLED": "1",
}
"""Variables that switch off what clients report to their makers."""


async def _run(command: Sequence[str | Path], variables: dict[str, str]) -> str:
    """Run `command` in an empty home folder. Return the last line of its output."""
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                **_QUIET,
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
