"""`Endpoint`: chat and text completions with exact tokens, for whoever asks: the HTTP server and
the in-process client.

Invariants: a plan changes nothing and stays true whatever is committed meanwhile, so that a large
request is planned in a thread and holds up no other one; what is handed out is committed first, in
one go, and what is never handed out is never trained; a failure is an `ApiError` and touches no
other request.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import ref

from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import ParsedTurn, parse_turn
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.server.completions import TextPrompt, plan_text
from toolroll.rollout.server.config import EndpointSettings
from toolroll.rollout.server.conversation_tree import Prompt
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.messages import read_messages
from toolroll.rollout.server.pending import PendingRequest, request_key
from toolroll.rollout.server.protocol import ChatRequest, CompletionRequest, Sampling, read
from toolroll.rollout.server.received import LONG, Received
from toolroll.rollout.server.responses import chat_body, is_long, text_body
from toolroll.rollout.server.result import Choice, CompletionResult, joined_ids
from toolroll.rollout.server.sampling import (
    EngineCapabilities,
    ToolUse,
    apply_tool_choice,
    sampling_params,
    top_logprobs,
)
from toolroll.rollout.server.sessions import LiveSession, Sessions
from toolroll.rollout.server.template_cache import TemplateCache
from toolroll.rollout.server.tool_choice import check_called
from toolroll.rollout.server.turn import TurnNode, sequence_of
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, Tool


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, read (without its messages, which have become a prompt), and the tools that it
    offers.
    """

    request: ChatRequest | CompletionRequest
    tools: list[Tool] = field(default_factory=list)


class Ask(Protocol):
    """`Endpoint.start_chat`, `Endpoint.ask_text`."""

    async def __call__(
        self, live: LiveSession, body: Received, *, retry: int = 0
    ) -> tuple[ParsedRequest, PendingRequest[CompletionResult]]:
        """Begin, or join, what `body` asks for."""
        ...


