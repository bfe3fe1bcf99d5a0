"""`ToolrollClient`: the OpenAI SDK's own asynchronous client, whose requests are answered in
process.

Invariants: the client is an `openai.AsyncOpenAI`, with that class's retries, streams, types and
errors. A copy of a client uses the same session by default. `reset` moves a client to another
session and keeps the tokens of the previous one.
"""

from __future__ import annotations

import uuid
from functools import cached_property, wraps
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.resources.chat import AsyncChat
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
        chat = AsyncChat(self)
        _make_model_optional(chat.completions, self.endpoint)
        return chat

    @cached_property
    def completions(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> AsyncTextCompletions:
        """Text completions; `model` is optional."""
        completions = AsyncTextCompletions(self)
        _make_model_optional(completions, self.endpoint)
        return completions

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


def _make_model_optional(completions: Any, endpoint: Endpoint) -> None:
    """Make `completions.create` name the model of `endpoint` if its caller names none."""
    create = completions.create

    @wraps(create)
    async def create_with_model(**kwargs: Any) -> Any:
        name = kwargs.get("model")
        return await create(**{**kwargs, "model": endpoint.model_name if name is None else name})

    completions.create = create_with_model
