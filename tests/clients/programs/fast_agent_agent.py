"""fast-agent's agent with its provider of each dialect."""

import os

from common import BASE, DIALECT, KEY, SYSTEM, TASK, look, run
from fast_agent import FastAgent
from fast_agent.types import RequestParams

PROVIDERS = {"chat": "generic", "responses": "openresponses", "messages": "anthropic"}
PROVIDER = PROVIDERS[DIALECT]
LIMIT = RequestParams(maxTokens=1000)
os.environ |= {f"{PROVIDER.upper()}_API_KEY": KEY, f"{PROVIDER.upper()}_BASE_URL": BASE}
fast = FastAgent("looking", parse_cli_args=False, quiet=True, isolated=True)


@run
@fast.agent("looker", SYSTEM, model=f"{PROVIDER}.m", function_tools=[look], request_params=LIMIT)
async def main() -> object:
    async with fast.run() as agents:
        return await agents.looker.send(TASK)
