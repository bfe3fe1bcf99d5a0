"""gptme's command line with native calls of its shell."""

from __future__ import annotations

import subprocess
import sys

from common import KEY, STREAM, SYSTEM, TASK, URL, Reported, run

VARIABLES = {
    "OPENAI_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": KEY,
    "GPTME_TIKTOKEN_TIMEOUT": "0",  # otherwise it downloads a vocabulary
}


async def main() -> object:
    settings = [f"{name}={value}" for name, value in VARIABLES.items()]
    options = [
        "--model",
        "local/m",
        "--system",
        SYSTEM,
        "--tools",
        "shell,complete",
        "--no-workspace",
    ]
    options += ["--tool-format", "tool", "--stream" if STREAM else "--no-stream"]
    command = ["env", *settings, sys.executable, "-m", "gptme", "--non-interactive", *options]
    result = subprocess.run([*command, TASK], capture_output=True, text=True)
    if result.returncode:
        raise Reported(f"exit status {result.returncode}")
    return result.stdout


run(main)
