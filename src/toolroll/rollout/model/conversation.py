"""`Conversation`: one episode's conversation with a served model, as messages and as tokens.

Invariants:

- A prompt is sent as the token ids that the session recorded, never as text.
- After each turn, only the ids of the new messages are appended. Earlier ids are not encoded again.
- If the template now renders an earlier turn differently, the session forks, and the reason is
  stored. With `history="preserve"`, the recorded ids are kept instead, and the case is counted.
- Sampled text that the template does not show in history is kept and counted.
- If a new list of tools changes the beginning of the prompt, the session always forks.
- Rendering, encoding and parsing of long texts run in a thread.

At the end, `settle` checks each sequence with `Verifier`, which shares no code with the code that
made the sequence. Ids that a hook returns are compared with the template's ids. If they differ, or
if a check fails, `mismatches` counts this, and the whole episode is excluded from training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, Literal, TypeVar

import numpy as np

from toolroll.parsers.types import ParsedReply
from toolroll.rollout.engine import EncodedRequest, is_cut
from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.media import Image, collapsed
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import AssistantTurn, parse_turn
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.runtime.unicode import replace_surrogates
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import KEPT, Cursor, RewrittenError
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.template.record import AnswerRecord
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.template.snapshot import SharedTools, text_size
from toolroll.rollout.template.verifier_pool import POOL
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, Message, Tool

T = TypeVar("T")

logger = logging.getLogger(__name__)

LONG = 100_000
"""A conversation with more characters than this is rendered and encoded in a thread."""
LONG_REPLY = 4096
"""A reply with more tokens than this is parsed in a thread."""

VerifyPolicy = Literal["off", "sample", "always"]
"""When sequences are checked: never ("off"), once at the end of the episode ("sample"), or also
after every turn ("always").
"""

DeltaHook = Callable[[Sequence[Message], IdArray], Sequence[int]]
"""A function that takes the conversation and the ids that would be appended to the prompt, and
returns the ids to append in their place.
"""
GenerateHook = Callable[[GenerateRequest], Awaitable[Completion]]


class Conversation:
    """A conversation with `model` that starts with `messages` and `tools`.

    The attribute `messages` grows with the conversation. Lone surrogates are replaced, because
    tokenizers reject them. `session` holds the tokens. `parse` is a `ParseHook` that also
    gets the tools.

    `prompt_hook` replaces the ids of the first prompt, and `delta_hook` the ids that are appended
    after each turn (for hooks of `TrainableAgentMixin`). The engine gets the ids that they return.
    If these differ from the template's ids, this is counted as a mismatch.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        session_id: str,
        template: ChatTemplate | None = None,
        verify: VerifyPolicy = "sample",
        generate: GenerateHook | None = None,
        parse: Callable[[str, ParsedReply, Sequence[Tool]], ParsedReply] | None = None,
        prompt_hook: DeltaHook | None = None,
        delta_hook: DeltaHook | None = None,
    ) -> None:
        self.model = model
        self.template = template or model.template
        self.session = Session(session_id)
        self._path = SessionPath(self.session)
        self.messages: list[Message] = [replace_surrogates(dict(message)) for message in messages]
        self.mismatches: Counter[str] = Counter()
        self.forks: list[str] = []
        self.first_prompt: str = ""
        self._verify = verify
        self._generate: GenerateHook = generate or model.generate
        self._takes_images = model.takes_images and generate is None  # a hook would lose them
        self._parse = parse
        self._prompt_hook = prompt_hook
        self._delta_hook = delta_hook
        self._pending: list[Message] = []
        self._size = text_size(self.messages)
        self._tools = SharedTools.of(tools)
        self._new_tools: SharedTools | None = None
        self._cursor: Cursor | None = None
        self._last: SampledText | None = None  # the last turn, sampled after the cursor's prompt
        self._in_reasoning = False  # the prompt that was served ends inside reasoning
        self._observed = False  # the session has the next prompt (also after a failed request)
        # The fields of each `TurnSpan` of the current sequence, because the garbage collector does
        # not visit tuples of numbers.
        self._turns: list[tuple[int, int, int, bool]] = []
        self._forked = self._preserved = False
        self._finished: list[ServedSequence] = []  # the sequences before each fork
        self._record = AnswerRecord()
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def tools(self) -> list[Tool]:
        """A copy of the tools."""
        return self._tools.copy()

    # --- the environment's side -------------------------------------------------------------------

    def extend(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> None:
        """Add messages from the environment, and `tools` if the tool list changed. The next call of
        `reply` encodes them.
        """
        new = [replace_surrogates(dict(message)) for message in messages]
        self.messages += new
        self._pending += new
        self._size += text_size(new)
        if tools is not None:
            self._new_tools = SharedTools.of(tools)

    # --- the model's side -------------------------------------------------------------------------

    async def reply(self, sampling_params: Mapping[str, Any]) -> AssistantTurn:
        """Sample the next turn and add it to `messages`.

        Raise `ContextOverflowError` if the prompt leaves no room for an answer, `TemplateError` if
        the template refuses the conversation, and `EngineError` if the engine fails.
        """
        await self.model.turnstile.passed()
        tools = self._new_tools or self._tools
        large = self._size + tools.size > LONG
        if not self._observed:
            await call_of_size(self._observe_pending, large=large)
        elif self._pending or self._new_tools is not None:
            added = "messages" if self._pending else "tools"
            reason = f"{added} were added after a request that failed"
            await call_of_size(self._fork, reason, self._new_tools, large=large)
            self._new_tools = None
        self._observed = True
        params = await self.model.effective_params(sampling_params, len(self._path), self.template)
        request = EncodedRequest(
            input_ids=self._path.input_ids,
            sampling_params=params,
            session_id=self.session.session_id,
            routed_experts_start=self._path.experts_end,
            input_ids_json=self._path.input_ids_json,
            images=self._path.images,
        )
        completion = await self._generate(request)
        node = self._path.sample(completion, params)
        if completion.other_prompt is not None:
            logger.warning("%s: %s", self.session.session_id, completion.other_prompt)
            self._mismatch("images: engine")
        if self._verify != "off":
            self._record.add(request.input_ids, completion)
        is_long = len(completion.output_ids) > LONG_REPLY
        reply = await call_of_size(self._take, completion, node, params, large=is_long)
        if self._verify == "always" and self._is_checked:
            self._checks.add(asyncio.create_task(self._check(self._sequence())))
        return reply

    def _take(self, completion: Completion, node: Node, params: Mapping[str, Any]) -> AssistantTurn:
        hook, start = self._parse, node.start
        reading = parse_turn(
            self.model,
            self.template,
            completion,
            params,
            tools=self._tools.offered,
            seed=f"{self.session.session_id}/{start}",
            in_reasoning=self._in_reasoning,
            parse=None if hook is None else lambda text, reply: hook(text, reply, self.tools),
        )
        stopped = reading.sampled.stop is not None
        self._turns.append((start, node.stop, len(self.messages), stopped))
        self.messages.append(reading.message)
        self._size += len(reading.text)
        self._last = reading.sampled
        self._observed = False
        counts = {
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": len(completion.output_ids),
            "engine_retries": completion.attempts - 1,
        }
        return AssistantTurn(
            reading.parsed,
            reading.message,
            "placeholder" if is_cut(completion) else completion.finish_reason,
            counts,
            completion.latency,
            reading.text,
            node,
        )

    # --- tokens of new messages -------------------------------------------------------------------

    def _observe_pending(self) -> None:
        tools, self._new_tools = self._new_tools, None
        if self._cursor is None:
            self._observe_first(tools or self._tools)
            return
        assert self._last is not None
        turn = len(self.messages) - len(self._pending) - 1
        try:
            ids, self._cursor = self._cursor.after(self._last, self.messages[turn:], tools)
        except RewrittenError as error:
            self._fork(error.reason, tools, error.restart)
            return
        except HistoryRewrittenError as error:
            self._fork(error.reason, tools)
            return
        self._pending = []
        self._tools = tools or self._tools
        if self._cursor.preserved:
            self._preserved = True
            self.mismatches["preserved"] += 1
        if self._cursor.unshown:
            self.mismatches["unshown"] += 1
        ids = self._hooked(self._delta_hook, ids, "delta_hook")
        if self.template.images is None:  # so that text costs no call
            self._path.observe(ids)
        else:
            self._path.observe(*self._expanded(ids, self.messages[turn + 1 :]))

    def _observe_first(self, tools: SharedTools) -> None:
        self._tools = tools
        self._cursor = self.template.start(self.messages, tools)
        ids = self._cursor.prompt()
        self._pending = []
        prompt = self._hooked(self._prompt_hook, ids, "prompt_hook")
        self._path.observe(*self._expanded(prompt, self.messages))
        unchanged = prompt is ids
        self.first_prompt = self._cursor.text if unchanged else self.template.encoder.decode(prompt)

    def _fork(
        self, reason: str, tools: SharedTools | None = None, restart: Cursor | None = None
    ) -> None:
        if self._turns:
            self._finished.append(self._sequence())
        self._tools = tools or self._tools
        self._cursor = restart or self.template.start(self.messages, self._tools)
        keep = collapsed(self._path.input_ids, self._path.images)
        ids, images = self._expanded(self._cursor.prompt(keep=keep), self.messages)
        self._path.fork(ids, reason, images)
        self._in_reasoning = self._cursor.opens_reasoning(self.model.parser.reasoning)
        self._pending = []
        self._turns, self._forked, self._preserved = [], True, False
        self.forks.append(reason)

    def _expanded(
        self, ids: IdArray, messages: Sequence[Message]
    ) -> tuple[IdArray, tuple[Image, ...]]:
        """Return the ids of `messages` with all tokens of their images, and the images."""
        if self.template.images is None:
            return ids, ()
        expanded, images = self.template.images.expand(ids, messages)
        if images and not self._takes_images:
            raise TemplateError(
                f"the engine ({self.model.url}), the trainer or an overridden `_call_llm` takes no "
                "images: use tasks without"
            )
        return expanded, images

    def _hooked(self, hook: DeltaHook | None, ids: IdArray, kind: str) -> IdArray:
        """Return `ids`, or the ids that `hook` returns in their place."""
        assert self._cursor is not None
        reasoning = self.model.parser.reasoning
        self._in_reasoning = self._cursor.opens_reasoning(reasoning)
        if hook is None:
            return ids
        replaced = np.asarray(hook(self.messages, ids), dtype=np.int32)
        if not np.array_equal(replaced, ids):
            self._mismatch(kind)
            text = self.template.encoder.decode(replaced)
            if reasoning is not None and text != self.template.encoder.decode(ids):
                unclosed = reasoning.unclosed(text)
                self._in_reasoning = unclosed is not None and not text[unclosed[1] :].strip()
        return replaced

    def exclude(self, turn: AssistantTurn, reason: str) -> None:
        """Exclude a sampled turn from training."""
        assert turn.node is not None
        self.session.exclude(reason, [turn.node])

    # --- verification -----------------------------------------------------------------------------

    def _sequence(self) -> ServedSequence:
        """Return the sequence up to its last sampled turn, as the verifier checks it."""
        return ServedSequence(
            self._path.input_ids,
            tuple(starmap(TurnSpan, self._turns)),
            self.messages[: self._turns[-1][2] + 1],
            self._tools.tools,  # the verifier makes its own copy
            forked=self._forked,
            preserved=self._preserved,
            record=self._record,
            images=self._path.images,
        )

    @property
    def _is_checked(self) -> bool:
        """False if checks are off, or if a mismatch has already excluded the samples."""
        return self._verify != "off" and not self.mismatches.keys() - KEPT

    async def _check(self, sequence: ServedSequence) -> None:
        kind = await POOL.check(self.template.verifier, sequence)
        if kind is not None:
            self._mismatch(kind)

    def _mismatch(self, kind: str) -> None:
        self.mismatches[kind] += 1
        self.session.exclude(f"verification: {kind}")

    async def settle(self) -> None:
        """Check the episode's sequences, loss masks and logprobs, and exclude the episode from
        training if a check fails. Call this once, at the end. Raise `UsageError` if the engine now
        serves a different model, because part of the tokens may be from it.
        """
        if self._finished or self._turns:
            await self.model.engine.check_model()
        if self._checks:
            await asyncio.gather(*self._checks)
        if self._verify == "sample" and self._is_checked:
            for sequence in [*self._finished, *([self._sequence()] if self._turns else ())]:
                await self._check(sequence)
        if self._is_checked:
            trajectories = self.session.trajectories()
            kind = await asyncio.to_thread(self._record.check, trajectories)
            if kind is not None:
                self._mismatch(kind)
        for kind in self.mismatches:
            if kind not in KEPT:
                self.session.exclude(f"verification: {kind}")

    def cancel_checks(self) -> None:
        """Cancel the running checks of a cancelled episode, because its tokens are not used."""
        for check in self._checks:
            check.cancel()
