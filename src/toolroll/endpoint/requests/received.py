"""`Received`: the JSON body of a request, within the size limits.

Invariants: at most `max_body` bytes of a body are kept, both before and after decompression.
Decompression stops at that size. No object is built from a body with more than `max_items` values,
because a few bytes of text can become hundreds of bytes of objects. Bodies larger than `LARGE` and
all compressed bodies are decoded in a thread, so that they do not block other requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError
from toolroll.rollout.runtime.threads import call_of_size

LARGE = 100_000
"""The maximum number of bytes of JSON that are decoded on the event loop."""

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_ITEM = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[^\s\[\]{},:"]++', re.DOTALL)
"""A value of a JSON text (of an array or an object: its bracket), or a name in an object. A text
that is not closed ends with the body, so that each byte is read once.
"""

_IMAGE = re.compile(
    r"\.(messages|input)\[\d+]\.(content|output)\[\d+](\.content\[\d+])?"
    r"\.(image_url(\.url)?|source\.data)"
)
"""The path of an image in the body of a dialect. What is there becomes no text of a prompt."""


@dataclass(frozen=True, slots=True)
class Received:
    """The JSON object in a request's body. `large`: its text is larger than `LARGE`, or has an
    image, which may be large once it is decoded.
    """

    data: dict[str, Any]
    large: bool = False


async def decoded(raw: bytes, *, settings: EndpointSettings, compressed: bool = False) -> Received:
    """Decode the body `raw`, in a thread if it may be large. Raise `ApiError` as `decode` does."""
    call = partial(decode, raw, compressed=compressed, settings=settings)
    return await call_of_size(call, large=compressed or len(raw) > LARGE)


def decode(raw: bytes, *, compressed: bool, settings: EndpointSettings) -> Received:
    """Decode the body `raw`. Raise `ApiError` if it is too large, has too many values, is nested
    too deep, or is not a JSON object.
    """
    text = _decompressed(raw, settings.max_body) if compressed else raw
    if has_more_items(text, settings.max_items):
        problem = f"the body has more than {settings.max_items} names and values (--max-items)"
        raise ApiError(413, "too_many_items", problem)
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    if too_deep(data):
        problem = f"the body is nested deeper than the limit of {DEEPEST} levels"
        raise ApiError(400, "invalid_json", problem)
    path = _long_text(data, settings.max_text) if len(text) > settings.max_text else None
    if path is not None:
        path, limit = path.removeprefix(".")[:200], settings.max_text
        problem = f"{path} is longer than the limit of {limit} bytes for one text (--max-text)"
        raise ApiError(413, "text_too_large", problem, param=path)
    return Received(data, len(text) > LARGE or b"base64" in text)


def _decompressed(raw: bytes, limit: int) -> bytes:
    """Decompress `raw`, without producing more than `limit` bytes."""
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        text = decompressor.decompress(raw, limit + 1)
    except zlib.error as error:
        problem = f"the body does not have the encoding in its Content-Encoding: {error}"
        raise ApiError(400, "invalid_body", problem) from error
    if len(text) > limit:
        raise _too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise ApiError(
            400, "invalid_body", "the compressed body is incomplete, or has data after its end"
        )
    return text


def has_more_items(text: bytes, limit: int) -> bool:
    """Return True if the JSON `text` has more than `limit` names and values."""
    # Each of them but the first follows one of these characters. Counting them takes no memory, and
    # nearly always is enough.
    if len(text) < limit or sum(map(text.count, (b",", b":", b"[", b"{"))) < limit:
        return False
    return next(islice(_ITEM.finditer(text), limit, None), None) is not None


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, "body_too_large", f"the body is larger than the limit of {limit} bytes (--max-body)"
    )


def _long_text(data: Any, limit: int, place: str = "") -> str | None:
    """Return the path of the first text in `data` that is longer than `limit` bytes and not an
    image, or None.
    """
    if not isinstance(data, (dict, list)):
        return place if _longer(data, limit) and not _IMAGE.fullmatch(place) else None
    steps = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in steps:
        key_place = f"{place}.{key[:200]}" if isinstance(key, str) else f"{place}[{key}]"
        path = key_place if _longer(key, limit) else _long_text(value, limit, key_place)
        if path is not None:
            return path
    return None


def _longer(item: Any, limit: int) -> bool:
    """Return True if `item` is a text of more than `limit` bytes."""
    if not isinstance(item, str) or len(item) * 4 <= limit:
        return False
    return len(item) > limit or len(item.encode(errors="surrogatepass")) > limit


# --- nesting --------------------------------------------------------------------------------------


DEEPEST = 200
"""The maximum number of levels of a body."""
_SPARE = 54


def too_deep(data: Any, *, around: int = 0) -> bool:
    """Return True if `data` would have more than `DEEPEST` levels inside `around` other objects."""
    for _ in range(_SPARE + around):
        data = [data]
    try:
        orjson.dumps(data)
    except orjson.JSONEncodeError:
        return True
    return False


def too_deep_text(text: str) -> bool:
    """Return True if `text` is nested too deep for Python's `json` module, with which chat
    templates read the arguments of calls. Return False if `text` is not JSON.
    """
    try:
        # spare levels, because the stack may be deeper when a template is rendered
        json.loads("[" * _SPARE + text + "]" * _SPARE)
    except RecursionError:
        return True
    except ValueError:
        return False
    return False


# --- over HTTP ------------------------------------------------------------------------------------


async def receive(request: web.Request, settings: EndpointSettings) -> Received:
    """Return the body of `request`. Raise `ApiError` if it is too large, arrives too slowly, or is
    not a JSON object.
    """
    if request.content_type != "application/json":
        problem = f"send Content-Type: application/json, not {request.content_type!r}"
        raise ApiError(415, "unsupported_media_type", problem)
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
                    raise _too_large(settings.max_body)
    except TimeoutError as error:
        problem = f"the request did not arrive within {settings.receive:g} s"
        raise ApiError(408, "request_timeout", problem, retry=True) from error
    except web.RequestPayloadError as error:
        raise ApiError(400, "invalid_body", "the body does not match its headers") from error
    return bytes(raw)
