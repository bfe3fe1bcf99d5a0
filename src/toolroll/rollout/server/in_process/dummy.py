"""`DummyManagedServer`: a `ManagedServer` for a server that returns no token ids. Its nodes cannot
be trained, and are marked as such.

Invariants: every token is masked, and `metadata["trainable"]` is False. If there is a tokenizer,
the tokens are made from text (`source` "transcript"), so they are not the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from toolroll.rollout.errors import UsageError
from toolroll.rollout.server.in_process.nodes import MASKED, PROMPT_LOGPROB, SequenceNode, new_key


class DummyManagedServer:
    """Passes calls on to `server` and records the texts of the replies.

    `server`: an `openai.AsyncOpenAI`, or an object with the coroutines `chat_completion` and
    `completion`, such as Atropos' servers. `model`: the model for calls that name none. It is
    needed if `server` is an `AsyncOpenAI`, because its methods require a model. `track_tree`
    selects the form of `get_state`.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool | None = None,  # noqa: FBT001 - as published
        *,
        model: str | None = None,
    ) -> None:
        self.server = server
        self.track_tree = track_tree
        self._named = {"model": model} if model is not None else {}
        self._tokenizer = tokenizer
        self._nodes: dict[str, SequenceNode] = {}

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a chat completion from `server`."""
        asked = {**self._named, **kwargs}
        if isinstance(self.server, AsyncOpenAI):
            asked.pop("split", None)
            reply: ChatCompletion = await self.server.chat.completions.create(**asked)
        else:
            reply = await self.server.chat_completion(**asked)
        before = _written(kwargs.get("messages") or ())
        for choice in reply.choices:
            self._keep(f"{before}assistant:{choice.message.content or ''}", choice.finish_reason)
        return reply

    async def completion(self, **kwargs: Any) -> Completion:
        """Return a text completion from `server`."""
        asked = {**self._named, **kwargs}
        if isinstance(self.server, AsyncOpenAI):
            asked.pop("split", None)
            reply: Completion = await self.server.completions.create(**asked)
        else:
            reply = await self.server.completion(**asked)
        for choice in reply.choices:
            self._keep(f"{kwargs.get('prompt') or ''}{choice.text}", choice.finish_reason)
        return reply

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Raise `UsageError`, because a server without token ids has no prompt logprobs."""
        raise UsageError(
            "a DummyManagedServer has no logprobs: use a ManagedServer with an SGLang engine"
        )

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`. If `track_tree` is True, return `{"sequences": {...}, "tree":
        {...}}` instead. The keys of both are the full texts. If a text repeats, its key gets a
        suffix such as "#2".
        """
        if self.track_tree:
            return {"sequences": dict(self._nodes), "tree": dict(self._nodes)}
        return {"nodes": list(self._nodes.values())}

    def reset(self) -> None:
        """Drop the nodes."""
        self._nodes.clear()

    def _keep(self, text: str, finish_reason: str | None) -> None:
        encode = self._tokenizer.encode if self._tokenizer is not None else None
        tokens = list(encode(text, add_special_tokens=False)) if encode is not None else []
        metadata = {
            "trainable": False,
            "dummy_tokens": True,
            "source": "transcript",
            "finish_reason": finish_reason,
        }
        self._nodes[new_key(text, self._nodes)] = SequenceNode(
            full_text=text,
            tokens=tokens,
            masked_tokens=[MASKED] * len(tokens),
            logprobs=[PROMPT_LOGPROB] * len(tokens),
            metadata=metadata,
        )


def _written(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"{message.get('role')}:{message.get('content') or ''}\n\n" for message in messages
    )
