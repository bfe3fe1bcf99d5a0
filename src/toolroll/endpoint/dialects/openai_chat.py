"""OpenAI's chat completions. The endpoint converts the requests of the other dialects to requests
of this dialect (`ChatRequest`).

Invariant: in a stream, the chunk with the finish reason also has the exact token ids of the prompt
and of the reply.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from toolroll.endpoint.answers.result import (
    Choice,
    CompletionResult,
    chat_logprobs,
    constraint,
    exact,
    finish_reason,
    is_long,
    prompt_token_ids,
    text_logprobs,
    wire_message,
)
from toolroll.endpoint.conversation.stored_response import ResponseStore
from toolroll.endpoint.dialects.dialect import Dialect, Event, ParsedRequest, data_line
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.request_bodies import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    read,
)
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.parsers.openai import openai_function
from toolroll.parsers.types import Delta
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion


@dataclass(frozen=True, eq=False)
class Completions(Dialect):
    """What chat and text completions share."""

    done = b"data: [DONE]\n\n"

    encoder: Encoder

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]:
        """Return the field of `choice` with its content."""

    @abstractmethod
    def top_logprobs(self, completion: Completion, top: int) -> dict[str, Any]:
        """Return the logprobs of `completion`, with the `top` logprobs at each position."""

    def logprobs(self, request: Sampling, completion: Completion) -> dict[str, Any] | None:
        """Return the logprobs of `completion`, or None if `request` does not ask for them."""
        return None if request.top is None else self.top_logprobs(completion, request.top)

    def more(self, request: Sampling, result: CompletionResult) -> dict[str, Any]:
        """Return further fields of each choice."""
        return {}

    def more_of_answer(self, result: CompletionResult) -> dict[str, Any]:
        """Return further fields of the answer."""
        return {}

    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        request = parsed.request
        choices = [
            {
                "index": index,
                **self.content(choice),
                "finish_reason": finish_reason(choice),
                "logprobs": self.logprobs(request, choice.completion),
                **exact(choice),
                **self.more(request, result),
            }
            for index, choice in enumerate(result.choices)
        ]
        return {
            **_head(self.kind, result),
            "choices": choices,
            "usage": result.usage,
            **constraint(result),
            **self.more_of_answer(result),
            **prompt_token_ids(result),
        }

    def line(self, event: Event) -> bytes:
        """Return `event` as a server-sent event."""
        return data_line(event)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        return error.body


def _head(kind: str, result: CompletionResult) -> dict[str, Any]:
    """Return the first fields of an answer, or of a chunk, of the type `kind`."""
    return {"id": result.id, "object": kind, "created": result.created, "model": result.model}


class ChunkWriter:
    """Writes the chunks of `dialect`, an API of completions."""

    kind: ClassVar[str]

    def __init__(self, dialect: Completions, request: Sampling, result: CompletionResult) -> None:
        self._dialect = dialect
        self._request = request
        self._result = result
        self._head = _head(self.kind, result)

    async def finish(self) -> AsyncIterator[Event]:
        """Yield the last chunk of each choice, and the usage if the client asked for it."""
        request, result = self._request, self._result
        for index, choice in enumerate(result.choices):
            large = is_long([choice.completion], request.top)
            logprobs = await call_of_size(
                self._dialect.logprobs, request, choice.completion, large=large
            )
            last = self._chunk(
                index,
                self._rest(index, choice),
                logprobs=logprobs,
                finish_reason=finish_reason(choice),
                **exact(choice),
                **self._dialect.more(request, result),
            )
            yield {**last, **prompt_token_ids(result), **constraint(result)}
        if request.stream_options is not None and request.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": result.usage}

    def failed(self, error: ApiError) -> Event:
        """Return OpenAI's error body."""
        return error.body

    def _rest(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the content of the last chunk of a choice."""
        raise NotImplementedError

    def _chunk(self, index: int, content: Event, **more: Any) -> Event:
        entry = {"index": index, **content, "logprobs": None, "finish_reason": None, **more}
        return {**self._head, "choices": [entry]}


@dataclass(frozen=True, eq=False)
class ChatCompletions(Completions):
    """`POST /v1/chat/completions`. `openrlhf`: add the top-level field `token_ids`."""

    kind = "chat.completion"
    prefix = "chatcmpl-"

    openrlhf: bool

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        values = data.get("tools")
        tools = ToolList.of(values if isinstance(values, list) else [])
        valid = tools.valid and isinstance(values, list)
        request = read(ChatRequest, {**data, "tools": None} if valid else data)
        tools.valid = True
        messages, request.messages, request.tools = request.messages, [], None
        return ParsedRequest(request, messages, tools)

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"message": wire_message(choice)}

    def top_logprobs(self, completion: Completion, top: int) -> dict[str, Any]:
        return chat_logprobs(completion, self.encoder, top)

    def more_of_answer(self, result: CompletionResult) -> dict[str, Any]:
        """If OpenRLHF is the client, return the ids of the prompt and of the first answer, under
        the names that OpenRLHF's example uses.
        """
        if not self.openrlhf:
            return {}
        ids = result.choices[0].completion.output_ids.tolist()
        prompt = result.prompt_ids.tolist()
        return {"token_ids": {"prompt_token_ids": prompt, "completion_token_ids": ids}}

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> ChatWriter:
        return ChatWriter(self, parsed.request, result)


class ChatWriter(ChunkWriter):
    """Writes `chat.completion.chunk` events.

    The arguments of a call are sent in one chunk. They are normalized JSON, which is known only
    once the call is complete.
    """

    kind = "chat.completion.chunk"

    def start(self) -> Iterable[Event]:
        """Return the first chunk of each choice."""
        self._calls = [0] * self._request.n
        for index in range(self._request.n):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the chunks for one delta."""
        if step.call is None:
            name = "reasoning_content" if step.kind == "reasoning" else "content"
            yield self._delta(index, {name: step.text})
            return
        number, function = self._calls[index], openai_function(step.call)
        self._calls[index] += 1
        start = {
            "index": number,
            "id": step.call.id,
            "type": "function",
            "function": {"name": function["name"], "arguments": ""},
        }
        arguments = {"index": number, "function": {"arguments": function["arguments"]}}
        yield self._delta(index, {"tool_calls": [start]})
        yield self._delta(index, {"tool_calls": [arguments]})

    def _delta(self, index: int, delta: Event) -> Event:
        return self._chunk(index, {"delta": delta})

    def _rest(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"delta": {}}


# --- text completions -----------------------------------------------------------------------------


class TextCompletions(Completions):
    """`POST /v1/completions`. If the request sets `return_token_ids`, each choice has a field
    `prompt_token_ids`, as in vLLM.
    """

    kind = "text_completion"
    prefix = "cmpl-"

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        return ParsedRequest(read(CompletionRequest, data))

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def top_logprobs(self, completion: Completion, top: int) -> dict[str, Any]:
        return text_logprobs(completion, self.encoder, top)

    def more(self, request: Sampling, result: CompletionResult) -> dict[str, Any]:
        """Return the ids of the prompt if the request asks for them."""
        return prompt_token_ids(result) if request.return_token_ids else {}

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> TextWriter:
        return TextWriter(self, parsed.request, result)


class TextWriter(ChunkWriter):
    """Writes the chunks of a text completion. The last chunk of a choice contains the rest of its
    text.
    """

    kind = "text_completion"

    def start(self) -> Iterable[Event]:
        """Return no events."""
        self._sent = [0] * self._request.n
        return ()

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the chunk for one delta."""
        self._sent[index] += len(step.text)
        yield self._chunk(index, {"text": step.text})

    def _rest(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text[self._sent[index] :]}
