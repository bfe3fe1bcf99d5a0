"""`Endpoint`: chat and text completions with exact tokens, over HTTP or in process.

Invariants:

- Planning a request (finding its exact prompt) changes nothing, and the plan stays valid if other
  requests are committed before this one. So a large request can be planned in a thread without
  blocking others.
- All answers to a request are committed to the session together, before they are returned. If
  sessions are kept on disk, the answers are also saved before they are returned.
- An answer that is never returned is never trained.
- A failure is an `ApiError` and does not affect other requests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolroll.endpoint.conversation.completions import check_prompt
from toolroll.endpoint.conversation.messages import read_messages
from toolroll.endpoint.conversation.prefill import split_prefill
from toolroll.endpoint.dialects.anthropic import AnthropicMessages
from toolroll.endpoint.dialects.dialect import Dialect, ParsedRequest
from toolroll.endpoint.dialects.openai_chat import ChatCompletions, TextCompletions
from toolroll.endpoint.dialects.openai_responses import OpenAIResponses
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.replies import ChatReply, Reply, Serving, TextReply
from toolroll.endpoint.requests.paths import api_of
from toolroll.endpoint.requests.received import Received
from toolroll.endpoint.requests.request_bodies import CompletionRequest
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.pending import request_key
from toolroll.endpoint.sessions.session_store import SessionStore
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.threads import call_of_size


class Endpoint(Serving):
    """Serves `model` to many sessions. Use it as an async context manager, or call `start` before
    the first request and `aclose` at the end. `aclose` does not close `model`. `store` keeps the
    sessions on disk.

    `openrlhf`: do as OpenRLHF's own executors. If the first prompt of a conversation leaves no room
    for the default number of new tokens, drop its first tokens, and answer with the field
    `token_ids` in addition.
    """

    def __init__(
        self,
        model: Model,
        settings: EndpointSettings | None = None,
        store: SessionStore | None = None,
        *,
        openrlhf: bool = False,
    ) -> None:
        super().__init__(model, settings or EndpointSettings(), store, openrlhf=openrlhf)
        settings, templates = self.settings, self.templates
        encoder, reasons = model.template.encoder, model.parser.reasoning is not None
        self._placeholders = {
            index: text for text, index in encoder.control.items() if index in model.placeholders
        }
        self.chat = ChatCompletions(encoder, openrlhf)
        self.responses = OpenAIResponses(encoder, templates, settings, reasons)
        self.messages = AnthropicMessages(templates, settings, reasons)
        self.dialects: dict[str, Dialect] = {
            "chat/completions": self.chat,
            "completions": TextCompletions(encoder),
            "messages": self.messages,
            "responses": self.responses,
        }
        """By the path of their requests, without `/v1/`."""

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def dialect_of(self, path: str) -> Dialect:
        """Return the dialect in which an error for `path` is written. `path` is percent-encoded."""
        return self.dialects.get(api_of(path) or "", self.chat)

    async def start(self) -> None:
        """Ask the engine about itself, and restore the unfinished sessions from disk. Raise
        `ApiError` after `aclose`.
        """
        self.sessions.check_open()
        engine = self.model.engine
        info, dropped = await engine.model_info(), await engine.dropped_params()
        self.model_info, self.dropped = info, dropped  # only now: `refresh` repeats a failed start
        if self.store is not None:
            await self.store.open(self.sessions, self.templates, self.settle)
            for node in (node for live in self.sessions.all() for node, _ in live.trace):
                engine.allow_sampled(node.ids)
            await engine.close_left_sessions(self.store.folder)
            engine.keep_sessions(self.store.folder)

    async def refresh(self) -> None:
        """Call `start` again if the engine was not ready: it reported no context length, or reports
        other facts now.
        """
        info = self.model_info
        if info.context_length is None or info != await self.model.engine.model_info():
            await self.start()

    async def aclose(self) -> None:
        """Abort the requests in flight, accept no new ones, and close the store."""
        lives = await self.sessions.aclose()
        if self.store is not None:
            await self.store.aclose(lives)

    # --- requests ---------------------------------------------------------------------------------

    async def start_reply(
        self, dialect: Dialect, live: LiveSession, body: Received, *, retry: int = 0
    ) -> Reply:
        """Start the reply to `body`, a request in `dialect`. If `body` is a retry, return the reply
        to the earlier request instead.

        If `body` is valid, `live` is added to the sessions. If no client named `live`, the reply is
        that of the unnamed session that `body` continues, if there is one. The caller must not
        change `body` afterwards.
        """
        live = self.sessions.unnamed.with_response(live, body.data.get("previous_response_id"))
        parsed, key = await call_of_size(
            lambda: (self._read(dialect, live, body.data), request_key(dialect.kind, body.data)),
            large=body.large,
        )
        live = await self.sessions.unnamed.find(live, parsed, key, retry, large=body.large)
        live = self.sessions.current(live)
        earlier = live.pending.retried(key, retry) if retry else None
        if earlier is not None:
            assert isinstance(earlier, Reply)
            parsed.messages.clear()
            return earlier
        self._admit(live, parsed.request.n, key)
        kind = TextReply if isinstance(parsed.request, CompletionRequest) else ChatReply
        reply = kind(self, dialect, live, parsed, key=key, large=body.large)
        self.sessions.start(live, reply, retry)
        return reply

    async def count(self, dialect: Dialect, live: LiveSession, body: Received) -> int:
        """Return the number of tokens in the prompt that `body`, a request in `dialect`, would get
        in the session `live`. The session does not change.
        """

        def count() -> int:
            reply = ChatReply(self, dialect, live, self._read(dialect, live, body.data))
            reply.plan()
            return len(reply.prompt.input_ids)

        return await call_of_size(count, large=body.large)

    def _read(self, dialect: Dialect, live: LiveSession, data: dict[str, Any]) -> ParsedRequest:
        """Translate the body `data`, and validate its prompt or its messages."""
        parsed = dialect.translate(data, live.responses)
        if isinstance(parsed.request, CompletionRequest):
            vocab_size = self.model_info.vocab_size
            check_prompt(parsed.request.prompt, vocab_size, self._placeholders)
            return parsed
        continued = bool(parsed.request.continue_final_message)
        messages = read_messages(
            parsed.messages,
            self.templates,
            parsed.ignored,
            answer=not continued,
        )
        if continued:
            split_prefill(messages)
        return replace(parsed, messages=messages)

    def _admit(self, live: LiveSession, choices: int, key: bytes) -> None:
        live.check()
        live.check_turns(choices)
        settings = self.settings
        if live.session.nodes >= settings.max_nodes:
            problem = f"the session is full, with {live.session.nodes} nodes: start another session"
            raise ApiError(409, "session_full", problem, param="session_id")
        if live.pending.in_flight >= settings.max_in_flight:
            problem = f"the session has {live.pending.in_flight} requests in flight: wait and retry"
            live.pending.expect_retry(key)
            raise ApiError(429, "too_many_requests", problem, retry=True)

    # --- verifying --------------------------------------------------------------------------------

    async def settle(self, live: LiveSession) -> None:
        """Verify the sequences of `live`. If one is wrong, exclude the whole session from training.
        Call this before the sequences are returned. Raise `UsageError` if the engine now serves a
        different model.
        """
        await self.model.engine.check_model()
        if self.settings.verify != "off":
            await live.check_all()
        live.exclude_wrong()

    def settle_now(self, live: LiveSession) -> None:
        """Verify as `settle` does, but in this thread, which blocks the event loop."""
        if self.settings.verify != "off":
            live.check_all_now()
        live.exclude_wrong()
