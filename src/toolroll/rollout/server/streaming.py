"""Stream the answers to a request as server-sent events, in the format of the API that the request
uses.

Invariants: before the last event of an answer is sent, the answer is committed and, if there is a
store, saved. A failure after the first event is sent as an event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.answers.bodies import (
    exact,
    finish_reason,
    is_long,
    prompt_token_ids,
    text_logprobs,
    tokens,
)
from toolroll.rollout.server.answers.result import CompletionResult, StreamContext
from toolroll.rollout.server.answers.stream_deltas import TextStream, choice_stream
from toolroll.rollout.server.dialects.dialect import Event, ParsedRequest, ReplyWriter
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.errors import api_error
from toolroll.rollout.server.requests.protocol import CompletionRequest
from toolroll.rollout.server.sessions.pending import PendingRequest


async def opened(endpoint: Endpoint, pending: PendingRequest[CompletionResult]) -> None:
    """Wait until a stream has an event to send. Raise any error that occurs before the first token,
    so that it becomes an HTTP error, which SDKs can retry.
    """
    while not pending.task.done() and not any(pending.progress):
        await pending.changed.wait()
    if pending.failed:
        endpoint.result(pending)


async def event_lines(
    endpoint: Endpoint, parsed: ParsedRequest, pending: PendingRequest[CompletionResult]
) -> AsyncIterator[bytes]:
    """Yield the whole stream as server-sent events."""
    dialect = parsed.dialect or endpoint.chat  # text completions use the lines of chat completions
    writer, context = None, pending.stream_context
    if parsed.dialect is not None and parsed.asked is not None:
        writer = parsed.dialect.writer(parsed.asked, context)
    try:
        async for event in (
            reply_events(endpoint, parsed, pending, writer)
            if writer is not None
            else text_events(endpoint, parsed, pending)
        ):
            yield dialect.line(event)
    except Exception as error:  # noqa: BLE001 - any error becomes an event
        found = api_error(error)
        endpoint.metrics.errors[found.code] += 1
        yield dialect.line(writer.failed(found) if writer is not None else found.body)
    yield dialect.done


async def reply_events(
    endpoint: Endpoint,
    parsed: ParsedRequest,
    pending: PendingRequest[CompletionResult],
    writer: ReplyWriter,
) -> AsyncIterator[Event]:
    """Yield the events of a reply. If the request fails, raise its error."""
    context = pending.stream_context
    assert isinstance(context, StreamContext)
    choices = [choice_stream(endpoint.served, context, seed) for seed in context.seeds]
    for event in writer.start():
        yield event
    async for progress in _followed(pending):
        for index, stream in enumerate(choices):
            for step in stream.feed(progress[index]):
                for event in writer.add(index, step):
                    yield event
    result = endpoint.result(pending)
    rest = [stream.finish(choice) for stream, choice in zip(choices, result.choices, strict=True)]
    await endpoint.commit(pending)
    for index, steps in enumerate(rest):
        for step in steps:
            for event in writer.add(index, step):
                yield event
    async for event in writer.finish(result):
        yield event


async def text_events(
    endpoint: Endpoint,
    parsed: ParsedRequest,
    pending: PendingRequest[CompletionResult],
) -> AsyncIterator[Event]:
    """Yield the chunks of a text completion."""
    request, context = parsed.request, pending.stream_context
    assert isinstance(request, CompletionRequest) and isinstance(context, StreamContext)
    encoder = endpoint.served.template.encoder
    head = {
        "id": context.answer_id,
        "object": "text_completion",
        "created": context.created,
        "model": endpoint.model,
    }
    texts = [
        TextStream(encoder, context.stop_token_ids, context.stop_strings) for _ in range(request.n)
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
    """Yield `pending.progress` (the ids sampled so far, by choice) at once, whenever it has grown,
    and when the request is done.
    """
    while True:
        changed = pending.changed
        yield pending.progress
        if pending.task.done():
            return
        await changed.wait()
