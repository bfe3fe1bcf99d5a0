"""`ToolrollClient`: the OpenAI SDK's own asynchronous client, whose requests are answered in
process.

Invariants: the client is an `openai.AsyncOpenAI`, with that class's retries, streams, types and
errors. A copy of a client uses the same session by default. `reset` moves a client to another
session and keeps the tokens of the previous one.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import cached_property, wraps
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.resources.completions import AsyncCompletions as AsyncTextCompletions

from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.in_process.transport import BASE, InProcessTransport
from toolroll.rollout.server.sessions.sessions import check_id
from toolroll.rollout.types import Trajectory


class ToolrollClient(AsyncOpenAI):
    """An `AsyncOpenAI` whose requests `endpoint` answers. `endpoint` must be started. `session` is
    the name of the client's session (default: a generated name).

    Replies have logprobs unless you set `logprobs=False`. They have the extra fields
    `prompt_token_ids`, `choices[i].token_ids` and `choices[i].logprobs.content[j].token_id`. In
    text completions, each choice also has `prompt_token_ids`. A response of `responses.create` has
    `prompt_token_ids`, `token_ids` and `logprobs["content"]` itself. `model` is optional.
    `post("/tokenize")` works too. `options` are the arguments of `AsyncOpenAI`. Put sampling
    parameters that the SDK does not know into `extra_body`.
    """

    def __init__(self, endpoint: Endpoint, *, session: str | None = None, **options: Any) -> None:
        self.endpoint = endpoint
        self.session = _name(session)
        if options.get("http_client") is None:
            # works with any HTTP library, because the SDK replaced its own between two versions
            transport: Any = InProcessTransport(endpoint)
            # with trust_env, a proxy in the environment would be used instead of the transport
            options["http_client"] = DefaultAsyncHttpxClient(transport=transport, trust_env=False)
        super().__init__(**{"api_key": "in-process", **options, "base_url": _address(self.session)})

    @cached_property
    def chat(self) -> AsyncChat:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Chat completions; `model` is optional."""
        return Chat(self)

    @cached_property
    def completions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AsyncTextCompletions:
        """Text completions; `model` is optional."""
        return TextCompletions(self)

    def copy(self, *, session: str | None = None, **options: Any) -> ToolrollClient:
        """Return a copy of this client with other `options`. By default, the copy uses the same
        session.
        """
        extra = {"endpoint": self.endpoint, "session": self.session if session is None else session}
        options.pop("base_url", None)
        return super().copy(_extra_kwargs=extra, **options)

    with_options = copy

    async def trajectories(self) -> tuple[Trajectory, ...]:
        """Return the session's trajectories so far. There are none before the first reply."""
        live = self.endpoint.sessions.get(self.session)
        if live is None:
            return ()
        await self.endpoint.settle(live)
        return live.session.trajectories()

    def reset(self, session: str | None = None) -> str:
        """Continue in a new session, named `session` or with a generated name. Return the name of
        the previous session, which can be read until it is dropped.
        """
        left, self.session = self.session, _name(session)
        self.base_url = _address(self.session)
        return left


def _name(session: str | None) -> str:
    return check_id(session) if session is not None else f"client-{uuid.uuid4().hex}"


def _address(session: str) -> str:
    return f"{BASE}/sessions/{session}/v1"


# --- resources ------------------------------------------------------------------------------------


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
    name = kwargs.get("model")
    return {**kwargs, "model": client.endpoint.model_name if name is None else name}
