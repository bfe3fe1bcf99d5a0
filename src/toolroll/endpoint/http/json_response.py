"""`JsonResponse`: an answer of the endpoint as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from toolroll.rollout.runtime.threads import call_of_size


class JsonResponse(web.Response):
    """The answer `data` as JSON; bytes are JSON already. The body is freed after it was written,
    because aiohttp keeps the response until the next request on the same connection.
    """

    def __init__(self, data: Any, **options: Any) -> None:
        body = data if isinstance(data, bytes) else orjson.dumps(data)
        super().__init__(body=body, content_type="application/json", **options)

    async def write_eof(self, data: bytes = b"") -> None:
        """Write the rest of the body, and free it."""
        await super().write_eof(data)
        self.body = None


async def json_of_size(build: Callable[[], Any], *, large: bool) -> web.Response:
    """Return the result of `build` as JSON. If the result is `large`, call `build` in a thread."""
    return JsonResponse(await call_of_size(lambda: orjson.dumps(build()), large=large))
