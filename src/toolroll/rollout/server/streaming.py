"""The answers of a pending request as events with OpenAI's chunks.

Invariants: an answer is committed, and saved if there is a store, before its last chunk goes out; a
failure after the first chunk is an event with OpenAI's error body; the chunk with the finish reason
also has the exact ids.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson

from toolroll.rollout.model.turn import parse_options
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.endpoint import Endpoint, ParsedRequest, StreamContext
from toolroll.rollout.server.errors import api_error
from toolroll.rollout.server.pending import PendingRequest
from toolroll.rollout.server.protocol import ChatRequest, CompletionRequest
from toolroll.rollout.server.responses import (
    chat_logprobs,
    exact,
    finish_reason,
    is_long,
    prompt_token_ids,
    text_logprobs,
    tokens,
)
from toolroll.rollout.server.result import CompletionResult
from toolroll.rollout.server.sampling import top_logprobs
from toolroll.rollout.server.stream_deltas import ChoiceStream, TextStream

Event = dict[str, Any]


async def opened(endpoint: Endpoint, pending: PendingRequest[CompletionResult]) -> None:
    """Wait until a stream has something to send. An error before the first token is raised here and
    becomes an HTTP error, which SDKs can retry.
    """
    while not pending.task.done() and not any(pending.progress):
        await pending.changed.wait()
    if pending.failed:
        endpoint.result(pending)


async def event_lines(
    endpoint: Endpoint, parsed: ParsedRequest, pending: PendingRequest[CompletionResult]
) -> AsyncIterator[bytes]:
    """Yield the whole stream as server-sent events."""
    events = chat_events if isinstance(parsed.request, ChatRequest) else text_events
    try:
        async for event in events(
            endpoint,
            parsed,
            pending,
            stream_id=f"stream-{uuid.uuid4().hex}",
            created=int(time.time()),
        ):
            yield b"data: " + orjson.dumps(event) + b"\n\n"
    except Exception as error:  # noqa: BLE001 - the endpoint's border: it becomes an event
        found = api_error(error)
        endpoint.metrics.errors[found.code] += 1
        yield b"data: " + orjson.dumps(found.body) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def chat_events(
    endpoint: Endpoint,
    parsed: ParsedRequest,
    pending: PendingRequest[CompletionResult],
    *,
    stream_id: str,
    created: int,
) -> AsyncIterator[Event]:
    """Yield the chunks of a chat completion. Raises the error of the request."""
    request, context = parsed.request, pending.stream_context
    assert isinstance(request, ChatRequest) and isinstance(context, StreamContext)
    head = {
        "id": stream_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": endpoint.model,
    }
    encoder, parser = endpoint.served.template.encoder, endpoint.served.parser
    options = parse_options(endpoint.served, context.template, context.tools, streamed=True)
    choices = [
        ChoiceStream(
            TextStream(encoder, context.stop_token_ids, request.stop_strings),
            parser.stream(**options),
            seed,
        )
        for seed in context.seeds
    ]

    def chunk(index: int, delta: Event, **more: Any) -> Event:
        return {
            **head,
            "choices": [
                {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            ],
        }

    for index in range(request.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for progress in _followed(pending):
        for index, stream in enumerate(choices):
            for delta in stream.feed(progress[index]):
                yield chunk(index, delta)
    result = endpoint.result(pending)
    rest = [stream.finish(choice) for stream, choice in zip(choices, result.choices, strict=True)]
    await endpoint.commit(pending)
    for index, choice in enumerate(result.choices):
        for delta in rest[index]:
            yield chunk(index, delta)
        logprobs = None
        if request.logprobs:
            top = top_logprobs(request)
            large = is_long([choice.completion], logprobs=True, top=top)
            logprobs = await call_of_size(
                chat_logprobs, choice.completion, encoder, top, large=large
            )
        last = chunk(
            index, {}, logprobs=logprobs, finish_reason=finish_reason(choice), **exact(choice)
        )
        yield {**last, **tokens(result)}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": result.usage}


async def text_events(
    endpoint: Endpoint,
    parsed: ParsedRequest,
    pending: PendingRequest[CompletionResult],
    *,
    stream_id: str,
    created: int,
) -> AsyncIterator[Event]:
    """Yield the chunks of a text completion."""
    request, context = parsed.request, pending.stream_context
    assert isinstance(request, CompletionRequest) and isinstance(context, StreamContext)
    encoder = endpoint.served.template.encoder
    head = {
        "id": stream_id,
        "object": "text_completion",
        "created": created,
        "model": endpoint.model,
    }
    texts = [
        TextStream(encoder, context.stop_token_ids, request.stop_strings) for _ in range(request.n)
    ]

    def chunk(index: int, text: str, **more: Any) -> Event:
        return {
            **head,
            "choices": [
                {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
            ],
        }

    async for progress in _followed(pending):
        for index, stream in enumerate(texts):
            text, _ = stream.feed(progress[index])
            if text:
                yield chunk(index, text)
    result = endpoint.result(pending)
    rest = [
        stream.finish(choice.completion.output_ids.tolist(), choice.text)[0]
        for stream, choice in zip(texts, result.choices, strict=True)
    ]
    await endpoint.commit(pending)
    for index, choice in enumerate(result.choices):
        logprobs = None
        if request.logprobs is not None:
            large = is_long([choice.completion], logprobs=True, top=request.logprobs)
            logprobs = await call_of_size(
                text_logprobs, choice.completion, encoder, request.logprobs, large=large
            )
        last = chunk(
            index,
            rest[index],
            logprobs=logprobs,
            finish_reason=finish_reason(choice),
            **exact(choice),
            **(prompt_token_ids(result) if request.return_token_ids else {}),
        )
        yield {**last, **tokens(result)}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": result.usage}


async def _followed(pending: PendingRequest[CompletionResult]) -> AsyncIterator[list[list[int]]]:
    """Yield the progress whenever there is more, until the request is done."""
    while True:
        changed = pending.changed
        yield pending.progress
        if pending.task.done():
            return
        await changed.wait()
