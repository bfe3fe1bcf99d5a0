"""Why an engine cannot answer, in words."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from toolroll.rollout.engine.failures import message_of

_TIMEOUT = 15.0  # SGLang's /health generates a token and polls once a second


@dataclass(frozen=True, slots=True)
class Health:
    """`ok`, and `why` not."""

    ok: bool
    why: str = ""


async def check_health(session: aiohttp.ClientSession, url: str) -> Health:
    """Ask `/health`."""
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=_TIMEOUT)) as response:
            text = (await response.read()).decode("utf-8", "replace")
    except aiohttp.ClientConnectorError as error:
        return Health(False, f"nothing answers at {url} ({error.os_error.strerror or error}): is the engine running there?")
    except TimeoutError:
        return Health(False, f"{url}/health gave no answer in {_TIMEOUT:.0f} s: the engine is starting, or stuck")
    except aiohttp.ClientError as error:
        return Health(False, f"{url} does not speak HTTP as expected: {error}")
    if response.status == 200:
        return Health(True)
    if response.status == 404:
        return Health(False, f"{url} answers, but has no /health: this is no SGLang engine or router")
    words = message_of(text)[:300]
    if "no_available_workers" in text or "circuits" in text:
        words += " (a router whose workers are all unhealthy, or whose circuit breaker is open: --disable-circuit-breaker)"
    return Health(False, f"{url}/health answers {response.status}: {words or 'without a word'}")
