"""`ChatTemplate`: exact prompts and exact deltas for one tokenizer and its chat template.

Invariants: a delta is the text that the template itself appends, found by `derive`; a learned frame stands in for it only where
its first use agreed, and is dropped at the first disagreement; the template's rewriting of history raises
`HistoryRewrittenError` unless history is preserved on request (I5); text of tools and users never becomes a control token (I6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import orjson

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import frames
from toolroll.rollout.template.cut_frame import CutFrame, risky
from toolroll.rollout.template.derive import Derived, Deriver, Sampled, locate, mask_control, with_marks
from toolroll.rollout.template.encode import Encoder, Span
from toolroll.rollout.template.features import Features, History, Kind
from toolroll.rollout.template.heads import HeadCache
from toolroll.rollout.template.prompt_frames import PromptFrames
from toolroll.rollout.template.render import HeadHook, Renderer, is_due, plain_content
from toolroll.rollout.template.stops import find_stops
from toolroll.rollout.types import IdArray, Message, Tool

_FRAMES = 4096
"""How many frames are kept."""
WORTH_LEARNING = 4
"""Deltas: one is derived by one render or two, a frame learned and checked by a dozen."""
_TOOL_LISTS = 256
"""How many lists of tools are remembered."""

HistoryPolicy = Literal["fork", "preserve"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Ids to append with loss mask 0: the rest of the turn close, the new messages, the next generation prompt.

    `framed`: a learned frame made it; `check_due`: and it is to be derived anew under verify="sample" (a frame's first use, and a
    sample of the others). `preserved` says what the template would have rewritten where history was preserved on request. `rendered`:
    the whole conversation as the template renders it now, where it had to be rendered: given to the next delta, it saves a render.
    """

    input_ids: IdArray
    framed: bool = False
    check_due: bool = False
    preserved: str | None = None
    rendered: str | None = None


