"""`Reply`: one request to the endpoint, from its body to its answer, as a class with one method for
each step.

Invariants: before the last event of a streamed answer is sent, the answer is committed and, if
there is a store, saved. A failure after the first event is sent as an event.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import orjson

from toolroll.endpoint.answers.result import (
    LONG,
    Choice,
    ChoiceStream,
    CompletionResult,
    TextStream,
    is_long,
)
from toolroll.endpoint.conversation.completions import TextPrompt, plan_text
from toolroll.endpoint.conversation.conversation_tree import Prompt
from toolroll.endpoint.conversation.prefill import (
    check_continued,
    sampled_part,
    split_prefill,
    with_prefill,
)
from toolroll.endpoint.conversation.stored_response import Origin
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.dialects.blocks import all_switches
from toolroll.endpoint.dialects.dialect import Dialect, Event, ParsedRequest, ReplyWriter
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.metrics import Metrics
from toolroll.endpoint.requests.sampling import (
    apply_tool_choice,
    default_limit,
    sampling_params,
    stop_strings,
)
from toolroll.endpoint.requests.tool_choice import check_called
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.endpoint.sessions.pending import PendingRequest
from toolroll.endpoint.sessions.session_store import SessionStore
from toolroll.endpoint.sessions.sessions import Sessions
from toolroll.parsers.reading.schema import Offered
from toolroll.rollout.engine import LORA_PATH, EncodedRequest, ModelInfo
from toolroll.rollout.media import Image
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import before_stop, parse_options, parse_turn, stop_ids
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.runtime.time_limit import pausable
from toolroll.rollout.session.tree import Node
from toolroll.rollout.types import Completion, GenerateRequest

NEW_TEXT = "another text of the same session"


class Serving:
    """What the replies of one endpoint share. For the parameters, see `Endpoint`."""

    def __init__(
        self,
        model: Model,
        settings: EndpointSettings,
        store: SessionStore | None,
        *,
        openrlhf: bool,
    ) -> None:
        self.model = model
        self.settings = settings
        self.store = store
        self.openrlhf = openrlhf
        self.metrics = Metrics()
        self.sessions = Sessions(settings, model.open_session, store)
        self.model_info = ModelInfo()
        self.dropped: frozenset[str] = frozenset()
        """The sampling parameters that a router in front of the engine drops."""
        self.templates = TemplateCache(model.template, images=model.takes_images)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.model.name or "toolroll"

    def lora_path(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a request names as `MODEL:ADAPTER`, as SGLang's own API
        does, or None.
        """
        prefix = f"{self.model_name}:"
        if model is None or not model.startswith(prefix):
            return None
        return model.removeprefix(prefix) or None


