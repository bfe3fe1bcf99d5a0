"""OpenAI's text completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toolroll.parsers.types import Delta
from toolroll.rollout.server.answers.bodies import prompt_token_ids, text_logprobs
from toolroll.rollout.server.answers.result import Choice, CompletionResult
from toolroll.rollout.server.conversation.stored_response import ResponseStore
from toolroll.rollout.server.dialects.dialect import Event, ParsedRequest
from toolroll.rollout.server.dialects.openai_chat import ChunkWriter, Completions
from toolroll.rollout.server.requests.protocol import CompletionRequest, Sampling, read
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion


@dataclass(frozen=True, eq=False)
class TextCompletions(Completions):
    """`POST /v1/completions`. If the request sets `return_token_ids`, each choice has a field
    `prompt_token_ids`, as in vLLM.
    """

    kind = "text_completion"
    prefix = "cmpl-"

    encoder: Encoder

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> ParsedRequest:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        return ParsedRequest(read(CompletionRequest, data))

    def content(self, choice: Choice) -> dict[str, Any]:
        """Return the text."""
        return {"text": choice.text}

    def logprobs(self, request: Sampling, completion: Completion) -> dict[str, Any] | None:
        """Return the logprobs of `completion`, or None if `request` does not ask for them."""
        if request.top is None:
            return None
        return text_logprobs(completion, self.encoder, request.top)

    def more(self, request: Sampling, result: CompletionResult) -> dict[str, Any]:
        """Return the ids of the prompt if the request asks for them."""
        return prompt_token_ids(result) if request.return_token_ids else {}

    def body(self, parsed: ParsedRequest, result: CompletionResult) -> dict[str, Any]:
        """Return a `text_completion`."""
        return {**super().body(parsed, result), **prompt_token_ids(result)}

    def writer(self, parsed: ParsedRequest, result: CompletionResult) -> TextWriter:
        """Return the writer of one stream."""
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
