"""gptme's command line with native calls of its shell."""

import asyncio
import sys
from subprocess import PIPE

from common import KEY, STREAM, SYSTEM, TASK, URL, Reported, run

VARIABLES = {
    "OPENAI_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": KEY,
    "GPTME_TIKTOKEN_TIMEOUT": "0",  # otherwise it downloads a vocabulary
}


@run
async def main() -> object:
    settings = [f"{name}={value}" for name, value in VARIABLES.items()]
    options = "--model local/m --tools shell,complete --no-workspace --tool-format tool".split()
    options += ["--system", SYSTEM, "--stream" if STREAM else "--no-stream"]
    command = ["env", *settings, sys.executable, "-m", "gptme", "--non-interactive", *options]
    process = await asyncio.create_subprocess_exec(*command, TASK, stdout=PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise Reported(f"exit status {process.returncode}")
    return output.decode()
