"""`ManagedServer`: a `ManagedSession` with the constructor that Atropos' environments call.

Invariants: the tokenizer is the one that was passed, or else the server's, or else the one that the
server's configuration names. If there is none, the constructor raises an error. A request holds the
server's semaphore if the server has one (`sem` or `eval_sem`). So Atropos counts the request when
it limits the load of a server and when it chooses among servers.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from openai.types.chat import ChatCompletion

from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.in_process.managed import ManagedSession, close_model, open_model
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
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
            server's configuration names (`tokenizer_name`, then `model_name`). Not used if `server`
            is a `Model`. `managed_session` asks the engine for its model.
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
        self._reads_calls = isinstance(server, Model) or tool_parser is not None
        opened = server if isinstance(server, Model) else model
        self._borrowed = opened is not None
        self._model = opened or open_model(
            server, tokenizer, tool_parser, history=history, chat_template=chat_template
        )
        self.tokenizer = self._model.template.tokenizer
        endpoint = Endpoint(self._model, settings or EndpointSettings(max_choices=_MAX_CHOICES))
        super().__init__(endpoint, track_tree=bool(track_tree))

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

    async def aclose(self) -> None:
        """Drop the session, and close the connections that were opened for it."""
        await super().aclose()
        if not self._borrowed:
            await close_model(self._model, self.server)