class Reply(PendingRequest):
    """One request to the endpoint, and its answer. `key` and `large`: see `Endpoint.start_reply`.

    The task of a request runs the steps `plan` (find the exact `prompt`), `begin` (create the
    `result`), `sample` and `choice` (read what was sampled). These change nothing in the session.
    When the answer is returned, `deliver` calls `commit`, which adds the answer to the session, and
    `render` writes the body.
    """

    def __init__(
        self,
        endpoint: Serving,
        dialect: Dialect,
        live: LiveSession,
        parsed: ParsedRequest,
        *,
        key: bytes = b"",
        large: bool = False,
    ) -> None:
        # first, because it limits `n`
        self.params = sampling_params(
            parsed.request,
            endpoint.settings,
            endpoint.model_info,
            live.sampling_params,
            dropped=endpoint.dropped,
        )
        if lora_path := endpoint.lora_path(parsed.request.model):
            self.params[LORA_PATH] = lora_path
        self.params |= live.fixed_params
        super().__init__(key, parsed.request.n)
        self.endpoint = endpoint
        self.dialect = dialect
        self.live = live
        self.parsed = parsed
        self.large = large
        self.model = endpoint.model
        self.template = endpoint.model.template
        # not the stop string that ends a reply after its first call, which stays in the text
        self.stop_strings = stop_strings(self.params)
        self.result: CompletionResult
        """Set by `run` before the engine is asked. Its choices are added at the end."""
        self.saved: asyncio.Future[None] | None = None
        """Done once the answer is on disk."""
        self._body: bytes | None = None

    # --- sampling ---------------------------------------------------------------------------------

    async def run(self) -> CompletionResult:
        await self.model.turnstile.passed()
        parent = await call_of_size(self.plan, large=self.large)
        self.result = self.begin()
        try:
            completions = await self.sample(parent)
        finally:
            if self.endpoint.sessions.get(self.live.id) is None:  # it has no next turn
                self.model.admission.end(self.live.id)
        for index, completion in enumerate(completions):
            large = self.large or len(completion.output_ids) > LONG
            choice = await call_of_size(self.choice, index, completion, large=large)
            self.result.choices.append(choice)
        request = self.parsed.request
        if not request.stream and is_long(completions, request.top):
            self._body = await asyncio.to_thread(self.render)
        return self.result

    def plan(self) -> Node | None:
        """Find the exact prompt, and return the node that it extends. The prompt stays valid if
        other requests are committed afterwards.
        """
        raise NotImplementedError

    def begin(self) -> CompletionResult:
        """Return the result of the planned prompt, without choices."""
        raise NotImplementedError

    def _result(self, prompt: Prompt | TextPrompt, *, first: int = 0) -> CompletionResult:
        name = self.endpoint.model_name
        if self.stored is not None:
            return replace(self.stored, model=name, choices=[], stop_strings=self.stop_strings)
        return CompletionResult(
            id=self.dialect.prefix + uuid.uuid4().hex,
            created=int(time.time()),
            model=name,
            prompt_ids=prompt.input_ids,
            stop_strings=self.stop_strings,
            first=first,
        )

    async def sample(self, parent: Node | None) -> list[Completion]:
        """Return what the engine sampled after the prompt, which extends `parent`. Each choice is a
        separate request to the engine, whose prefix cache holds the prompt. If the choices were
        restored from disk, return them unchanged.
        """
        if self.stored is not None:
            return [choice.completion for choice in self.stored.choices]
        ids, top = self.result.prompt_ids, self.parsed.request.top
        sent = await self.model.effective_params(self.params, len(ids), self.template)
        self.result.sampling_params = sent
        request = EncodedRequest(
            input_ids=ids,
            input_ids_json=self.result.prompt_json,
            sampling_params=sent,
            session_id=self.live.id,
            extra={"top_logprobs_num": top} if top else {},
            routed_experts_start=self.live.session.experts_end(parent),
            images=self.images(parent),
        )
        async with asyncio.timeout(self.endpoint.settings.timeout) as limit:
            with pausable(limit):
                return await self._completions(request)

    def images(self, parent: Node | None) -> tuple[Image, ...]:
        """Return the images of the prompt, which extends `parent`."""
        return ()

    async def _completions(self, request: GenerateRequest) -> list[Completion]:
        if self.parsed.request.n == 1:
            return [await self._generate(request, 0)]
        tasks = [
            asyncio.ensure_future(self._generate(request, index))
            for index in range(self.parsed.request.n)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # if one fails, all fail, because the others would not be returned
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, request: GenerateRequest, index: int) -> Completion:
        stream, top = self.parsed.request.stream, self.parsed.request.top
        progress = (lambda ids: self.report(index, list(ids))) if stream else None
        completion = await self.model.generate(request, progress=progress)
        if completion.finish_reason == "abort":
            problem = "the engine aborted the request (for example, for a weight update)"
            raise ApiError(503, "engine_aborted", problem, retry=True)
        if top and completion.top_logprobs is None and len(completion.output_ids):
            problem = "the engine returned no top logprobs, although the request asks for them"
            raise ApiError(502, "engine_error", problem)
        return completion

    def choice(self, index: int, completion: Completion) -> Choice:
        """Return choice number `index`, which the engine sampled as `completion`."""
        raise NotImplementedError

    def stream(self, index: int) -> ChoiceStream:
        """Return a new stream of choice number `index`."""
        return ChoiceStream(self._text_stream())

    def _text_stream(self) -> TextStream:
        stop_ids = {*self.template.stop_token_ids, *(self.params.get("stop_token_ids") or ())}
        return TextStream(self.template.encoder, stop_ids, self.stop_strings)

    # --- returning --------------------------------------------------------------------------------

    def outcome(self) -> CompletionResult:
        """Return the result of the finished request, or raise its error."""
        if self.task.cancelled():
            self.endpoint.sessions.check_open()
            problem = "the request was aborted: its session was deleted"
            raise ApiError(409, "request_aborted", problem)
        if self.failure is not None:
            raise self.failure
        return self.task.result()

    async def deliver(self) -> None:
        """Commit the result of the finished request. If the session is kept on disk, return only
        once the result is saved. If committing or saving fails, every caller that waits for this
        result gets the error.
        """
        result = self.outcome()
        try:
            if not self.committed:
                self.committed = True
                self.live.check()
                self.commit()
                self.endpoint.metrics.count(result)
            if self.saved is not None:
                await asyncio.shield(self.saved)  # others may wait for it
        except Exception as error:
            self.failure = error
            raise
        self.delivered = True

    def commit(self) -> None:
        """Add the result to the session and, if the session is kept on disk, to the journal. Both
        have the answers in the same order.
        """
        raise NotImplementedError

    def _wait_for(self, saved: asyncio.Future[None], nodes: Sequence[Node]) -> None:
        """Make `deliver` wait for `saved`. If saving fails, exclude `nodes` from training."""

        def exclude(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                self.live.session.exclude("the answer could not be saved", nodes)

        saved.add_done_callback(exclude)
        self.saved = saved

    def render(self) -> bytes:
        """Return the body. A retry makes it again, unless that takes long."""
        body = self._body or orjson.dumps(self.dialect.body(self.parsed, self.result))
        self.result.free()
        return body

    # --- streaming --------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Wait until the stream has an event to send. Raise any error that occurs before the first
        token, so that it becomes an HTTP error, which SDKs can retry.
        """
        while not self.task.done() and not any(self.progress):
            await self.changed.wait()
        if self.failed:
            self.outcome()

    async def event_lines(self) -> AsyncIterator[bytes]:
        """Yield the whole stream as server-sent events, in the format of the dialect."""
        writer = self.dialect.writer(self.parsed, self.result)
        try:
            async for event in self._events(writer):
                yield self.dialect.line(event)
        except Exception as failure:  # noqa: BLE001 - any error becomes an event
            error = api_error(failure)
            self.endpoint.metrics.errors[error.code] += 1
            yield self.dialect.line(writer.failed(error))
        finally:
            self.result.free()
        yield self.dialect.done

    async def _events(self, writer: ReplyWriter) -> AsyncIterator[Event]:
        """Yield the events of the reply. If the request fails, raise its error."""
        streams = [self.stream(index) for index in range(self.parsed.request.n)]
        for event in writer.start():
            yield event
        done = False
        while not done:
            changed, done = self.changed, self.task.done()
            for index, stream in enumerate(streams):
                for step in stream.feed(self.progress[index]):
                    for event in writer.add(index, step):
                        yield event
            if not done:
                await changed.wait()
        choices = self.outcome().choices
        remaining = [
            stream.finish(choice.completion, choice.text, choice.turn)
            for stream, choice in zip(streams, choices, strict=True)
        ]
        await self.deliver()
        for index, steps in enumerate(remaining):
            for step in steps:
                for event in writer.add(index, step):
                    yield event
        async for event in writer.finish():
            yield event


class ChatReply(Reply):
    """The next message of a conversation, in any dialect."""

    prompt: Prompt

    def __init__(
        self,
        endpoint: Serving,
        dialect: Dialect,
        live: LiveSession,
        parsed: ParsedRequest,
        *,
        key: bytes = b"",
        large: bool = False,
    ) -> None:
        super().__init__(endpoint, dialect, live, parsed, key=key, large=large)
        request, templates = self.parsed.chat, endpoint.templates
        self.use = apply_tool_choice(
            request,
            self.parsed.tools,
            self.model.parser.name,
            self.params,
            dropped=endpoint.dropped,
        )
        if request.continue_final_message:
            check_continued(request, self.use)
        effort = templates.effort_switches(
            request.reasoning_effort, "reasoning_effort", self.parsed.ignored
        )
        self.template = templates.get(all_switches(request.chat_template_kwargs, effort))

    def plan(self) -> Node | None:
        """Find the turn that the conversation continues."""
        messages, prefill = self.parsed.messages, ""
        if self.parsed.chat.continue_final_message:
            messages, prefill = split_prefill(messages)
        prompt = self.live.tree.plan(
            messages, self.use.tools, self.template, self.model.parser.reasoning
        )
        length = self.endpoint.model_info.context_length
        if prefill:
            prompt = with_prefill(prompt, prefill)
        elif self.endpoint.openrlhf and length is not None:
            limit = default_limit(self.endpoint.settings, self.live.sampling_params)
            prompt = prompt.cut(max(1, length - (limit or 1)))
        self.prompt = prompt
        return prompt.parent

    def images(self, parent: Node | None) -> tuple[Image, ...]:
        return (*self.live.session.path_images(parent), *self.prompt.images)

    def begin(self) -> CompletionResult:
        """Return the result without choices, and count the answers to the prompt."""
        prompt, live, choices = self.prompt, self.live, self.parsed.request.n
        self.parsed.messages.clear()  # a whole conversation, not needed while the engine samples
        first = live.answers[prompt.digest]
        if self.stored is None:
            live.answers[prompt.digest] += choices
            if prompt.turn is not None:
                live.forget_request(prompt.turn)
        result = self._result(prompt, first=first)
        result.constrained = self.use.constrained
        return result

    def _seed(self, index: int) -> str:
        """Return the text from which the ids of the calls of choice number `index` are derived."""
        number = self.result.first + index
        return f"{self.live.id}/{len(self.result.prompt_ids)}" + (f"/{number}" if number else "")

    @property
    def _offered(self) -> Offered | None:
        return self.use.tools.offered if self.use.offered else None

    def choice(self, index: int, completion: Completion) -> Choice:
        """Parse the reply number `index`."""
        prompt, use = self.prompt, self.use
        turn = parse_turn(
            self.model,
            prompt.template,
            completion,
            self.result.sampling_params,
            tools=self._offered,
            seed=self._seed(index),
            in_reasoning=prompt.in_reasoning,
            stop_strings=self.stop_strings,
            streamed=True,
            prefill=prompt.prefill,
            prefill_ids=prompt.prefill_ids.tolist(),
        )
        if use.forced or use.strict:
            check_called(use.forced, use.strict, turn, completion, prompt.template)
        message = sampled_part(self.model, prompt, turn, use.tools) if prompt.prefill else None
        return Choice(completion, turn.text, turn, message, self.stream(index))

    def stream(self, index: int) -> ChoiceStream:
        """Return a new stream of reply number `index`."""
        in_reasoning = self.prompt.in_reasoning
        options = parse_options(self._offered, in_reasoning=in_reasoning, streamed=True)
        parser = self.model.parser.stream(**options)
        return ChoiceStream(self._text_stream(), parser, self._seed(index))

    def commit(self) -> None:
        """Add the turns to the tree of the conversation."""
        live, prompt, result = self.live, self.prompt, self.result
        response = self.dialect.stored(self.parsed, result)
        ignored = tuple(sorted(self.parsed.ignored.paths))
        origin = Origin(self.dialect.kind, self.parsed.lineage, response, ignored)
        nodes = [turn.node for turn in live.add_chat(prompt, result, origin)]
        live.requests |= dict.fromkeys([node.index for node in nodes], self)
        if live.log is not None:
            switches = self.endpoint.templates.switches_of(prompt.template)
            saved = live.log.chat(prompt, result, self.key, nodes, origin, switches)
            self._wait_for(saved, nodes)
        if self.endpoint.settings.verify == "always":
            live.start_checks()


class TextReply(Reply):
    """The continuation of a text."""

    prompt: TextPrompt

    def plan(self) -> Node | None:
        """Find the earlier completion that the text continues."""
        self.prompt = plan_text(self.live.texts, self.parsed.text.prompt, self.template.encoder)
        return self.prompt.parent

    def begin(self) -> CompletionResult:
        return self._result(self.prompt)

    def choice(self, index: int, completion: Completion) -> Choice:
        sampled = self.template.sampled(
            completion.output_ids,
            finish_reason=completion.finish_reason,
            stop_token_ids=stop_ids(completion, self.result.sampling_params, self.model),
        )
        return Choice(completion, before_stop(sampled.body, completion, self.stop_strings))

    def commit(self) -> None:
        """Add the completions to the texts of the session."""
        live, prompt = self.live, self.prompt
        reason = NEW_TEXT if prompt.parent is None and live.session.nodes else None
        nodes = live.add_text(prompt, self.result, reason)
        if live.log is not None:
            saved = live.log.text(prompt, self.result, self.key, nodes, reason)
            self._wait_for(saved, nodes)
