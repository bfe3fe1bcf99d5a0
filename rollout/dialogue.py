"""`Dialogue`: one episode's conversation with a served model, message by message and token by token.

Invariants: every prompt is the session's own ids, never text (I3); each environment message becomes a delta once (I4); where the
template rewrites history, or the tool list changes, the session forks and the reason is kept (I5); what a hook or a frame puts in
place of the template's own render is compared with it, and a disagreement takes the sample out of training (`mismatches`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.node import Node
from toolroll.rollout.reply import ParseHook, read_reply
from toolroll.rollout.served import ServedModel
from toolroll.rollout.session import Session
from toolroll.rollout.surrogates import without_surrogates
from toolroll.rollout.template.chat_template import ChatTemplate, Delta
from toolroll.rollout.template.derive import Sampled
from toolroll.rollout.template.features import History
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, Message, Tool

VerifyPolicy = Literal["off", "sample", "always"]

DeltaHook = Callable[[Sequence[Message], IdArray], Sequence[int]]
"""Given the conversation and the ids that would be served, gives the ids to serve."""
GenerateHook = Callable[[GenerateRequest], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn: what the engine said, its text without the stop token, what the parser made of it, and the message that
    stands for it in the conversation (every attempted call is in its `tool_calls`)."""

    completion: Completion
    text: str
    parsed: ParsedReply
    message: Message
    node: Node


