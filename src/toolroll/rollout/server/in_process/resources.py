"""The resources of the in-process client (`client.chat` and `client.completions`). `model` is
optional in their method `create`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, wraps
from typing import Any

from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.resources.completions import AsyncCompletions as AsyncTextCompletions


class Chat(AsyncChat):
    """`client.chat`."""

    @cached_property
    def completions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AsyncCompletions:
        """`client.chat.completions`."""
        return ChatCompletions(self._client)


class ChatCompletions(AsyncCompletions):
    """`client.chat.completions`."""

    @wraps(AsyncCompletions.create, assigned=())  # for its signature
    async def create(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Do what the SDK's `create` does. `model` is optional."""
        return await super().create(**_with_model(kwargs, self._client))


class TextCompletions(AsyncTextCompletions):
    """`client.completions`."""

    @wraps(AsyncTextCompletions.create, assigned=())
    async def create(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Do what the SDK's `create` does. `model` is optional."""
        return await super().create(**_with_model(kwargs, self._client))


def _with_model(kwargs: Mapping[str, Any], client: Any) -> dict[str, Any]:
    """Return `kwargs` with the model of `client`, a `ToolrollClient`, if they name none."""
    given = kwargs.get("model")
    return {**kwargs, "model": client.endpoint.model_name if given is None else given}
