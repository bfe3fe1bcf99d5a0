"""OpenAI's chat completions. The endpoint converts the requests of the other dialects to requests
of this dialect (`ChatRequest`).

Invariant: in a stream, the chunk with the finish reason also has the exact token ids of the prompt
and of the reply.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from toolroll.parsers.openai import openai_function
from toolroll.parsers.types import Delta
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.answers.bodies import (
    chat_body,
    chat_logprobs,
    exact,
    finish_reason,
    is_long,
    tokens,
)
from toolroll.rollout.server.answers.result import CompletionResult, StreamContext
from toolroll.rollout.server.conversation.stored_response import ResponseStore
from toolroll.rollout.server.dialects.dialect import Asked, Dialect, Event, data_line
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.requests.protocol import ChatRequest, read
from toolroll.rollout.server.requests.sampling import top_logprobs
from toolroll.rollout.template.encode import Encoder


@dataclass(frozen=True, eq=False)
class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    kind = "chat.completion"
    prefix = "chatcmpl-"
    exact = True
    done = b"data: [DONE]\n\n"

    encoder: Encoder
    model: str
    openrlhf_token_ids: bool

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> Asked:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        request = read(ChatRequest, data)
        given, request.messages = request.messages, []
        return Asked(request, given, list(data.get("tools") or ()))

    def body(self, asked: Asked, result: CompletionResult) -> dict[str, Any]:
        """Return a `chat.completion` without `prompt_token_ids`, which `CompletionResult.body`
        adds.
        """
        request = asked.request
        return chat_body(
            result,
            self.encoder,
            logprobs=bool(request.logprobs),
            top=top_logprobs(request),
            token_ids=self.openrlhf_token_ids,
        )

    def writer(self, asked: Asked, context: StreamContext) -> ChatWriter:
        """Return the writer of one stream."""
        return ChatWriter(asked.request, context, self.encoder, self.model)

    def line(self, event: Event) -> bytes:
        """Return `event` as a server-sent event."""
        return data_line(event)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return error.body


class ChatWriter:
    """Writes `chat.completion.chunk` events.

    The arguments of a call are sent in one chunk. They are normalized JSON, which is known only
    once the call is complete.
    """

    def __init__(
        self, request: ChatRequest, context: StreamContext, encoder: Encoder, model: str
    ) -> None:
        self._request = request
        self._encoder = encoder
        self._head = {
            "id": context.answer_id,
            "object": "chat.completion.chunk",
            "created": context.created,
            "model": model,
        }
        self._calls = [0] * request.n

    def start(self) -> Iterable[Event]:
        """Return the first chunk of each choice."""
        for index in range(self._request.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the chunks for one delta."""
        if step.call is None:
            name = "reasoning_content" if step.kind == "reasoning" else "content"
            yield self._chunk(index, {name: step.text})
            return
        at, function = self._calls[index], openai_function(step.call)
        self._calls[index] += 1
        head = {
            "index": at,
            "id": step.call.id,
            "type": "function",
            "function": {"name": function["name"], "arguments": ""},
        }
        rest = {"index": at, "function": {"arguments": function["arguments"]}}
        yield self._chunk(index, {"tool_calls": [head]})
        yield self._chunk(index, {"tool_calls": [rest]})

    async def finish(self, result: CompletionResult) -> AsyncIterator[Event]:
        """Yield the last chunk of each choice, and the usage if the client asked for it."""
        request = self._request
        for index, choice in enumerate(result.choices):
            logprobs = None
            if request.logprobs:
                top = top_logprobs(request)
                large = is_long([choice.completion], logprobs=True, top=top)
                logprobs = await call_of_size(
                    chat_logprobs, choice.completion, self._encoder, top, large=large
                )
            last = self._chunk(
                index, {}, logprobs=logprobs, finish_reason=finish_reason(choice), **exact(choice)
            )
            yield {**last, **tokens(result)}
        if request.stream_options is not None and request.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": result.usage}

    def failed(self, error: ApiError) -> Event:
        """Return OpenAI's error body."""
        return error.body

    def _chunk(self, index: int, delta: Event, **more: Any) -> Event:
        entry = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self._head, "choices": [entry]}
