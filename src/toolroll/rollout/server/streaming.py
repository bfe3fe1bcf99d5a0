"""A work's answers as events, in OpenAI's chunks.

Invariants: an answer is committed before its last chunk goes out; a failure after the first chunk
is an event with OpenAI's error body; the chunk with the finish reason also has the exact ids.
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
    text_logprobs,
    tokens,
)
from toolroll.rollout.server.result import CompletionResult
from toolroll.rollout.server.sampling import top_logprobs
from toolroll.rollout.server.stream_deltas import ChoiceStream, TextStream

Event = dict[str, Any]


async def opened(endpoint: Endpoint, work: PendingRequest[CompletionResult]) -> None:
    """Wait until a stream has something to tell. What fails before its first token is raised: an
    HTTP error, which SDKs can retry.
    """
    while not work.task.done() and not any(work.progress):
        await work.changed.wait()
    if work.failed:
        endpoint.result(work)


async def event_lines(
    endpoint: Endpoint, asked: ParsedRequest, work: PendingRequest[CompletionResult]
) -> AsyncIterator[bytes]:
    """The whole stream, as server-sent events."""
    events = chat_events if isinstance(asked.request, ChatRequest) else text_events
    try:
        async for event in events(
            endpoint, asked, work, stream_id=f"stream-{uuid.uuid4().hex}", created=int(time.time())
        ):
            yield b"data: " + orjson.dumps(event) + b"\n\n"
    except Exception as error:  # noqa: BLE001 - the endpoint's border: it becomes an event
        yield b"data: " + orjson.dumps(api_error(error).body) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def chat_events(
    endpoint: Endpoint,
    asked: ParsedRequest,
    work: PendingRequest[CompletionResult],
    *,
    stream_id: str,
    created: int,
) -> AsyncIterator[Event]:
    """The chunks of a chat completion. Raises what the work raises."""
    request, context = asked.request, work.stream_context
    assert isinstance(request, ChatRequest) and isinstance(context, StreamContext)
    head = {
        "id": stream_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": endpoint.model,
    }
    encoder, parser = endpoint.served.template.encoder, endpoint.served.parser
    options = parse_options(endpoint.served, context.template, context.tools)
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
    async for progress in _followed(work):
        for index, stream in enumerate(choices):
            for delta in stream.feed(progress[index]):
                yield chunk(index, delta)
    served = endpoint.result(work)
    rest = [stream.finish(choice) for stream, choice in zip(choices, served.choices, strict=True)]
    endpoint.commit(work)
    for index, choice in enumerate(served.choices):
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
        yield {**last, **tokens(served)}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": served.usage}


async def text_events(
    endpoint: Endpoint,
    asked: ParsedRequest,
    work: PendingRequest[CompletionResult],
    *,
    stream_id: str,
    created: int,
) -> AsyncIterator[Event]:
    """The chunks of a text completion."""
    request, context = asked.request, work.stream_context
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

    async for progress in _followed(work):
        for index, stream in enumerate(texts):
            text, _ = stream.feed(progress[index])
            if text:
                yield chunk(index, text)
    served = endpoint.result(work)
    rest = [
        stream.finish(choice.completion.output_ids.tolist(), choice.text)[0]
        for stream, choice in zip(texts, served.choices, strict=True)
    ]
    endpoint.commit(work)
    for index, choice in enumerate(served.choices):
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
        )
        yield {**last, **tokens(served)}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": served.usage}


async def _followed(work: PendingRequest[CompletionResult]) -> AsyncIterator[list[list[int]]]:
    """The progress whenever there is more, until the work is done."""
    while True:
        changed = work.changed
        yield work.progress
        if work.task.done():
            return
        await changed.wait()
