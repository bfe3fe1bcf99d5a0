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

from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.endpoint import Endpoint, ParsedRequest, StreamNote, call_id_seed
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
from toolroll.rollout.server.stream_deltas import ChoiceDeltas, GrowingText

Event = dict[str, Any]


async def opened(endpoint: Endpoint, work: PendingRequest[CompletionResult]) -> None:
    """Wait until a stream has something to tell. What fails before its first token is raised: an
    HTTP error, which SDKs can retry.
    """
    while not work.task.done() and not any(work.progress):
        await work.changed.wait()
    if work.failed:
        endpoint.deliver(work)


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
    request, note = asked.request, work.note
    assert isinstance(request, ChatRequest) and isinstance(note, StreamNote)
    head = {
        "id": stream_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": endpoint.model,
    }
    readers = [
        ChoiceDeltas(
            note.template,
            endpoint.served.parser,
            asked.tools if note.offered else None,
            call_id_seed(note.session_id, note.prompt_length, note.first + index),
            request.stop_strings,
        )
        for index in range(request.n)
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
        for index, reader in enumerate(readers):
            for delta in reader.feed(progress[index]):
                yield chunk(index, delta)
    served = endpoint.deliver(work)
    for index, (reader, choice) in enumerate(zip(readers, served.choices, strict=True)):
        assert choice.reading is not None
        for delta in reader.finish(choice.reading):
            yield chunk(index, delta)
        logprobs = None
        if request.logprobs:
            top = top_logprobs(request)
            large = is_long([choice.completion], logprobs=True, top=top)
            encoder = endpoint.served.template.encoder
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
    request = asked.request
    assert isinstance(request, CompletionRequest)
    encoder = endpoint.served.template.encoder
    head = {
        "id": stream_id,
        "object": "text_completion",
        "created": created,
        "model": endpoint.model,
    }
    texts = [GrowingText(encoder) for _ in range(request.n)]
    told = [0] * request.n

    def chunk(index: int, text: str, **more: Any) -> Event:
        return {
            **head,
            "choices": [
                {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
            ],
        }

    async for progress in _followed(work):
        for index, growing in enumerate(texts):
            ids = progress[index]
            growing.grow(
                ids[:-1] if ids and ids[-1] in endpoint.served.template.stop_token_ids else ids
            )
            held = max(map(len, request.stop_strings), default=0)
            fresh = growing.text[told[index] : len(growing.text) - held]
            if fresh:
                told[index] += len(fresh)
                yield chunk(index, fresh)
    served = endpoint.deliver(work)
    for index, choice in enumerate(served.choices):
        logprobs = None
        if request.logprobs is not None:
            large = is_long([choice.completion], logprobs=True, top=request.logprobs)
            logprobs = await call_of_size(
                text_logprobs, choice.completion, encoder, request.logprobs, large=large
            )
        last = chunk(
            index,
            choice.text[told[index] :],
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
