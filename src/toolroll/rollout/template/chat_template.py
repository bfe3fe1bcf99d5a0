"""`ChatTemplate`: exact prompts and exact deltas for one tokenizer and its chat template.

Invariants: a delta is the text that the template itself appends, found by `derive` from renders of
the conversation; a template that rewrites history raises `HistoryRewrittenError` unless history is
preserved on request (I5); text of tools and users never becomes a control token (I6). Nothing here
predicts a render: what is cached is in `encode`, and is a cache of a pure function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np

from toolroll.parsers.reasoning import THINK, Tags
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template.bodies import BodyMasker
from toolroll.rollout.template.delta import DeltaRenderer, Sampled
from toolroll.rollout.template.encode import Encoder, Span, as_ids
from toolroll.rollout.template.render import HeadHook, Renderer, plain_content
from toolroll.rollout.template.stop_tokens import find_stops
from toolroll.rollout.template.verify import Verifier
from toolroll.rollout.types import IdArray, Message, Tool

HistoryPolicy = Literal["fork", "preserve"]


@dataclass(frozen=True, slots=True)
class Delta:
    """Ids to append with loss mask 0: the rest of the text that closes the turn, the new messages,
    the next generation prompt.

    `preserved` says what the template would have rewritten, if history is preserved on request.
    `rendered` is the whole conversation as the template renders it now, generation prompt included:
    what the next turn is sampled after.
    """

    input_ids: IdArray
    preserved: str | None = None
    rendered: str = ""


class ChatTemplate:
    """The chat template of `tokenizer`, a fast tokenizer of `transformers`.

    Example::

        template = ChatTemplate(AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"))
        prompt = template.prompt(messages, tools)
        # ... the engine samples `output_ids` from `prompt`; `turn` is their message
        delta = template.delta([*messages, turn], results, tools=tools, sampled_ids=output_ids)
        # the next prompt is exactly prompt + output_ids + delta

    Args:
        tokenizer: Renders the template and encodes text.
        chat_template: Jinja text that replaces the tokenizer's own template.
        kwargs: The template's own switches (`enable_thinking`, ...).
        history: What happens if the template rewrites tokens that were already served. "fork"
            raises `HistoryRewrittenError`, so that the caller starts a second training sequence.
            "preserve" continues the sequence as it is, if the text of the new messages is defined.
        now: The time for a template that asks for it. Default: now.
        stop_token_ids: Tokens that end a turn, in addition to those of the tokenizer and the
            template.
        head_hook: Rewrites the head of each render: system text and tools.

    Raises `TemplateError` if there is no chat template, or if the tokenizer is of a kind whose text
    cannot be encoded exactly (see `Encoder`). Safe to share between the episodes of one event loop.
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
        self.history: HistoryPolicy = history
        self.renderer = Renderer(
            tokenizer, chat_template=chat_template, kwargs=kwargs, now=now, head_hook=head_hook
        )
        self.encoder = encoder or Encoder(tokenizer)  # shared by variants: its cache is worth it
        self._bodies = BodyMasker(self.encoder, self.renderer.source)
        stops = {*stop_token_ids, *find_stops(tokenizer, self.renderer, self.encoder)}
        self._stop_texts = {index: self.encoder.decode([index]) for index in sorted(stops)}
        self.deriver = DeltaRenderer(self.renderer, self.encoder, tuple(self._stop_texts.values()))
        self._variants: dict[HeadHook, ChatTemplate] = {}

    def reformulated(self, hook: HeadHook) -> ChatTemplate:
        """Return `with_head(hook)`, cached. `hook` must outlive episodes: a function, not a
        bound method.
        """
        if hook not in self._variants:
            self._variants[hook] = self.with_head(hook)
        return self._variants[hook]

    def with_head(self, hook: HeadHook) -> ChatTemplate:
        """Return the same template with `hook` applied to the head of each render: system text
        and tools.
        """
        return self._variant(self.renderer.kwargs, hook)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with `kwargs` over its own switches."""
        return self._variant({**self.renderer.kwargs, **kwargs}, self.renderer.head_hook)

    def _variant(self, kwargs: Mapping[str, Any], hook: HeadHook | None) -> ChatTemplate:
        return ChatTemplate(
            self.tokenizer,
            chat_template=self.renderer.chat_template,
            kwargs=kwargs,
            history=self.history,
            now=self.renderer.now,
            stop_token_ids=self.stop_token_ids,
            head_hook=hook,
            encoder=self.encoder,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant turn: the tokenizer's, and those that the template
        closes a turn with.
        """
        return tuple(self._stop_texts)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop_token_ids`."""
        return tuple(self._stop_texts.values())

    def opens_reasoning(self, reasoning: Tags = THINK) -> bool:
        """Return True if the generation prompt itself opens the reasoning that the model
        continues.
        """
        prompt = self._generation_prompt
        pairs = ((reasoning.open, reasoning.close), *reasoning.others)
        return any(prompt.rfind(start) > prompt.rfind(end) for start, end in pairs)

    @cached_property
    def _generation_prompt(self) -> str:
        base: list[Message] = [{"role": "user", "content": "x"}]
        return self.renderer.render(base, None, generate=True)

    @cached_property
    def verifier(self) -> Verifier:
        """What checks finished sequences without this class: with `transformers` and the
        tokenizer alone.
        """
        renderer = self.renderer
        return Verifier(
            self.tokenizer,
            chat_template=renderer.chat_template,
            kwargs=renderer.kwargs,
            now=renderer.now,
            head_hook=renderer.head_hook,
        )

    # --- prompts ----------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Return the ids of the conversation with the generation prompt.

        No BOS is added to what the template writes. Raises `TemplateError` if the template refuses
        the conversation.
        """
        return self.encode_conversation(messages, tools, generate=True)

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, IdArray]:
        """Return the same as text and ids."""
        text, bodies = self.conversation(messages, tools, generate=True)
        return text, as_ids(self.encoder.encode(text, bodies))

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool
    ) -> list[int]:
        """Return the ids of the conversation, with or without the generation prompt."""
        return self.encoder.encode(*self.conversation(messages, tools, generate=generate))

    def fork_prompt(
        self, stream: IdArray, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the ids of the conversation as the template wants it now.

        Those of `stream` are kept as far as their text agrees; only what the template rewrote is
        encoded again. The cut is after a control token, which no merge crosses.
        """
        text, bodies = self.conversation(messages, tools, generate=True)
        kept = position = 0
        for place in np.flatnonzero(np.isin(stream, list(self.encoder.control_ids))):
            run = self.encoder.decode(stream[kept : place + 1])
            end = position + len(run)
            if not text.startswith(run, position) or any(at < end <= stop for at, stop in bodies):
                break
            kept, position = int(place) + 1, end
        shifted = _from(bodies, position)
        previous = int(stream[kept - 1]) if kept else None
        rest = self.encoder.encode(text[position:], shifted, previous=previous)
        return [*stream[:kept].tolist(), *rest]

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool
    ) -> tuple[str, Sequence[Span]]:
        """Return the render of the conversation, and its spans that are control-token text of a
        message.
        """
        text = self.renderer.render(messages, tools, generate=generate)
        given = [self.renderer.with_content(message) for message in messages]
        masked, masked_tools, originals = self._bodies.mask(given, tools)
        if not originals:
            return text, ()
        shown = self.renderer.render(masked, masked_tools or tools, generate=generate)
        return text, self._bodies.locate(shown, originals, text)

    # --- deltas -----------------------------------------------------------------------------------

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
        """Return the ids to append after `messages` for the messages `new`.

        The last one of `messages` is the assistant turn that was sampled as `sampled_ids`.

        Raises `HistoryRewrittenError` if the template rewrites what was served (history="fork"),
        and `TemplateError` if it refuses the conversation.
        """
        sampled = self.sampled(
            sampled_ids, finish_reason=finish_reason, stop_token_ids=stop_token_ids or ()
        )
        found = self.delta_after(
            messages, new, tools=tools, sampled=sampled, sampled_ids=sampled_ids
        )
        return list(found.input_ids.tolist())

    def delta_after(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool] | None,
        sampled: Sampled,
        sampled_ids: Sequence[int] | IdArray,
        served: str | None = None,
    ) -> Delta:
        """As `delta`, for a caller that has the sampled text.

        `served` is the text that the turn was sampled after (`Delta.rendered` of the turn before,
        or the text of `first_prompt`), if the caller has it.
        """
        messages = [*messages[:-1], *map(plain_content, messages[-1:])]
        fork = self.history == "fork"
        derived = self.deriver.derive(messages, new, tools, sampled, served=served, fork=fork)
        if derived.rewritten is not None and fork:
            raise HistoryRewrittenError(derived.rewritten)
        bodies: Sequence[Span] = ()
        appended = derived.text.lower()
        given = [self.renderer.with_content(message) for message in (*messages, *new)]
        if any(text in appended for text in self._bodies.spelled_in(given, tools)):
            # Also text of earlier messages: a template may repeat it.
            masked, masked_tools, originals = self._bodies.mask(given, tools)
            shown = self.renderer.render(masked, masked_tools or tools, generate=True)
            spans = self._bodies.locate(shown, originals, derived.whole)
            bodies = _from(spans, derived.cut)
        if len(sampled_ids):
            previous: int | None = int(sampled_ids[-1])
        else:  # nothing was sampled: the delta follows the prompt
            previous = self.encoder.ending_id(
                served or self.renderer.render(messages[:-1], tools, generate=True)
            )
        ids = self.encoder.encode(derived.text, bodies, previous=previous)
        return Delta(as_ids(ids), derived.rewritten, derived.whole)

    def sampled(
        self,
        ids: Sequence[int] | IdArray,
        *,
        finish_reason: str = "stop",
        stop_token_ids: Sequence[int] = (),
    ) -> Sampled:
        """Return the text of sampled ids, and the stop token that ends it, if one does."""
        text = self.encoder.decode(ids)
        given = tuple(map(self.encoder.text_of, stop_token_ids))
        if finish_reason == "stop" and len(ids):
            last = int(ids[-1])
            if last in self._stop_texts or last in stop_token_ids:
                stop = self._stop_texts.get(last) or self.encoder.text_of(last)
                return Sampled(text, stop, given)
        return Sampled(text, None, given)


def _from(spans: Sequence[Span], start: int) -> list[Span]:
    """Return the spans that begin at `start` or later, counted from there."""
    return [(begin - start, end - start) for begin, end in spans if begin >= start]