class ChatTemplate:
    """The chat template of `tokenizer` (a fast tokenizer of `transformers`), or `chat_template` (Jinja) in its place.

    `kwargs` are the template's own switches. `history`: what happens where the template rewrites tokens that were already
    served: "fork" raises `HistoryRewrittenError`, so that the caller begins a second training sequence; "preserve" goes on with
    the stream as it is, where the text of the new messages is defined. `now`: the time that a template sees which asks for it.
    `stop_token_ids`: further tokens that end a turn, besides those of the tokenizer and the template.
    Safe to share between episodes of one event loop. `check` and `check_prompt` may run in a thread beside it: they render and
    compare, and what they drop is learned again.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        history: HistoryPolicy = "fork",
        now: datetime | None = None,
        stop_token_ids: Sequence[int] = (),
        head_hook: HeadHook | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.history = history
        self.renderer = Renderer(tokenizer, chat_template=chat_template, kwargs=kwargs, now=now, head_hook=head_hook)
        self.encoder = encoder or Encoder(tokenizer)  # shared where it can be: it may hold a second copy of the vocabulary
        self.features = Features(self.renderer.source)
        stops = {*stop_token_ids, *find_stops(tokenizer, self.renderer, self.encoder)}
        self._stop_texts = {index: self.encoder.decode([index]) for index in sorted(stops)}
        self.deriver = Deriver(self.renderer, self.encoder, tuple(self._stop_texts.values()))
        self._frames: dict[Kind, CutFrame | None] = {}
        self._met: dict[Kind, int] = {}
        self._derived = 0
        self._prompt_frames = PromptFrames(self.features, partial(self.renderer.render, generate=True), is_due)
        self._framed = 0
        self._heads = HeadCache(self.encoder)
        self._plain_tools: dict[bytes, bool] = {}
        self._tool_keys: dict[bytes, bytes] = {}
        self._variants: dict[HeadHook, ChatTemplate] = {}

    def reformulated(self, hook: HeadHook) -> ChatTemplate:
        """As `with_head`, one for all who ask with the same `hook`: a function that outlives episodes, no method of one's agent."""
        if hook not in self._variants:
            self._variants[hook] = self.with_head(hook)
        return self._variants[hook]

    def with_head(self, hook: HeadHook) -> ChatTemplate:
        """The same template, with `hook` applied to the head of each render: system text and tools."""
        renderer = self.renderer
        return ChatTemplate(
            self.tokenizer,
            chat_template=renderer.chat_template,
            kwargs=renderer.kwargs,
            history=self.history,
            now=renderer.now,
            stop_token_ids=self.stop_token_ids,
            head_hook=hook,
            encoder=self.encoder,
        )

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """The same template with `kwargs` over its own switches."""
        renderer = self.renderer
        return ChatTemplate(
            self.tokenizer,
            chat_template=renderer.chat_template,
            kwargs={**renderer.kwargs, **kwargs},
            history=self.history,
            now=renderer.now,
            stop_token_ids=self.stop_token_ids,
            head_hook=renderer.head_hook,
            encoder=self.encoder,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant turn: the tokenizer's, and those that the template closes a turn with."""
        return tuple(self._stop_texts)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop_token_ids`."""
        return tuple(self._stop_texts.values())

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt itself opens a `<think>` that the model goes on from."""
        base: list[Message] = [{"role": "user", "content": "x"}]
        prompt = self.renderer.render(base, None, generate=True)
        return prompt.rfind("<think>") > prompt.rfind("</think>")

    # --- prompts -----------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """The ids of the whole conversation with the generation prompt. No BOS is added to what the template writes."""
        return self.encode_conversation(messages, tools, generate=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> IdArray:
        """The same as an array."""
        return self._heads.encode(*self.conversation(messages, tools, generate=True))

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, tools_key: bytes | None = None
    ) -> tuple[str, Delta]:
        """The same as text and ids, for a caller that has it checked: one of a known shape (the same tools, messages of the same
        kinds) costs no render. `tools_key`: `tools` as JSON, if the caller has it."""
        messages = [plain_content(message) for message in messages]
        key = orjson.dumps(tools) if tools_key is None else tools_key
        plain = self._hold_no_control(tools, key)
        framed = self._prompt_frames.fill(messages, key) if plain else None
        if framed is not None:
            text, bodies, due = framed
            return text, Delta(self._heads.encode(text, risky(self.encoder, text, bodies)), framed=True, check_due=due)
        text, spans = self.conversation(messages, tools, generate=True)
        if plain:
            self._prompt_frames.saw(messages, tools, key, text)
        return text, Delta(self._heads.encode(text, spans))

    def check_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None, input_ids: IdArray) -> str | None:
        """Render a first prompt anew and compare: None, or what disagrees; then no prompt is made without a render any more."""
        text, bodies = self.conversation(messages, tools, generate=True)
        if np.array_equal(self.encoder.encode(text, bodies), input_ids):
            return None
        self._prompt_frames.give_up()
        self._forget(text, bodies)
        return "prompt"

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool) -> list[int]:
        """The ids of the whole conversation, with or without the generation prompt."""
        return list(self._heads.encode(*self.conversation(messages, tools, generate=generate)).tolist())

    def fork_prompt(self, stream: IdArray, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """The ids of the conversation as the template wants it now, keeping those of `stream` as far as their text agrees.

        Only what the template rewrote is encoded anew: the cut is made at a control token, which no BPE merge crosses.
        """
        text, bodies = self.conversation(messages, tools, generate=True)
        kept = position = 0
        control = np.flatnonzero(np.isin(stream, list(self.encoder.control_ids)))
        for place in control:
            run = self.encoder.decode(stream[kept : place + 1])
            if not text.startswith(run, position):
                break
            kept, position = int(place) + 1, position + len(run)
        shifted = [(start - position, stop - position) for start, stop in bodies if stop > position]
        return [int(index) for index in stream[:kept]] + self.encoder.encode(text[position:], shifted)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool) -> tuple[str, Sequence[Span]]:
        """The render of the whole conversation, and the spans of it in which message bodies hold control-token text."""
        messages = [plain_content(message) for message in messages]
        text = self.renderer.render(messages, tools, generate=generate)
        shown = [] if self._hold_no_control(tools, orjson.dumps(tools)) else list(tools or ())
        masked, originals = mask_control({"messages": messages, "tools": shown}, self.encoder)
        if not originals:
            return text, ()
        rendered = self.renderer.render(masked["messages"], masked["tools"] or tools, generate=generate)
        return text, locate(rendered, originals, text)

    def _hold_no_control(self, tools: Sequence[Tool] | None, key: bytes) -> bool:
        """Whether no string in `tools` (`key` as JSON) has the text of a control token; searched once for each list of tools."""
        if key not in self._plain_tools:
            if len(self._plain_tools) >= _TOOL_LISTS:
                self._plain_tools.clear()
            self._plain_tools[key] = not mask_control(list(tools or ()), self.encoder)[1]
        return self._plain_tools[key]

    # --- deltas ------------------------------------------------------------------------------------------------------

    def delta(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        sampled_ids: Sequence[int] | IdArray,
        stop_token_ids: Sequence[int] | None = None,
        finish_reason: str = "stop",
    ) -> list[int]:
        """The ids to append after `messages` (its last one the assistant turn, sampled as `sampled_ids`) for `new`.

        Raises `HistoryRewrittenError` (fork) or `TemplateError` (the template refuses the conversation).
        """
        history = History(self.features)
        history.extend(messages)
        found = self.delta_after(
            history.key,
            messages,
            new,
            tools=tools,
            sampled=self.sampled(sampled_ids, finish_reason=finish_reason, stop_token_ids=stop_token_ids or ()),
            sampled_ids=sampled_ids,
        )
        return [int(index) for index in found.input_ids]

    def delta_after(
        self,
        history: Kind,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] | None,
        sampled: Sampled,
        sampled_ids: Sequence[int] | IdArray,
        tools_key: bytes | None = None,
        rendered: str | None = None,
    ) -> Delta:
        """As `delta`, for a caller that keeps the `History` of the conversation and the sampled text itself. `rendered`: the render
        of `messages` without the last one, with the generation prompt: the text of what was served, where it is known."""
        new = [plain_content(message) for message in new]
        turn = messages[-1]
        key = self._key(history, turn, new, tools, tools_key, sampled, sampled_ids)
        frame = self._frames.get(key) if key is not None else None
        if frame is not None:
            return Delta(frame.ids(turn, new), framed=True, check_due=self._check_is_due(frame))
        messages = [plain_content(message) for message in messages]
        if rendered is None:
            rendered = self.renderer.render(messages[:-1], tools, generate=True)
        derived = self._derive(messages, new, tools, sampled, rendered)
        if key is None or key in self._frames or derived.rewritten is not None or not self._comes_again(key):
            return Delta(self._by_words(derived), preserved=derived.rewritten, rendered=derived.whole)
        ids = self.encoder.encode(derived.text, derived.bodies)
        if len(self._frames) >= _FRAMES:
            self._frames.clear()
        self._frames[key] = self._learn(messages, new, tools, sampled, ids, rendered)
        return Delta(as_ids(ids), rendered=derived.whole)

    def sampled(
        self,
        ids: Sequence[int] | IdArray,
        *,
        finish_reason: str = "stop",
        stop_token_ids: Sequence[int] = (),
    ) -> Sampled:
        """The text of sampled ids, and the stop token that ends it, if it does."""
        text = self.encoder.decode(ids)
        given = tuple(map(self.encoder.text_of, stop_token_ids))
        if finish_reason == "stop" and len(ids):
            last = int(ids[-1])
            if last in self._stop_texts or last in stop_token_ids:
                return Sampled(text, self._stop_texts.get(last) or self.encoder.text_of(last), given)
        return Sampled(text, None, given)

    def check(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        sampled: Sampled,
        input_ids: Sequence[int] | IdArray,
    ) -> str | None:
        """Derive the delta anew, by renders of the whole conversation, and compare: None, or what disagrees.

        A disagreement drops every frame: from then on each signature is learned again.
        """
        try:
            plain = [plain_content(message) for message in messages]
            derived = self._derive(plain, [plain_content(message) for message in new], tools, sampled)
        except (HistoryRewrittenError, TemplateError) as error:
            self._frames.clear()
            return f"rewritten: {error.reason}" if isinstance(error, HistoryRewrittenError) else "refused"
        expected = self.encoder.encode(derived.text, derived.bodies)
        if list(expected) == list(as_list(input_ids)):
            return None
        self._forget(derived.text, derived.bodies)
        return "delta"

    # --- inside ------------------------------------------------------------------------------------------------------

    def _forget(self, text: str, bodies: Sequence[Span]) -> None:
        """Ids were served that the render `text` does not have: frames and heads are learned anew, and words are given up if it was
        they that made them."""
        self._frames.clear()
        if self.encoder.encode_known(text, bodies).tolist() != self.encoder.encode(text, bodies):
            self.encoder.give_up_words()
        self._heads = HeadCache(self.encoder)

    def _derive(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        sampled: Sampled,
        served: str | None = None,
    ) -> Derived:
        fork = self.history == "fork"
        derived = self.deriver.derive(messages, new, tools, sampled, served=served, fork=fork)
        if derived.rewritten is not None and fork:
            raise HistoryRewrittenError(derived.rewritten)
        return derived

    def _by_words(self, derived: Derived) -> IdArray:
        """The ids of derived text; now and then compared with the tokenizer's own, which are taken where they differ."""
        self._derived += 1
        ids = self.encoder.encode_known(derived.text, derived.bodies)
        if is_due(self._derived):
            expected = self.encoder.encode(derived.text, derived.bodies)
            if ids.tolist() != expected:
                self._forget(derived.text, derived.bodies)
                return as_ids(expected)
        return ids

    def _comes_again(self, key: Kind) -> bool:
        """Whether it is time to learn a frame for `key`. A local template has few shapes: at once. Under another, half of the shapes
        are never seen again: when those of `key` have cost as much by renders as the learning will."""
        if self.features.local:
            return True
        if len(self._met) >= 4 * _FRAMES:
            self._met.clear()
        self._met[key] = self._met.get(key, 0) + 1
        return self._met[key] >= WORTH_LEARNING

    def _key(
        self,
        history: Kind,
        turn: Message,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        tools_key: bytes | None,
        sampled: Sampled,
        sampled_ids: Sequence[int] | IdArray,
    ) -> Kind | None:
        if sampled.stop is None or not self.features.readable:
            return None
        signature = frames.signature(self.features, turn, new)
        if signature is None:
            return None
        tools_key = self._one_of_equal(orjson.dumps(tools) if tools_key is None else tools_key)
        control = tuple(sorted(self.encoder.control_ids.intersection(as_list(sampled_ids))))
        return (history, signature, tools_key, sampled.stop, control)

    def _one_of_equal(self, tools_key: bytes) -> bytes:
        """The same bytes for all who ask with equal ones: each conversation has its own, and keys are kept."""
        if len(self._tool_keys) >= _TOOL_LISTS:
            self._tool_keys.clear()
        return self._tool_keys.setdefault(tools_key, tools_key)

    def _check_is_due(self, frame: CutFrame) -> bool:
        """Of one frame's deltas the first; of all the template's framed deltas the 1st, 2nd, 4th ... 128th, then one in 256, whichever
        episodes they belong to."""
        self._framed += 1
        frame.uses += 1
        return frame.uses == 1 or is_due(self._framed)

    def _learn(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        sampled: Sampled,
        ids: Sequence[int],
        served: str,
    ) -> CutFrame | None:
        as_text = self.renderer.argument_form == "text"
        texts = []
        try:
            for edge in frames.EDGES:
                turn, masked = frames.with_nonces(messages[-1], new, edge)
                probed = [*messages[:-1], turn]
                texts.append(self.deriver.derive(probed, masked, tools, sampled, served=served, by_nonce=True).text)
            turn, masked = frames.with_nonces(messages[-1], new, frames.EDGES[0])
            said_otherwise = with_marks([*messages[:-1], turn], text=as_text)
            if self.deriver.derive(said_otherwise, masked, tools, sampled, by_nonce=True).text != texts[0]:
                return None  # the template repeats what was said before
        except (HistoryRewrittenError, TemplateError):
            return None
        frame = frames.learn(texts, messages[-1], new)
        if frame is None:
            return None
        tried = (CutFrame(frame, self.encoder, whole=whole) for whole in (False, True))
        return next((cut for cut in tried if cut.ids(messages[-1], new).tolist() == ids), None)


def as_list(ids: Sequence[int] | IdArray) -> Sequence[int]:
    """`ids` as plain integers."""
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def as_ids(ids: Sequence[int]) -> IdArray:
    """`ids` as int32."""
    return np.array(ids, dtype=np.int32)
