"""Play one client against the endpoint, and judge what the session holds."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from clients.table import Client, Dialect
from support.endpoints import endpoint
from support.looking import FIRST, saying
from support.patience import PATIENCE

from toolroll.rollout.testing import load_embedded_tokenizer

PROGRAMS = Path(__file__).parent / "programs"
SYSTEM, TASK = FIRST[0]["content"], FIRST[1]["content"]
TIGHT = 60
"""A context length that is too short for the first prompt."""


@dataclass(frozen=True)
class Played:
    """What one run of a client left. `turns`: of each sequence. `last`: the program's last line."""

    turns: tuple[int, ...]
    fork_reasons: tuple[str, ...]
    sampled: int
    trained: int
    requests: int
    last: str


async def play(
    client: Client, dialect: Dialect, python: Path, *, stream: bool, fits: bool = True
) -> Played:
    """Run the client's program with `python`. Every sampled token must be trained exactly once, from
    the prompt that the engine got. If `fits` is False, no prompt fits the engine's context.
    """
    engine = {} if fits else {"context_length": TIGHT}
    async with endpoint(load_embedded_tokenizer(), saying, split="random", **engine) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        last = await _run(client.program, python, f"{bench.url}/sessions/s", dialect, stream=stream)
        trajectories = await bench.trajectories()
        spans = [turn for sequence in trajectories for turn in sequence["turns"]]
        return Played(
            turns=tuple(
                sum(turn["excluded"] is None for turn in sequence["turns"])
                for sequence in trajectories
            ),
            fork_reasons=tuple(
                str(sequence["fork_reason"]) for sequence in trajectories if sequence["fork_reason"]
            ),
            sampled=sum(len(entry.output_ids or ()) for entry in bench.engine.log),
            trained=sum(
                turn["stop"] - turn["start"] for turn in spans if turn["excluded"] is None
            ),
            requests=sum(bench.endpoint.metrics.requests.values()) - 1,
            last=last,
        )


async def _run(program: str, python: Path, url: str, dialect: str, *, stream: bool) -> str:
    """Run the program in an empty home folder. Return the last line of its output."""
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            python,
            PROGRAMS / f"{program}.py",
            cwd=home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "CLIENT_URL": url,
                "CLIENT_DIALECT": dialect,
                "CLIENT_STREAM": "01"[stream],
                "CLIENT_SYSTEM": SYSTEM,
                "CLIENT_TASK": TASK,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
        finally:
            if process.returncode is None:
                process.kill()
        lines = output.decode().splitlines()
        assert lines and process.returncode == 0, errors.decode()[-3000:]
        return lines[-1]