class Dialogue:
    """The conversation that begins with `messages` and `tools`.

    `messages` grows as the conversation does, without the surrogates that no tokenizer reads; `session` holds its tokens.
    `prompt_hook` and `delta_hook` replace the ids of the first prompt and of the deltas (published hooks of the agent mixin): what
    they give is served, compared and counted.
    """

    def __init__(
        self,
        served: ServedModel,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        session_id: str,
        template: ChatTemplate | None = None,
        verify: VerifyPolicy = "sample",
        generate: GenerateHook | None = None,
        parse: ParseHook | None = None,
        prompt_hook: DeltaHook | None = None,
        delta_hook: DeltaHook | None = None,
    ) -> None:
        self.served = served
        self.template = template or served.template
        self.session = Session(session_id)
        self.messages: list[Message] = [without_surrogates(dict(message)) for message in messages]
        self.tools: list[Tool] = without_surrogates(list(tools))
        self.mismatches: Counter[str] = Counter()
        self.forks: list[str] = []
        self.first_prompt: str = ""
        self._verify = verify
        self._generate: GenerateHook = generate or served.generate
        self._parse = parse
        self._prompt_hook = prompt_hook
        self._delta_hook = delta_hook
        self._pending: list[Message] = []
        self._new_tools: list[Tool] | None = None
        self._tools_key = orjson.dumps(self.tools)
        self._history = History(self.template.features)
        self._history.extend(self.messages)
        self._last: tuple[Sampled, IdArray] | None = None
        self._rendered: str | None = None  # what was served, as the template renders it
        self._checks: set[asyncio.Task[None]] = set()

    # --- the environment's side ----------------------------------------------------------------------------------------

    def extend(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> None:
        """Add what the environment said; `tools` where the list changed. It becomes tokens with the next `reply`."""
        new = [without_surrogates(dict(message)) for message in messages]
        self.messages += new
        self._pending += new
        if tools is not None:
            wanted = without_surrogates(list(tools))
            if wanted != (self.tools if self._new_tools is None else self._new_tools):
                self._new_tools = wanted

    # --- the model's side ----------------------------------------------------------------------------------------------

    async def reply(self, sampling_params: Mapping[str, Any]) -> Reply:
        """Sample the next turn.

        Raises `ContextOverflowError` where the prompt leaves no room (nothing is sent then), `TemplateError` where the
        template refuses the conversation, `EngineError` where the engine fails.
        """
        self._observe_pending()
        params = await self.served.effective_params(sampling_params, len(self.session), self.template)
        request = GenerateRequest(
            input_ids=self.session.input_ids,
            sampling_params=params,
            session_id=self.session.session_id,
            input_ids_json=self.session.input_ids_json,
            highest_id=self.session.highest_id,
        )
        completion = await self._generate(request)
        node = self.session.sample(completion, params)
        return self._take(completion, node, params)

    def _take(self, completion: Completion, node: Node, params: Mapping[str, Any]) -> Reply:
        reading = read_reply(
            self.served,
            self.template,
            completion,
            params,
            tools=self.tools,
            place=f"{self.session.session_id}/{node.start}",
            parse=self._parse,
        )
        self.messages.append(reading.message)
        self._history.add(reading.message)
        self._last = (reading.sampled, completion.output_ids)
        return Reply(completion, reading.said, reading.parsed, reading.message, node)

    # --- tokens of what is new -------------------------------------------------------------------------------------------

    def _observe_pending(self) -> None:
        if self._last is None:
            self._observe_first()
            return
        new, self._pending = self._pending, []
        before = self.messages[: len(self.messages) - len(new)]
        if self._new_tools is not None:
            tools, self._new_tools = self._new_tools, None
            if self._tools_reach_prompt(before[:-1], tools):
                self._set_tools(tools)
                self._fork("the tool list changed, and the template shows it in what was already served", new)
                return
            self._set_tools(tools)
        sampled, sampled_ids = self._last
        try:
            delta = self.template.delta_after(
                self._history.key,
                before,
                new,
                tools=self.tools,
                sampled=sampled,
                sampled_ids=sampled_ids,
                tools_key=self._tools_key,
                rendered=self._rendered,
            )
        except HistoryRewrittenError as error:
            self._fork(error.reason, new)
            return
        self._rendered = delta.rendered
        if delta.preserved:
            self.mismatches["preserved"] += 1
        ids = self._hooked(self._delta_hook, delta.input_ids, "delta_hook")
        self.session.observe(ids)
        self._history.extend(new)
        if self._is_due(delta):
            self._schedule(self.template.check, before, new, list(self.tools), sampled, delta.input_ids)

    def _observe_first(self) -> None:
        text, delta = self.template.first_prompt(self.messages, self.tools, tools_key=self._tools_key)
        self._pending.clear()
        served = self._hooked(self._prompt_hook, delta.input_ids, "prompt_hook")
        self.session.observe(served)
        self.first_prompt = text if served is delta.input_ids else self.template.encoder.decode(served)
        if self._is_due(delta):
            self._schedule(self.template.check_prompt, list(self.messages), list(self.tools), delta.input_ids)

    def _fork(self, reason: str, new: Sequence[Message]) -> None:
        ids = self.template.fork_prompt(self.session.input_ids, self.messages, self.tools)
        self.session.fork(ids, reason)
        self._rendered = None
        self.forks.append(reason)
        self._history.extend(new)

    def _set_tools(self, tools: list[Tool]) -> None:
        self.tools = tools
        self._tools_key = orjson.dumps(tools)

    def _tools_reach_prompt(self, served: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether the prompt that was served would have been another one with `tools`."""
        render = self.template.renderer.render
        return render(served, self.tools, generate=True) != render(served, tools, generate=True)

    def _hooked(self, hook: DeltaHook | None, ids: IdArray, kind: str) -> IdArray:
        if hook is None:
            return ids
        given = np.asarray(hook(self.messages, ids), dtype=np.int32)
        if not np.array_equal(given, ids):
            self._mismatch(kind)
        return given

    # --- verification ----------------------------------------------------------------------------------------------------

    def _is_due(self, delta: Delta) -> bool:
        return delta.check_due if self._verify == "sample" else delta.framed and self._verify == "always"

    def _schedule(self, check: Callable[..., str | None], *args: Any) -> None:
        self._checks.add(asyncio.create_task(self._check(check, *args)))

    async def _check(self, check: Callable[..., str | None], *args: Any) -> None:
        kind = await self.served.off_loop(check, *args)
        if kind is not None:
            self._mismatch(kind)

    def _mismatch(self, kind: str) -> None:
        self.mismatches[kind] += 1
        self.session.exclude(f"verification: {kind}")

    async def settle(self) -> None:
        """Wait for the checks under way; called once, when the episode has ended."""
        checks, self._checks = self._checks, set()
        if checks:
            await asyncio.gather(*checks)
        for kind in self.mismatches:
            if kind != "preserved":
                self.session.exclude(f"verification: {kind}")

    def cancel_checks(self) -> None:
        """Drop the checks under way: the episode is being cancelled and its tokens are not used."""
        for check in self._checks:
            check.cancel()
