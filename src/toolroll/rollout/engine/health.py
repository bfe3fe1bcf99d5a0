"""Check whether a server can answer, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from toolroll.rollout.engine.errors import message_of, reason, without_server
from toolroll.rollout.engine.transport import NETWORK_ERRORS, Transport

_TIMEOUT = 15.0  # SGLang's /health generates a token and polls once a second
_DOWN = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a health check. `why`: the reason if `ok` is False, without the server's
    address. `down`: the server does not answer, or answers that it is down.
    """

    ok: bool
    why: str = ""
    down: bool = False


async def check_endpoint(base_url: str, authorization: str | None = None) -> Health:
    """Check that a server answers at `base_url`, the address of an OpenAI-compatible server.

    Any status of `/models` except 502, 503 and 504 is ok, because some servers do not have this
    route.
    """
    headers = {"Authorization": authorization} if authorization else {}
    limits = aiohttp.ClientTimeout(total=_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=headers) as session,
            session.get(f"{base_url}/models", allow_redirects=False) as response,
        ):
            status = response.status
    except NETWORK_ERRORS as error:
        return Health(False, f"nothing answers ({without_server(reason(error))})", down=True)
    if status in _DOWN:
        return Health(False, f"/models answers {status}", down=True)
    return Health(True)


async def check_health(transport: Transport, url: str) -> Health:
    """Check `/health` of the engine or router at `url`."""
    try:
        answer = await transport.ask(f"{url}/health", seconds=_TIMEOUT)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        message = f"nothing answers ({without_server(reason(error))}): is the engine running there?"
        return Health(False, message, down=True)
    except TimeoutError:
        message = f"/health gave no answer in {_TIMEOUT:.0f} s: the engine is starting or stuck"
        return Health(False, message, down=True)
    except NETWORK_ERRORS as error:
        return Health(False, f"it does not speak HTTP as expected: {reason(error)}", down=True)
    if answer.status == 200:
        return Health(True)
    if answer.status == 404:
        why = "it answers, but has no /health: this is not an SGLang engine or router"
        return Health(False, why)
    text = answer.body.decode("utf-8", "replace")
    message = message_of(text)[:300]
    if "no_available_workers" in text or "circuits" in text:
        message += (
            " (all workers of this router are unhealthy, or its circuit breaker is open; "
            "--disable-circuit-breaker turns it off)"
        )
    why = f"/health answers {answer.status}: {message or 'without a message'}"
    return Health(False, why, down=answer.status in _DOWN)
