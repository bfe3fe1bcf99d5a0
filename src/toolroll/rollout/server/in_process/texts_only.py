"""`TextOnlySession`: the same calls against an endpoint without token ids. Its nodes cannot be
trained, and are marked as such.

Invariants: every token is masked and `metadata["trainable"]` is False; tokens, if there is a
tokenizer, are made from text (`source` "transcript") and do not record what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from toolroll.rollout.server.in_process.nodes import MASKED, PROMPT_LOGPROB, SequenceNode


class TextOnlySession:
    """Forwards calls to `client` and keeps their texts. `model` is the default for calls."""

    def __init__(self, client: AsyncOpenAI, *, model: str, tokenizer: Any = None) -> None:
        self.client = client
        self._model = model
        self._tokenizer = tokenizer
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a chat completion of `client`."""
        reply: ChatCompletion = await self.client.chat.completions.create(
            **{"model": self._model, **kwargs}
        )
        before = _written(kwargs.get("messages") or ())
        for choice in reply.choices:
            self._keep(before, f"assistant: {choice.message.content or ''}", choice.finish_reason)
        return reply

    async def completion(self, **kwargs: Any) -> Completion:
        """Return a text completion of `client`."""
        reply: Completion = await self.client.completions.create(**{"model": self._model, **kwargs})
        for choice in reply.choices:
            self._keep(str(kwargs.get("prompt") or ""), choice.text, choice.finish_reason)
        return reply

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Drop the nodes."""
        self._nodes.clear()

    def _keep(self, before: str, reply: str, finish_reason: str | None) -> None:
        text = before + reply
        tokens = (
            list(self._tokenizer.encode(text, add_special_tokens=False))
            if self._tokenizer is not None
            else []
        )
        metadata = {"trainable": False, "source": "transcript", "finish_reason": finish_reason}
        self._nodes.append(
            SequenceNode(
                full_text=text,
                tokens=tokens,
                masked_tokens=[MASKED] * len(tokens),
                logprobs=[PROMPT_LOGPROB] * len(tokens),
                metadata=metadata,
            )
        )


def _written(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"{message.get('role')}: {message.get('content') or ''}\n" for message in messages
    )
