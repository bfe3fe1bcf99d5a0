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

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from toolroll.parsers.types import Delta
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import ParsedTurn, before_stop, parse_turn, stop_ids
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.answers.bodies import is_long, text_body
from toolroll.rollout.server.answers.result import LONG, Choice, CompletionResult, StreamContext
from toolroll.rollout.server.answers.stream_deltas import choice_stream
from toolroll.rollout.server.conversation.completions import check_prompt, plan_text
from toolroll.rollout.server.conversation.conversation_tree import Prompt
from toolroll.rollout.server.conversation.messages import read_messages
from toolroll.rollout.server.conversation.prefill import (
    check_continued,
    sampled_part,
    split_prefill,
    with_prefill,
)
from toolroll.rollout.server.conversation.template_cache import TemplateCache
from toolroll.rollout.server.dialects.anthropic import AnthropicMessages
from toolroll.rollout.server.dialects.dialect import Asked, Dialect, ParsedRequest
from toolroll.rollout.server.dialects.openai_chat import ChatCompletions
from toolroll.rollout.server.dialects.openai_responses import OpenAIResponses
from toolroll.rollout.server.disk.session_store import SessionStore
from toolroll.rollout.server.endpoint_settings import EndpointSettings
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.metrics import Metrics
from toolroll.rollout.server.requests.paths import api_of
from toolroll.rollout.server.requests.protocol import CompletionRequest, Sampling, read
from toolroll.rollout.server.requests.received import Received
from toolroll.rollout.server.requests.sampling import (
    EngineCapabilities,
    ToolUse,
    apply_tool_choice,
    default_limit,
    sampling_params,
    stop_strings,
    top_logprobs,
)
from toolroll.rollout.server.requests.tool_choice import check_called
from toolroll.rollout.server.sessions.committing import commit_chat, commit_text
from toolroll.rollout.server.sessions.pending import PendingRequest, request_key
from toolroll.rollout.server.sessions.sessions import LiveSession, Sessions
from toolroll.rollout.server.sessions.verifying import check_all, check_all_now, start_checks
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, Tool

Started = tuple[LiveSession, ParsedRequest, PendingRequest[CompletionResult]]
Starter = Callable[..., Awaitable[Started]]
"""`Endpoint.start_reply` with a bound `dialect`, or `Endpoint.start_text`."""


