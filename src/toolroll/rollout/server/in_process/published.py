"""The clients of Atropos, under their published names: `ManagedServerAdapter` and
`AtroposManagedClient`, with the types of its replies.

Both make a managed server look like an `openai.AsyncOpenAI` for one rollout. A reply has the tokens
of its own call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion import ChoiceLogprobs as OpenAIChoiceLogprobs
from pydantic import Field

_SAMPLING = {"n": 1, "temperature": 1.0, "top_p": 1.0}
"""The published defaults of `create`."""


class LogprobContent(ChatCompletionTokenLogprob):
    """The logprob of one token. It includes the token's id."""

    token: str = ""
    token_id: int = 0
    top_logprobs: list[Any] | None = None  # type: ignore[assignment]


class ChoiceLogprobs(OpenAIChoiceLogprobs):
    """The logprobs of a choice, one for each of its `token_ids`."""

    content: list[LogprobContent] = Field(default_factory=list)  # type: ignore[assignment]


class EnhancedChoice(Choice):
    """A choice with the ids that were sampled. A server without token ids gives None."""

    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class EnhancedChatCompletion(ChatCompletion):
    """A chat completion with the ids of its prompt. A server without token ids gives None."""

    choices: list[EnhancedChoice]  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None


class ManagedServerAdapter:
    """Calls `managed_server`, a `ManagedServer` or `DummyManagedServer`, as one calls an
    `AsyncOpenAI`. `base_url` is only an attribute.

    Attributes that are not defined here, such as `post`, `copy` or `responses`, are those of the
    managed server's `client`.
    """

    def __init__(self, managed_server: Any, base_url: str) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._chat))
        self.completions = SimpleNamespace(create=managed_server.completion)

    async def _chat(self, **kwargs: Any) -> Any:
        return await self.managed_server.chat_completion(**kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "managed_server":  # in a copy that is not initialized yet
            raise AttributeError(name)
        return getattr(self.managed_server.client, name)


class AtroposManagedClient(ManagedServerAdapter):
    """A `ManagedServerAdapter` whose chat completions are `EnhancedChatCompletion`s.

    As published, `reset` clears the tokens of `managed_server`, `copy` returns the client itself,
    and `close` leaves the server open. Arguments of `create` that are None are left out, and
    `max_completion_tokens` takes precedence over `max_tokens`.
    """

    def __init__(self, managed_server: Any, model: str, base_url: str | None = None) -> None:
        super().__init__(managed_server, base_url or "http://managed-server")
        self.model = model

    async def _chat(self, **kwargs: Any) -> Any:
        asked = {name: value for name, value in kwargs.items() if value is not None}
        if "max_completion_tokens" in asked:
            asked.pop("max_tokens", None)
        reply = await super()._chat(**{"model": self.model, **_SAMPLING, **asked})
        if not isinstance(reply, ChatCompletion):  # a stream
            return reply
        return EnhancedChatCompletion.model_validate(reply.model_dump())

    def reset(self) -> None:
        """Drop the tokens so far."""
        self.managed_server.reset()

    async def close(self) -> None:
        """Do nothing: the managed server is closed by the code that opened it."""

    def copy(self, **options: Any) -> AtroposManagedClient:
        """Return this client, for the same tokens."""
        return self
