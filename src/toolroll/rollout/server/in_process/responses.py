"""Responses in process: the same answers as over HTTP, with the exact token ids and logprobs.

Invariants: `token_ids` are the sampled ids, and `logprobs["content"]` has one entry for each of
them, as in chat completions. The response in a stream's last event has the same fields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.answers.bodies import chat_logprobs, exact, is_long, tokens
from toolroll.rollout.server.answers.result import CompletionResult
from toolroll.rollout.server.conversation.stored_response import ResponseStore
from toolroll.rollout.server.dialects.dialect import Asked, Event
from toolroll.rollout.server.dialects.openai_responses import OpenAIResponses
from toolroll.rollout.server.dialects.openai_responses_writer import ResponsesWriter
from toolroll.rollout.template.encode import Encoder


class ExactWriter(ResponsesWriter):
    """Writes one response, with the exact fields in the finished response."""

    async def finish(self, result: CompletionResult) -> AsyncIterator[Event]:
        """Yield the last events."""
        large = is_long([result.choices[0].completion], logprobs=True, top=0)
        sampled = await call_of_size(_sampled, result, self._encoder, large=large)
        async for event in super().finish(result):
            if "response" in event:
                event["response"] |= {**sampled, **tokens(result)}
            yield event


class ExactResponses(OpenAIResponses):
    """`POST /v1/responses`, with the fields `prompt_token_ids`, `token_ids`, `logprobs`,
    `stop_reason` and `weight_version` in the response.
    """

    exact = True
    writer_type = ExactWriter

    def translate(self, data: dict[str, Any], responses: ResponseStore) -> Asked:
        """Return the request in `data`. Raise `ApiError` if it is not valid."""
        asked = super().translate(data, responses)
        asked.request.logprobs = True
        return asked

    def body(self, asked: Asked, result: CompletionResult) -> dict[str, Any]:
        """Return a `response`. `CompletionResult.body` adds `prompt_token_ids`."""
        return {**super().body(asked, result), **_sampled(result, self.encoder)}


def _sampled(result: CompletionResult, encoder: Encoder) -> dict[str, Any]:
    [choice] = result.choices
    return {**exact(choice), "logprobs": chat_logprobs(choice.completion, encoder, 0)}
