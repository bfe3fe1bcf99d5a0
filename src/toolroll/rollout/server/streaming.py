"""Stream the answers to a request as server-sent events, in the format of the API that the request
uses.

Invariants: before the last event of an answer is sent, the answer is committed and, if there is a
store, saved. A failure after the first event is sent as an event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from toolroll.rollout.server.dialects.dialect import Event, ReplyWriter
from toolroll.rollout.server.errors import api_error
from toolroll.rollout.server.replies import Reply


async def opened(reply: Reply) -> None:
    """Wait until a stream has an event to send. Raise any error that occurs before the first token,
    so that it becomes an HTTP error, which SDKs can retry.
    """
    while not reply.task.done() and not any(reply.progress):
        await reply.changed.wait()
    if reply.failed:
        reply.outcome()


async def event_lines(reply: Reply) -> AsyncIterator[bytes]:
    """Yield the whole stream as server-sent events."""
    dialect = reply.dialect
    writer = dialect.writer(reply.parsed, reply.result)
    try:
        async for event in _events(reply, writer):
            yield dialect.line(event)
    except Exception as failure:  # noqa: BLE001 - any error becomes an event
        error = api_error(failure)
        reply.endpoint.metrics.errors[error.code] += 1
        yield dialect.line(writer.failed(error))
    yield dialect.done


async def _events(reply: Reply, writer: ReplyWriter) -> AsyncIterator[Event]:
    """Yield the events of a reply. If the request fails, raise its error."""
    streams = [reply.stream(index) for index in range(reply.parsed.request.n)]
    for event in writer.start():
        yield event
    done = False
    while not done:
        changed, done = reply.changed, reply.task.done()
        for index, stream in enumerate(streams):
            for step in stream.feed(reply.progress[index]):
                for event in writer.add(index, step):
                    yield event
        if not done:
            await changed.wait()
    choices = reply.outcome().choices
    rest = [
        stream.finish(choice.completion, choice.text, choice.turn)
        for stream, choice in zip(streams, choices, strict=True)
    ]
    await reply.deliver()
    for index, steps in enumerate(rest):
        for step in steps:
            for event in writer.add(index, step):
                yield event
    async for event in writer.finish():
        yield event
