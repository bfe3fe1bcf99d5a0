"""A scripted server of OpenAI's chat completions."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from openai.types.chat import ChatCompletion
from support.exports import a_call
from support.http import app_server

UNFINISHED = ("abort", "error", "network_error", "content_filter", "length", None)
"""The finish reasons of answers that are not whole."""

Answer = Callable[[dict[str, Any]], "Awaitable[web.Response] | web.Response"]


class Seen:
    """A server's address and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


def fails(status: int, text: str = "no", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda body: web.Response(status=status, text=text, headers=named)


@asynccontextmanager
async def endpoint(*answers: Answer | dict[str, Any]) -> AsyncIterator[Seen]:
    """A server on 127.0.0.1 that gives `answers` in order, and then repeats the last one."""
    seen = Seen()

    async def handle(request: web.Request) -> web.Response:
        seen.bodies.append(await request.json())
        seen.keys.append(request.headers.get("Authorization"))
        answer = answers[min(len(seen.bodies), len(answers)) - 1]
        if isinstance(answer, dict):
            return web.json_response(answer)
        found = answer(seen.bodies[-1])
        return found if isinstance(found, web.Response) else await found

    application = web.Application()
    application.router.add_post("/v1/chat/completions", handle)
    async with app_server(application) as url:
        seen.url = f"{url}/v1"
        yield seen


def completion(
    content: str | None,
    calls: list[tuple[str, str]] | None = None,
    finish: str = "stop",
    **message: Any,
) -> dict[str, Any]:
    """A chat completion as OpenAI's own types have it."""
    found: dict[str, Any] = {"role": "assistant", "content": content} | message
    if calls:
        found["tool_calls"] = [
            a_call(name, arguments, f"call_{at}") for at, (name, arguments) in enumerate(calls)
        ]
        finish = "tool_calls"
    usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    usage["prompt_tokens_details"] = {"cached_tokens": 5}
    data = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": found, "finish_reason": finish, "logprobs": None}],
        "usage": usage,
    }
    ChatCompletion.model_validate(data)
    return data
