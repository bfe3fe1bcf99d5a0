"""The example: an agent of the OpenAI Agents SDK against `toolroll serve`, both as processes of
their own.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from support.endpoints import judge
from support.episodes import call
from support.patience import PATIENCE

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

ROOT = Path(__file__).parents[2]
SAID = [
    "Let me look. " + call("look", at="kitchen"),
    call("look", at="garden"),
    "The key is under the third pot.",
]


async def started(*command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )


async def test_the_agents_sdk_against_toolroll_serve() -> None:
    async with EmbeddedEngine(
        load_embedded_tokenizer(), lambda request: SAID[request.call], split="random"
    ) as engine:
        main = "from toolroll.cli import main; main()"
        server = await started(
            "-c", main, "serve", "--model", "embedded", "--engine", engine.url, "--port", "0"
        )
        assert server.stdout is not None
        try:
            line = (await asyncio.wait_for(server.stdout.readline(), PATIENCE)).decode()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            url = found.group()
            example = await started("examples/openai_agents/looker.py", "--url", url, "--runs", "3")
            out, _ = await asyncio.wait_for(example.communicate(), PATIENCE)
            assert example.returncode == 0
            lines = out.decode().splitlines()
            assert len(lines) == 3
            assert all("reward 1.0, 3 turns" in line for line in lines), lines
            async with aiohttp.ClientSession() as http:
                for at in range(3):
                    async with http.get(f"{url}/sessions/finder-{at}/trajectories") as response:
                        data: Any = await response.json()
                    judge(data["trajectories"], engine, f"finder-{at}")
                    assert len(data["trajectories"]) == 1
        finally:
            server.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(server.wait(), PATIENCE) == 0