class Endpoint:
    """Serves `served` to many sessions. An async context manager; or call `start` before the first
    request and `aclose` at the end. `served` stays open."""

    def __init__(self, served: Model, settings: EndpointSettings | None = None) -> None:
        self.served = served
        self.settings = settings or EndpointSettings()
        self.sessions = Sessions(self.settings)
        self.abilities = EngineCapabilities()
        self.variants = TemplateCache(served.template)
        self._developer = "developer" in served.template.renderer.source

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.served.name or "toolroll"

    async def start(self) -> None:
        """Find out what the engine can do."""
        info = await self.served.engine.model_info()
        self.abilities = EngineCapabilities(
            deterministic=info.deterministic,
            behind_router=await self.served.engine.behind_router(),
            context_length=info.context_length,
            vocab_size=info.vocab_size,
        )

    async def refresh(self) -> None:
        """Ask again where the engine has not told its context length: it may not have answered
        yet at the start.
        """
        if self.abilities.context_length is None:
            await self.start()

    async def aclose(self) -> None:
        """Abort what is in flight."""
        await self.sessions.aclose()

    # --- requests ---------------------------------------------------------------------------------

    async def start_chat(
        self, live: LiveSession, body: Received, *, retry: int = 0
    ) -> tuple[ParsedRequest, PendingRequest[CompletionResult]]:
        """Begin, or join, the chat completion that `body` asks for; nobody may change it any
        more.
        """
        large = body.large
        request, key = await call_of_size(
            lambda: (read(ChatRequest, body.data), request_key("chat", body.data)), large=large
        )
        given, request.messages = request.messages, []
        tools: list[Tool] = list(body.data.get("tools") or ())
        asked = ParsedRequest(request, tools)
        joined = live.works.retried(key, retry) if retry else None
        if joined is not None:
            return asked, joined
        self._admit(live, request)
        params = sampling_params(
            request, self.settings, self.abilities, live.sampling_params, request.token_limit
        )
        use = apply_tool_choice(
            request, tools, self.served.parser.name, params, routed=self.abilities.behind_router
        )
        top = top_logprobs(request)
        switches = self.variants.with_effort(request.chat_template_kwargs, request.reasoning_effort)
        template = self.variants.get(switches)
        plan = partial(self._plan, live, given, use.tools, template)

        async def run(work: PendingRequest[CompletionResult]) -> CompletionResult:
            prompt = await call_of_size(plan, large=large)
            given.clear()  # a conversation long, and nobody needs it while the engine samples
            answered = prompt.turn.answered() if prompt.turn is not None else None
            prompt_json = _prompt_json(prompt, answered)
            if answered is not None:
                live.works.forget(answered)  # its client has the answer: it goes on from it
            first = live.answers[prompt.digest]
            live.answers[prompt.digest] += request.n
            work.note = StreamNote(template, use.offered, live.id, len(prompt.input_ids), first)
            completions, sent = await self._sample(
                live, template, prompt.input_ids, prompt_json, params, request, work, top
            )
            choices = []
            for index, completion in enumerate(completions):
                choice = partial(
                    self._chat_choice, live, prompt, completion, sent, use, request, first + index
                )
                choices.append(
                    await call_of_size(choice, large=large or len(completion.output_ids) > LONG)
                )
            served = self._served(
                "chatcmpl", prompt.input_ids, prompt_json, choices, sent, use.constrained
            )
            encoder = self.served.template.encoder
            served.commit = lambda: self._commit_chat(live, prompt, served, work)
            served.render = lambda: chat_body(
                served, encoder, logprobs=bool(request.logprobs), top=top
            )
            if not request.stream and is_long(
                completions, logprobs=bool(request.logprobs), top=top
            ):
                await asyncio.to_thread(served.write)
            return served

        return asked, live.works.start(key, request.n, run)

    def _plan(
        self, live: LiveSession, given: Sequence[Any], tools: list[Tool], template: ChatTemplate
    ) -> Prompt:
        return live.tree.plan(read_messages(given, developer=self._developer), tools, template)

    async def ask_text(
        self, live: LiveSession, body: Received, *, retry: int = 0
    ) -> tuple[ParsedRequest, PendingRequest[CompletionResult]]:
        """Begin, or join, the text completion that `body` asks for."""
        large = body.large
        request, key = await call_of_size(
            lambda: (read(CompletionRequest, body.data), request_key("text", body.data)),
            large=large,
        )
        asked = ParsedRequest(request)
        joined = live.works.retried(key, retry) if retry else None
        if joined is not None:
            return asked, joined
        self._admit(live, request)
        params = sampling_params(
            request, self.settings, self.abilities, live.sampling_params, request.token_limit
        )
        top = top_logprobs(request)
        planned = partial(
            plan_text, live, request.prompt, self.served.template.encoder, self.abilities.vocab_size
        )

        async def run(work: PendingRequest[CompletionResult]) -> CompletionResult:
            plan = await call_of_size(planned, large=large)
            prompt_json = joined_ids(plan.input_ids)
            completions, sent = await self._sample(
                live, self.served.template, plan.input_ids, prompt_json, params, request, work, top
            )
            choices = []
            for completion in completions:
                shown = partial(self._shown, completion, request)
                said = await call_of_size(shown, large=len(completion.output_ids) > LONG)
                choices.append(Choice(completion, said))
            served = self._served("cmpl", plan.input_ids, prompt_json, choices, sent, None)
            encoder = self.served.template.encoder
            served.commit = lambda: self._commit_text(live, plan, served)
            served.render = lambda: text_body(served, encoder, logprobs=request.logprobs)
            logprobs = request.logprobs is not None
            if not request.stream and is_long(completions, logprobs=logprobs, top=top):
                await asyncio.to_thread(served.write)
            return served

        return asked, live.works.start(key, request.n, run)

    def deliver(self, work: PendingRequest[CompletionResult]) -> CompletionResult:
        """The result of a finished work, committed to its session."""
        if work.task.cancelled():
            raise ApiError(
                409, "request_aborted", "the request was aborted: its session was deleted"
            )
        served = work.task.result()
        if served.commit is not None:
            served.commit()
            served.commit = None
        work.delivered = True
        return served

    def _admit(self, live: LiveSession, request: Sampling) -> None:
        settings = self.settings
        if settings.model_names == "own" and request.model not in (None, self.model):
            raise ApiError(
                404,
                "model_not_found",
                f"this endpoint serves {self.model!r}, not {request.model!r}",
                param="model",
            )
        if live.session.nodes >= settings.max_nodes:
            words = f"the session has {live.session.nodes} nodes, the limit: begin another one"
            raise ApiError(409, "session_full", words, param="session_id")
        if live.works.in_flight >= settings.max_in_flight:
            words = f"the session has {live.works.in_flight} requests in flight, the limit"
            raise ApiError(429, "too_many_requests", words, retry=True)

    # --- sampling ---------------------------------------------------------------------------------

    async def _sample(
        self,
        live: LiveSession,
        template: ChatTemplate,
        ids: IdArray,
        ids_text: bytes,
        params: Mapping[str, Any],
        request: Sampling,
        work: PendingRequest[CompletionResult],
        top: int,
    ) -> tuple[list[Completion], dict[str, Any]]:
        """All answers, each a request of its own (they share the prompt in the engine's prefix
        cache), or an error.
        """
        sent = await self.served.effective_params(params, len(ids), template)
        extra = {"top_logprobs_num": top} if top else {}
        ask = GenerateRequest(
            input_ids=ids,
            sampling_params=sent,
            session_id=live.id,
            input_ids_json=ids_text,
            extra=extra,
        )

        async def one(index: int) -> Completion:
            progress = (lambda got: work.report(index, list(got))) if request.stream else None
            completion = await self.served.generate(ask, progress=progress)
            if completion.finish_reason == "abort":
                raise ApiError(
                    503,
                    "engine_aborted",
                    "the engine aborted the request (a weight update, say)",
                    retry=True,
                )
            if top and completion.top_logprobs is None and len(completion.output_ids):
                raise ApiError(
                    502, "engine_error", "the engine gave no top logprobs, which were asked for"
                )
            return completion

        async with asyncio.timeout(self.settings.timeout):
            if request.n == 1:
                return [await one(0)], sent
            tasks = [asyncio.ensure_future(one(index)) for index in range(request.n)]
            try:
                return list(await asyncio.gather(*tasks)), sent
            finally:
                # one that failed ends all: an answer that is not handed out is not wanted
                for task in tasks:
                    task.cancel()

    def _chat_choice(
        self,
        live: LiveSession,
        prompt: Prompt,
        completion: Completion,
        params: Mapping[str, Any],
        use: ToolUse,
        request: ChatRequest,
        nth: int,
    ) -> Choice:
        reading: ParsedTurn = parse_turn(
            self.served,
            prompt.template,
            completion,
            params,
            tools=use.tools if use.offered else None,
            place=call_id_seed(live.id, len(prompt.input_ids), nth),
            stop_strings=request.stop_strings,
        )
        check_called(use.forced, use.strict, reading, completion, prompt.template)
        return Choice(completion, reading.said, reading)

    def _shown(self, completion: Completion, request: CompletionRequest) -> str:
        template = self.served.template
        said = template.sampled(
            completion.output_ids,
            finish_reason=completion.finish_reason,
            stop_token_ids=request.stop_token_ids or (),
        ).said
        if isinstance(completion.matched, str) and completion.matched in request.stop_strings:
            said = said.partition(completion.matched)[0]
        return said

    def _served(
        self,
        prefix: str,
        ids: IdArray,
        ids_text: bytes,
        choices: list[Choice],
        params: Mapping[str, Any],
        constrained: str | None,
    ) -> CompletionResult:
        return CompletionResult(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            self.model,
            ids,
            choices,
            params,
            ids_text,
            constrained,
        )

    # --- committing -------------------------------------------------------------------------------

    def _commit_chat(
        self,
        live: LiveSession,
        prompt: Prompt,
        served: CompletionResult,
        work: PendingRequest[CompletionResult],
    ) -> None:
        observed = live.tree.observe(prompt)
        source = ref(work)
        for choice in served.choices:
            node = live.session.grow_sampled(observed, choice.completion, served.sampling_params)
            assert choice.reading is not None
            live.tree.commit(prompt, node, choice.reading).source = source
            live.trace.append((node, "chat.completion"))
        if prompt.preserved:
            live.mismatches["preserved"] += 1
        if self.settings.verify == "always":
            self._start_checks(live)

    def _commit_text(self, live: LiveSession, plan: TextPrompt, served: CompletionResult) -> None:
        observed = live.session.grow(plan.parent, plan.delta, reason=plan.reason)
        for choice in served.choices:
            node = live.session.grow_sampled(observed, choice.completion, served.sampling_params)
            live.texts.append(node)
            live.trace.append((node, "text_completion"))

    # --- verifying --------------------------------------------------------------------------------

    async def settle(self, live: LiveSession) -> None:
        """Verify the sequences of `live`, and take wrong ones out of training; called before they
        are handed out.

        At the end all are verified, also those that were committed while it waited.
        """
        while self.settings.verify != "off" and live.tree.unchecked():
            self._start_checks(live)
            await live.checked()
        live.exclude_wrong()

    def settle_now(self, live: LiveSession) -> None:
        """Do what `settle` does, without waiting: for a caller that cannot, at the price of
        holding up the event loop.
        """
        for turn in live.tree.unchecked() if self.settings.verify != "off" else ():
            live.check_done(turn, turn.template.verifier.check(sequence_of(turn, live.session)))
        live.exclude_wrong()

    def _start_checks(self, live: LiveSession) -> None:
        for turn in live.tree.unchecked():
            if turn not in live.checks:
                live.checks[turn] = asyncio.get_running_loop().create_task(self._check(live, turn))

    async def _check(self, live: LiveSession, turn: TurnNode) -> None:
        try:
            kind = await asyncio.to_thread(
                turn.template.verifier.check, sequence_of(turn, live.session)
            )
            live.check_done(turn, kind)
        finally:
            del live.checks[turn]