class Endpoint:
    """Serves the model `served` to many sessions. Use it as an async context manager, or call
    `start` before the first request and `aclose` at the end. `aclose` does not close `served`.
    `store` keeps the sessions on disk.
    """

    def __init__(
        self,
        served: Model,
        settings: EndpointSettings | None = None,
        store: SessionStore | None = None,
    ) -> None:
        self.served = served
        self.settings = settings or EndpointSettings()
        self.store = store
        self.metrics = Metrics()
        self.sessions = Sessions(self.settings, store)
        self.capabilities = EngineCapabilities()
        self.templates = TemplateCache(served.template)
        self.chat = ChatCompletions(
            served.template.encoder,
            self.model,
            openrlhf_token_ids=self.settings.openrlhf_token_ids,
        )
        reasons = served.parser.reasoning is not None
        self.messages = AnthropicMessages(
            self.templates, self.settings, self.model, reasons=reasons
        )
        self.responses = OpenAIResponses(
            served.template.encoder, self.templates, self.settings, self.model, reasons=reasons
        )

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.served.name or "toolroll"

    def dialect_of(self, path: str) -> Dialect:
        """Return the dialect in which an error for `path` is written. `path` is percent-encoded."""
        api = api_of(path)
        if api == "responses":
            return self.responses
        return self.messages if api == "messages" else self.chat

    async def start(self) -> None:
        """Ask the engine for its capabilities, and restore the unfinished sessions from disk. Raise
        `ApiError` after `aclose`.
        """
        self.sessions.check_open()
        info = await self.served.engine.model_info()
        self.capabilities = EngineCapabilities(
            deterministic=info.deterministic,
            behind_router=await self.served.engine.behind_router(),
            context_length=info.context_length,
            vocab_size=info.vocab_size,
        )
        if self.store is not None:
            await self.store.open(self.sessions, self.templates, self.settle)

    async def refresh(self) -> None:
        """Call `start` again if the engine reported no context length yet, because it was not
        ready.
        """
        if self.capabilities.context_length is None:
            await self.start()

    async def aclose(self) -> None:
        """Abort the requests in flight, accept no new ones, and close the store."""
        lives = await self.sessions.aclose()
        if self.store is not None:
            await self.store.aclose(lives)

    # --- requests ---------------------------------------------------------------------------------

    async def start_reply(
        self, dialect: Dialect, live: LiveSession, body: Received, *, retry: int = 0
    ) -> Started:
        """Start the reply to `body`, a request in `dialect`. If `body` is a retry, join the earlier
        request instead. Return the session, the parsed request and the pending request.

        If `body` is valid, `live` is added to the sessions. The caller must not change `body`
        afterwards.
        """
        large, translate = body.large, partial(self._translated, dialect, live, body.data)
        asked, key = await call_of_size(
            lambda: (translate(), request_key(dialect.kind, body.data)), large=large
        )
        live = self.sessions.current(live)
        request = asked.request
        parsed = ParsedRequest(request, dialect, asked)
        joined = live.pending.retried(key, retry) if retry else None
        if joined is not None:
            asked.messages.clear()
            return live, parsed, joined
        self._admit(live, request, key)
        params = sampling_params(request, self.settings, self.capabilities, live.sampling_params)
        stops = stop_strings(params)  # those that end a reply with a call stay in its text
        use, template = self._use(asked, params)
        top = top_logprobs(request)
        plan = partial(self._plan, live, asked, use.tools, template)

        async def run(pending: PendingRequest[CompletionResult]) -> CompletionResult:
            prompt = live.as_served(await call_of_size(plan, large=large), pending.stored)
            asked.messages.clear()  # a whole conversation, not needed while the engine samples
            if prompt.turn is not None:
                live.forget_request(prompt.turn)
            first = live.number(prompt, request.n, pending.stored)
            seeds = live.call_id_seeds(len(prompt.input_ids), first, request.n)
            context = StreamContext(
                template, params, use.tools if use.offered else None, seeds,
                *_name(dialect.prefix, pending), len(prompt.input_ids), stops, prompt.in_reasoning,
            )  # fmt: skip
            pending.stream_context = context
            completions, sent = await self._sample(
                live, template, prompt.input_ids, params, request, pending, top
            )
            made, choices = partial(self._chat_choice, prompt, sent, use, context), []
            for completion, seed in zip(completions, seeds, strict=True):
                long = large or len(completion.output_ids) > LONG
                choices.append(await call_of_size(made, completion, seed, large=long))
            result = CompletionResult(
                context.answer_id, context.created, self.model, prompt.input_ids, choices, sent,
                use.constrained, first, dialect.exact, stops,
            )  # fmt: skip
            result.commit = lambda: self._commit_reply(live, prompt, parsed, result, pending)
            result.render = lambda: dialect.body(asked, result)
            if not request.stream and is_long(
                completions, logprobs=bool(request.logprobs), top=top
            ):
                await asyncio.to_thread(result.write)
            return result

        return live, parsed, self.sessions.start(live, key, request.n, run, retry)

    async def count(self, dialect: Dialect, live: LiveSession, body: Received) -> int:
        """Return the number of tokens in the prompt that `body`, a request in `dialect`, would get
        in the session `live`. The session does not change.
        """

        def count() -> int:
            asked = self._translated(dialect, live, body.data)
            use, template = self._use(asked, {})
            return len(self._plan(live, asked, use.tools, template).input_ids)

        return await call_of_size(count, large=body.large)

    def _translated(self, dialect: Dialect, live: LiveSession, data: dict[str, Any]) -> Asked:
        """Translate the body `data`, and return the request with validated messages."""
        asked = dialect.translate(data, live.responses)
        continued = bool(asked.request.continue_final_message)
        messages = read_messages(
            asked.messages, developer=self.templates.developer, answer=not continued
        )
        if continued:
            split_prefill(messages)
        return replace(asked, messages=messages)

    def _use(self, asked: Asked, params: dict[str, Any]) -> tuple[ToolUse, ChatTemplate]:
        """Return the tools and the template of a request. Write the request's constraints into
        `params`.
        """
        request, routed = asked.request, self.capabilities.behind_router
        use = apply_tool_choice(
            request, asked.tools, self.served.parser.name, params, routed=routed
        )
        check_continued(request, use)
        switches, effort = request.chat_template_kwargs, request.reasoning_effort
        return use, self.templates.get(self.templates.with_effort(switches, effort))

    def _plan(
        self, live: LiveSession, asked: Asked, tools: list[Tool], template: ChatTemplate
    ) -> Prompt:
        continued = bool(asked.request.continue_final_message)
        before, prefill = split_prefill(asked.messages) if continued else (asked.messages, "")
        prompt = live.tree.plan(before, tools, template, self.served.parser.reasoning)
        if prefill:
            return with_prefill(prompt, prefill)
        room = self.capabilities.context_length
        if not self.settings.cut_first_prompt or room is None:
            return prompt
        limit = default_limit(self.settings, live.sampling_params)
        return prompt.cut(max(1, room - (limit or 1)))

    async def start_text(self, live: LiveSession, body: Received, *, retry: int = 0) -> Started:
        """Start the text completion of `body`. If `body` is a retry, join the earlier request
        instead. Return the session, the parsed request and the pending request.

        If `body` is valid, `live` is added to the sessions.
        """
        large = body.large
        request, key = await call_of_size(
            lambda: (read(CompletionRequest, body.data), request_key("text", body.data)),
            large=large,
        )
        encoder, vocab_size = self.served.template.encoder, self.capabilities.vocab_size
        await call_of_size(check_prompt, request.prompt, vocab_size, large=large)
        live = self.sessions.current(live)
        parsed = ParsedRequest(request)
        joined = live.pending.retried(key, retry) if retry else None
        if joined is not None:
            return live, parsed, joined
        self._admit(live, request, key)
        params = sampling_params(request, self.settings, self.capabilities, live.sampling_params)
        top = top_logprobs(request)
        planned = partial(plan_text, live.texts, request.prompt, encoder)

        async def run(pending: PendingRequest[CompletionResult]) -> CompletionResult:
            stops = stop_strings(params)
            name = _name("cmpl-", pending)
            pending.stream_context = StreamContext(
                self.served.template, params, None, (), *name, stop_strings=stops
            )
            plan = await call_of_size(planned, large=large)
            stored = pending.stored
            ids = plan.input_ids if stored is None else live.prompt_of(stored)
            completions, sent = await self._sample(
                live, self.served.template, ids, params, request, pending, top
            )
            choices = []
            for completion in completions:
                read_text = partial(self._text, completion, sent, stops)
                text = await call_of_size(read_text, large=len(completion.output_ids) > LONG)
                choices.append(Choice(completion, text))
            result = CompletionResult(*name, self.model, ids, choices, sent)
            result.commit = lambda: commit_text(live, plan, result, pending)
            result.render = lambda: text_body(
                result,
                encoder,
                logprobs=request.logprobs,
                prompt_ids=bool(request.return_token_ids),
            )
            logprobs = request.logprobs is not None
            if not request.stream and is_long(completions, logprobs=logprobs, top=top):
                await asyncio.to_thread(result.write)
            return result

        return live, parsed, self.sessions.start(live, key, request.n, run, retry)

    def result(self, pending: PendingRequest[CompletionResult]) -> CompletionResult:
        """Return the result of a finished request, or raise the request's error."""
        if pending.task.cancelled():
            self.sessions.check_open()
            words = "the request was aborted: its session was deleted"
            raise ApiError(409, "request_aborted", words)
        if pending.failure is not None:
            raise pending.failure
        return pending.task.result()

    async def commit(self, pending: PendingRequest[CompletionResult]) -> CompletionResult:
        """Commit the result of a finished request to its session, and return the result. If the
        session is kept on disk, return only once the result is saved. If committing or saving
        fails, every caller that waits for this result gets the error.
        """
        result = self.result(pending)
        commit, result.commit = result.commit, None
        try:
            if commit is not None and pending.stored is None:
                commit()
                self.metrics.served(result)
            if result.saved is not None:
                await asyncio.shield(result.saved)  # others may wait for it
        except Exception as error:
            pending.failure = error
            raise
        pending.delivered = True
        return result

    def _admit(self, live: LiveSession, request: Sampling, key: bytes) -> None:
        live.check()
        settings = self.settings
        if settings.model_names == "own" and request.model not in (None, self.model):
            words = f"this endpoint serves {self.model!r}, not {request.model!r}"
            raise ApiError(404, "model_not_found", words, param="model")
        if live.session.nodes >= settings.max_nodes:
            words = f"the session is full, with {live.session.nodes} nodes: start another session"
            raise ApiError(409, "session_full", words, param="session_id")
        if live.pending.in_flight >= settings.max_in_flight:
            words = f"the session has {live.pending.in_flight} requests in flight: wait and retry"
            live.pending.expect_retry(key)
            raise ApiError(429, "too_many_requests", words, retry=True)

    # --- sampling ---------------------------------------------------------------------------------

    async def _sample(
        self,
        live: LiveSession,
        template: ChatTemplate,
        ids: IdArray,
        params: Mapping[str, Any],
        request: Sampling,
        pending: PendingRequest[CompletionResult],
        top: int,
    ) -> tuple[list[Completion], dict[str, Any]]:
        """Return all answers and the sampling parameters that were sent. Each answer is a separate
        request to the engine, whose prefix cache holds the prompt. If the answers were restored
        from disk, return them unchanged.
        """
        if pending.stored is not None:
            return pending.stored.completions, dict(pending.stored.sampling_params)
        sent = await self.served.effective_params(params, len(ids), template)
        extra = {"top_logprobs_num": top} if top else {}
        ask = GenerateRequest(
            input_ids=ids,
            sampling_params=sent,
            session_id=live.id,
            extra=extra,
        )

        async def one(index: int) -> Completion:
            progress = (lambda got: pending.report(index, list(got))) if request.stream else None
            completion = await self.served.generate(ask, progress=progress)
            if completion.finish_reason == "abort":
                words = "the engine aborted the request (for example, for a weight update)"
                raise ApiError(503, "engine_aborted", words, retry=True)
            if top and completion.top_logprobs is None and len(completion.output_ids):
                words = "the engine returned no top logprobs, although the request asks for them"
                raise ApiError(502, "engine_error", words)
            return completion

        async with asyncio.timeout(self.settings.timeout):
            if request.n == 1:
                return [await one(0)], sent
            tasks = [asyncio.ensure_future(one(index)) for index in range(request.n)]
            try:
                return list(await asyncio.gather(*tasks)), sent
            finally:
                # if one fails, all fail, because the others would not be returned
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _chat_choice(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        use: ToolUse,
        context: StreamContext,
        completion: Completion,
        seed: str,
    ) -> Choice:
        reading: ParsedTurn = parse_turn(
            self.served,
            prompt.template,
            completion,
            params,
            tools=use.tools if use.offered else None,
            seed=seed,
            in_reasoning=prompt.in_reasoning,
            stop_strings=context.stop_strings,
            streamed=True,
            prefill=prompt.prefill,
            prefill_ids=prompt.prefill_ids.tolist(),
        )
        check_called(use.forced, use.strict, reading, completion, prompt.template)
        shown = sampled_part(self.served, prompt, reading, use.tools) if prompt.prefill else None

        def stream(choice: Choice) -> list[Delta]:
            return choice_stream(self.served, context, seed).finish(choice)

        return Choice(completion, reading.text, reading, shown, stream)

    def _text(self, completion: Completion, params: Mapping[str, Any], stops: Sequence[str]) -> str:
        sampled = self.served.template.sampled(
            completion.output_ids,
            finish_reason=completion.finish_reason,
            stop_token_ids=stop_ids(completion, params),
        )
        return before_stop(sampled.body, completion, stops)

    # --- committing -------------------------------------------------------------------------------

    def _commit_reply(
        self,
        live: LiveSession,
        prompt: Prompt,
        parsed: ParsedRequest,
        result: CompletionResult,
        pending: PendingRequest[CompletionResult],
    ) -> None:
        dialect, asked = parsed.dialect, parsed.asked
        assert dialect is not None and asked is not None
        commit_chat(
            live,
            prompt,
            result,
            pending,
            switches=self.templates.switches_of(prompt.template),
            kind=dialect.kind,
            lineage=asked.lineage,
            kept=dialect.kept(asked, result),
        )
        if self.settings.verify == "always":
            start_checks(live)

    # --- verifying --------------------------------------------------------------------------------

    async def settle(self, live: LiveSession) -> None:
        """Verify the sequences of `live`. If one is wrong, exclude the whole session from training.
        Call this before the sequences are returned.
        """
        if self.settings.verify != "off":
            await check_all(live)
        live.exclude_wrong()

    def settle_now(self, live: LiveSession) -> None:
        """Verify the sequences of `live` as `settle` does, but in this thread, which blocks the
        event loop.
        """
        if self.settings.verify != "off":
            check_all_now(live)
        live.exclude_wrong()


def model_card(endpoint: Endpoint) -> dict[str, Any]:
    """Return the entry for the served model in `/v1/models`."""
    return {
        "id": endpoint.model,
        "object": "model",
        "created": 0,
        "owned_by": "toolroll",
        "max_model_len": endpoint.capabilities.context_length,
    }


def _name(prefix: str, pending: PendingRequest[CompletionResult]) -> tuple[str, int]:
    """Return the id and the creation time of an answer. If the answer was restored from disk,
    return its stored values.
    """
    if pending.stored is not None:
        return pending.stored.id, pending.stored.created
    return prefix + uuid.uuid4().hex, int(time.time())
