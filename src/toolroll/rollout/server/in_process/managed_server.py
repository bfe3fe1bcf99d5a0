"""`ManagedServer`: a `ManagedSession` with the constructor that Atropos' environments call.

Invariants: the tokenizer is the one that was passed, or else the server's, or else the one that the
server's configuration names. If there is none, the constructor raises an error. An address has no
configuration: the first call finds the tokenizer of the model that the engine serves. A request
holds the server's semaphore if the server has one (`sem` or `eval_sem`). So Atropos counts the
request when it limits the load of a server and when it chooses among servers.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from openai.types.chat import ChatCompletion

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.server.endpoint import Endpoint
from toolroll.rollout.server.endpoint_settings import EndpointSettings
from toolroll.rollout.server.in_process.managed import (
    ManagedSession,
    close_model,
    is_engine,
    named_tokenizer,
    open_model,
    served_model,
)
from toolroll.rollout.server.sessions.live_session import LiveSession
from toolroll.rollout.template.chat_template import HistoryPolicy

_MAX_CHOICES = 1024
"""A high limit for `n`, because Atropos has no limit."""


class ManagedServer(ManagedSession):
    """Chat and text completions of one rollout, and their tokens. It replaces Atropos'
    `ManagedServer`.

    Example::

        managed = ManagedServer(server, tokenizer=tokenizer)
        reply = await managed.chat_completion(messages=messages, n=8, max_tokens=512)
        nodes = managed.get_state()["nodes"]
        await managed.aclose()

    Args:
        server: One of Atropos' servers (or any object whose `config` has a `base_url`), the address
            of an SGLang server, an `EngineConfig`, an `EngineClient` or a `Model`. An
            `EngineClient` and a `Model` stay open.
        tokenizer: An object or a name. Default: the server's tokenizer, or else the one that the
            server's configuration names (`tokenizer_name`, then `model_name`). For an address, an
            `EngineConfig` or an `EngineClient`, the default is the tokenizer of the model that the
            engine serves; `endpoint`, `client` and `tokenizer` then exist after the first call, or
            in an `async with` block. Not used if `server` is a `Model`.
        track_tree: Selects the form of `get_state`.
        tool_parser: The name of the format of tool calls. Default: replies are not parsed.
        preserve_think_blocks: Has no effect: reasoning always stays in the history.
        history: What happens if the chat template rewrites served tokens. "preserve" keeps them.
            "fork" renders the history again, and the conversation continues in a second node.
        chat_template: Jinja text that replaces the tokenizer's own template.
        settings: The settings of the endpoint. Default: the default settings, except that `n` may
            be up to 1024.
        model: The model at `server`, if it is open already (`open_model`). It stays open.

    Raises `UsageError` if no tokenizer is named, or if the server is not SGLang.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool | None = None,  # noqa: FBT001 - as published
        tool_parser: str | None = None,
        preserve_think_blocks: bool | None = None,  # noqa: FBT001
        *,
        history: HistoryPolicy = "preserve",
        chat_template: str | None = None,
        settings: EndpointSettings | None = None,
        model: Model | None = None,
    ) -> None:
        self.server = server
        opened = server if isinstance(server, Model) else model
        self._borrowed = opened is not None
        self._model: Model | None = None
        self._reads_calls = isinstance(server, Model) or tool_parser is not None
        self._settings = settings or EndpointSettings(max_choices=_MAX_CHOICES)
        self.track_tree = bool(track_tree)
        self._opening = asyncio.Lock()
        self._model_of = partial(
            open_model,
            server,
            parser=tool_parser,
            history=history,
            chat_template=chat_template,
        )
        named = named_tokenizer(server, tokenizer)
        if opened is not None or named is not None or not is_engine(server):
            self._start(opened or self._model_of(named))

    def _start(self, model: Model) -> None:
        super().__init__(Endpoint(model, self._settings), track_tree=self.track_tree)
        self._model, self.tokenizer = model, model.template.tokenizer

    async def _open(self) -> None:
        if self._model is not None:
            return
        async with self._opening:
            if self._model is None:
                self._start(self._model_of(await served_model(self.server)))

    def _live(self) -> LiveSession | None:
        return None if self._model is None else super()._live()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a chat completion, as `ManagedSession.chat_completion` does.

        Raise `UsageError` if `kwargs` has tools but no parser for calls was named.
        """
        if kwargs.get("tools") and not self._reads_calls:
            raise UsageError(
                "tools are offered, but no format of tool calls is named: give tool_parser=... "
                "(for example, 'hermes'). Atropos' own class leaves the tools out of the prompt"
            )
        return await super().chat_completion(**kwargs)

    def _slot(self, split: str) -> AbstractAsyncContextManager[Any]:
        semaphore = getattr(self.server, "sem" if split == "train" else "eval_sem", None)
        return semaphore if semaphore is not None else nullcontext()

    def reset(self) -> None:
        """Drop all nodes. Later calls use a new session."""
        if self._model is not None:
            super().reset()

    async def aclose(self) -> None:
        """Drop the session, and close the connections that were opened for it."""
        if self._model is None:
            return
        await super().aclose()
        if not self._borrowed:
            await close_model(self._model, self.server)