@dataclass(frozen=True, slots=True)
class StreamNote:
    """What a stream must know before the answer is there."""

    template: ChatTemplate
    offered: bool
    session_id: str
    prompt_length: int
    first: int


def model_card(endpoint: Endpoint) -> dict[str, Any]:
    """The served model as `/v1/models` lists it."""
    length = endpoint.abilities.context_length
    return {
        "id": endpoint.model,
        "object": "model",
        "created": 0,
        "owned_by": "toolroll",
        "max_model_len": length,
    }


def retry_number(header: str | None) -> int:
    """Which retry a request is, by the SDKs' header; 0 for a first attempt."""
    return (
        int(header) if header and header.isascii() and header.isdigit() and len(header) < 6 else 0
    )


def call_id_seed(session_id: str, prompt_length: int, nth: int) -> str:
    """The place that seeds the ids of a reply's calls; `nth` answer to its prompt."""
    return f"{session_id}/{prompt_length}" + (f"/{nth}" if nth else "")


def _prompt_json(prompt: Prompt, answered: PendingRequest[CompletionResult] | None) -> bytes:
    """The prompt's ids as JSON text: with those that the turn before was sent with, where they
    are kept.
    """
    if answered is None or prompt.turn is None or prompt.parent != prompt.turn.node:
        return joined_ids(prompt.input_ids)
    return joined_ids(answered.task.result().prompt_json, prompt.turn.node.ids, prompt.delta)
