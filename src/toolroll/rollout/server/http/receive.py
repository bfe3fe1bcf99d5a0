"""`receive`: read the body of an HTTP request."""

from __future__ import annotations

import asyncio

from aiohttp import web

from toolroll.rollout.server.endpoint_settings import EndpointSettings
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.requests.received import Received, body_too_large, decoded


async def receive(request: web.Request, settings: EndpointSettings) -> Received:
    """Return the body of `request`. Raise `ApiError` if it is too large, arrives too slowly, or is
    not a JSON object.
    """
    if request.content_type != "application/json":
        words = f"send Content-Type: application/json, not {request.content_type!r}"
        raise ApiError(415, "unsupported_media_type", words)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Encoding is {encoding!r}; it must be gzip, deflate or identity",
        )
    return await decoded(
        await _raw(request, settings), compressed=encoding != "identity", settings=settings
    )


async def _raw(request: web.Request, settings: EndpointSettings) -> bytes:
    raw = bytearray()
    try:
        async with asyncio.timeout(settings.receive):
            async for chunk in request.content.iter_any():
                raw += chunk
                if len(raw) > settings.max_body:
                    raise body_too_large(settings.max_body)
    except TimeoutError as error:
        words = f"the request did not arrive within {settings.receive:g} s"
        raise ApiError(408, "request_timeout", words, retry=True) from error
    except web.RequestPayloadError as error:
        raise ApiError(400, "invalid_body", "the body does not match its headers") from error
    return bytes(raw)
