"""Access control for the endpoint. If the endpoint has a key, only clients with this key may use
it. If it has none, every program on this machine may use it, but web pages may not.

Invariants: keys are compared in constant time. An endpoint without a key listens on loopback, but
any web page can make a browser on this machine send requests to loopback. So without a key, a
request is refused before its body is read if its `Origin` is another site, or if its `Host` is not
a loopback name. The second check prevents DNS rebinding.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from aiohttp import web

from toolroll.endpoint.endpoint_settings import LOOPBACK
from toolroll.endpoint.errors import ApiError

_SESSION = "session:"


def session_key(key: str, session_id: str) -> str:
    """Return the key that opens only the session `session_id`, if the endpoint's key is `key`."""
    return hmac.new(key.encode(), session_id.encode(), hashlib.sha256).hexdigest()


def has_key(request: web.Request, key: str) -> bool:
    """Return True if `request` has `key`, alone or in the form `session:NAME:KEY`."""
    matches = False
    for sent in _keys(request):
        secret = sent.rpartition(":")[2] if sent.startswith(_SESSION) else sent
        for candidate in (sent, secret):
            matches |= hmac.compare_digest(candidate.encode(errors="surrogateescape"), key.encode())
    return matches


def sessions_in_keys(request: web.Request, *, keyed: bool) -> set[str]:
    """Return the session names in the keys of `request`. A client that can set only an API key, but
    no path and no header, names its session in this key: `session:NAME`, or `session:NAME:KEY` if
    the endpoint is `keyed`.
    """
    named = [key.removeprefix(_SESSION) for key in _keys(request) if key.startswith(_SESSION)]
    return {name.rpartition(":")[0] for name in named} if keyed else set(named)


def _keys(request: web.Request) -> list[str]:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return [key for key in (bearer, request.headers.get("x-api-key", "").strip()) if key]


def check_sender(request: web.Request) -> None:
    """Raise `ApiError` (403) if a web page may have made a browser send `request`. This check is
    for an endpoint without a key.
    """
    host = request.headers.get("Host", "")
    if _name_of(host) not in LOOPBACK:
        problem = (
            f"without a key this endpoint serves only the hosts {', '.join(sorted(LOOPBACK))}, not "
            f"{host!r}: use one of these hosts in the address, or serve with a key (--api-key-env)"
        )
        raise ApiError(403, "forbidden_host", problem)
    origin = request.headers.get("Origin")
    if origin is not None and origin.lower() != f"{request.scheme}://{host}".lower():
        problem = (
            f"a web page of {origin!r} may not use this endpoint without a key: call it from a "
            "program that sends no Origin, or serve with a key (--api-key-env)"
        )
        raise ApiError(403, "forbidden_origin", problem)


def _name_of(host: str) -> str | None:
    """Return the host name in a `Host` header. Return None if the header has no valid host name."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
