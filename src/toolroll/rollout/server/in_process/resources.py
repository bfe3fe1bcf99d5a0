"""The resources of the in-process client (`client.chat` and `client.completions`). `model` is
optional in their method `create`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, wraps
from typing import Any

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.resources.completions import AsyncCompletions as AsyncTextCompletions


class Chat(AsyncChat):
    """`client.chat`. `model`: the model for calls that name none."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        super().__init__(client)
        self._model = model

    @cached_property
    def completions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AsyncCompletions:
        """`client.chat.completions`."""
        return ChatCompletions(self._client, self._model)


class ChatCompletions(AsyncCompletions):
    """`client.chat.completions`."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        super().__init__(client)
        self._model = model

    @wraps(AsyncCompletions.create, assigned=())  # for its signature
    async def create(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Do what the SDK's `create` does. `model` is optional."""
        return await super().create(**_with_model(kwargs, self._model))


class TextCompletions(AsyncTextCompletions):
    """`client.completions`."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        super().__init__(client)
        self._model = model

    @wraps(AsyncTextCompletions.create, assigned=())
    async def create(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Do what the SDK's `create` does. `model` is optional."""
        return await super().create(**_with_model(kwargs, self._model))


def _with_model(kwargs: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {**kwargs, "model": model if kwargs.get("model") is None else kwargs["model"]}
