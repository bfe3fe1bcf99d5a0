"""`ChatTemplate`: exact prompts and exact deltas for one tokenizer and its chat template.

Invariants (I5 and I6: docs/guarantees.md):

- A delta is the text that the template itself renders after a sampled turn, up to the next one.
  `DeltaRenderer` derives it from renders of the conversation.
- If the template rewrites history, `HistoryRewrittenError` is raised, unless the caller asked to
  preserve history (I5).
- Text from tools and users never becomes a control token (I6).
- Rendered text always comes from the template. Each cursor keeps one render: the text of its own
  prompt. `encode` caches only the results of a pure function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, get_args

import orjson

from toolroll.parsers.types import Span
from toolroll.rollout.errors import UsageError
from toolroll.rollout.template.applier import ChatFunction
from toolroll.rollout.template.bodies import BodyMasker
from toolroll.rollout.template.cursor import Cursor, TemplateParts
from toolroll.rollout.template.delta import DeltaRenderer, SampledText
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.images import ImageTokens
from toolroll.rollout.template.render import HeadHook, Renderer
from toolroll.rollout.template.snapshot import SharedTools
from toolroll.rollout.template.stop_tokens import find_stops, find_words
from toolroll.rollout.template.verify import Verifier
from toolroll.rollout.types import IdArray, Message, Tool

HistoryPolicy = Literal["fork", "scaffold", "preserve"]


class ChatTemplate:
    """The chat template of `tokenizer`, a fast tokenizer of `transformers`.

    Example::

        template = ChatTemplate(AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"))
        cursor = template.start(messages, tools)
        prompt = cursor.prompt()
        # ... the engine samples `output_ids` from `prompt`; `turn` is their message
        delta, cursor = cursor.after(template.sampled(output_ids), [turn, *results])
        # the next prompt is exactly prompt + output_ids + delta

    Args:
        tokenizer: Renders the template and encodes text.
        chat_template: Jinja text that replaces the tokenizer's own template, or a function that
            renders in its place: `function(messages, *, tools, add_generation_prompt, **kwargs)`
            returns the text. By default, a tokenizer's own `apply_chat_template` is such a
            function.
        kwargs: The template's own switches (`enable_thinking`, ...).
        history: What happens if the template rewrites tokens of earlier prompts or turns. "fork"
            raises `HistoryRewrittenError`, so that the caller starts a second training sequence.
            "scaffold" does the same, unless the template only removes empty elements that its
            generation prompt wrote before sampled turns, such as a `<think>` block.
            "preserve" keeps these tokens and appends the new messages, if their text can be
            determined.
        now: The time that a template gets from `strftime_now`. Default: the time of construction.
        stop_token_ids: Tokens that end a turn, in addition to the tokenizer's and the template's.
        head_hook: Rewrites the head of each render: the leading system messages and the tools.
        encoder: An `Encoder` for the same tokenizer and template, to share its cache. Default: a
            new one.
        images: Counts the tokens of images. Default: messages must not contain images.

    Raises `TemplateError` if there is neither a chat template nor code that renders, or if the
    tokenizer cannot encode text exactly (see `Encoder`). Safe to share between the episodes of one
    event loop.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | ChatFunction | None = None,
        kwargs: Mapping[str, Any] | None = None,
        history: HistoryPolicy = "fork",
        now: datetime | None = None,
        stop_token_ids: Sequence[int] = (),
        head_hook: HeadHook | None = None,
        encoder: Encoder | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        if history not in get_args(HistoryPolicy):
            policies = ", ".join(get_args(HistoryPolicy))
            raise UsageError(f"history must be one of {policies}, not {history!r}")
        self.tokenizer = tokenizer
        self.images = images
        self.history: HistoryPolicy = history
        self.renderer = Renderer(
            tokenizer, chat_template=chat_template, kwargs=kwargs, now=now, head_hook=head_hook
        )
        self.renderer.images = images is not None
        # variants share its cache
        self.encoder = encoder or Encoder(tokenizer, words=find_words(tokenizer, self.renderer))
        stops = {*stop_token_ids, *find_stops(tokenizer, self.renderer, self.encoder)}
        self._stop_texts = {index: self.encoder.decode([index]) for index in sorted(stops)}
        self.parts = TemplateParts(
            self.renderer,
            self.encoder,
            DeltaRenderer(self.renderer, self.encoder, tuple(self._stop_texts.values())),
            BodyMasker(self.encoder, self.renderer.source),
            fork=history != "preserve",
            keep_scaffold=history == "scaffold",
        )
        self._variants: dict[HeadHook, ChatTemplate] = {}

    def reformulated(self, hook: HeadHook) -> ChatTemplate:
        """Return the same template, with `hook` applied to the head of each render: the leading
        system messages and the tools. The result is cached by `hook`. Pass a module-level function,
        because each bound method would add an entry to the cache.
        """
        if hook not in self._variants:
            self._variants[hook] = self.variant(head_hook=hook)
        return self._variants[hook]

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with `kwargs` added to its switches."""
        return self.variant(kwargs={**self.renderer.kwargs, **kwargs})

    def variant(self, **changes: Any) -> ChatTemplate:
        """Return the same template with some of the constructor's arguments changed."""
        arguments = {
            "chat_template": self.renderer.chat_template,
            "kwargs": self.renderer.kwargs,
            "history": self.history,
            "now": self.renderer.now,
            "stop_token_ids": self.stop_token_ids,
            "head_hook": self.renderer.head_hook,
            "encoder": self.encoder,
            "images": self.images,
        }
        return ChatTemplate(self.tokenizer, **{**arguments, **changes})

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant turn: those given at construction, the tokenizer's, and
        those that close a turn in the template.
        """
        return tuple(self._stop_texts)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop_token_ids`."""
        return tuple(self._stop_texts.values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the template's text, its switches and the tokenizer."""
        tokenizer, renderer = self.tokenizer, self.renderer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        sample = "Zürich 東京 3.14\n\n\tx = {'a': 1}"
        seen = [
            renderer.source,
            {str(key): repr(value) for key, value in renderer.kwargs.items()},
            type(tokenizer).__name__,
            len(tokenizer),
            sorted(tokenizer.get_added_vocab().items()),
            tokenizer.encode(sample),
            sorted(self.stop_token_ids),
            # what it does to text before it splits it
            [repr(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer")],
            renderer.head_hook is not None and renderer.head_hook("head"),
        ]
        return hashlib.sha256(orjson.dumps(seen)).hexdigest()[:16]

    @cached_property
    def verifier(self) -> Verifier:
        """A `Verifier`. It checks finished sequences with only `transformers` and the tokenizer."""
        renderer = self.renderer
        return Verifier(
            self.tokenizer,
            chat_template=renderer.template,
            kwargs=renderer.kwargs,
            now=renderer.now,
            head_hook=renderer.head_hook,
            keep_scaffold=self.history == "scaffold",
            images=self.images,
        )

    # --- prompts ----------------------------------------------------------------------------------

    def start(
        self, messages: Sequence[Message], tools: Sequence[Tool] | SharedTools | None = None
    ) -> Cursor:
        """Return a cursor for a conversation that waits for the model's turn.

        The conversation is not rendered yet: `Cursor.prompt` renders it and returns its ids.
        """
        prepared = self.renderer.prepare(messages)
        head = self.renderer.head(prepared, tools)
        head = replace(head, texts=head.texts.with_arguments(prepared))
        spelled = self.parts.bodies.spelled(prepared, head.shared_tools)
        return Cursor(self.parts, prepared, head, spelled)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Return the ids of the conversation with the generation prompt.

        No BOS token is added to what the template writes. An image has one placeholder token.
        Raises `TemplateError` if the template refuses the conversation.
        """
        return self.encode_conversation(messages, tools, generate=True)

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool
    ) -> list[int]:
        """Return the ids of the conversation, with or without the generation prompt."""
        return self.encoder.encode(*self.conversation(messages, tools, generate=generate))

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool
    ) -> tuple[str, Sequence[Span]]:
        """Return the render of the conversation, and its body spans.

        The text of a body span comes from a message or a tool, and spells a control token.
        """
        prepared = self.renderer.prepare(messages)
        head = self.renderer.head(prepared, tools)
        text = self.renderer.render_prepared(prepared, head, generate=generate)
        spelled = self.parts.bodies.spelled(prepared, head.shared_tools)
        return text, self.parts.body_spans(text, prepared, head, spelled, generate=generate)

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
        """Return the ids to append for the messages `new`, which follow `messages`.

        Args:
            messages: The conversation. The last message is the assistant turn.
            new: The messages that follow the assistant turn.
            tools: The tools of the conversation.
            sampled_ids: The ids of the assistant turn, as the engine sampled them.
            stop_token_ids: The request's stop tokens, in addition to the template's.
            finish_reason: The engine's finish reason. Only "stop" means that the last id may be a
                stop token.

        Raises `HistoryRewrittenError` if the template rewrites the prompt or the sampled turn. With
        history="preserve", it is raised only if the ids to append cannot be determined. Raises
        `TemplateError` if the template refuses the conversation.
        """
        sampled = self.sampled(
            sampled_ids, finish_reason=finish_reason, stop_token_ids=stop_token_ids or ()
        )
        ids, _ = self.start(messages[:-1], tools).after(sampled, [*messages[-1:], *new])
        return list(ids.tolist())

    def sampled(
        self,
        ids: Sequence[int] | IdArray,
        *,
        finish_reason: str = "stop",
        stop_token_ids: Sequence[int] = (),
    ) -> SampledText:
        """Return the text of sampled ids, and the stop token at its end if there is one.

        `finish_reason` is the engine's. If it is not "stop", the turn has no stop token, even if
        its last id is one. `stop_token_ids` are stop tokens of this request, in addition to the
        template's.
        """
        text = self.encoder.decode(ids)
        requested = tuple(map(self.encoder.text_of, stop_token_ids))
        last = int(ids[-1]) if len(ids) else None
        if finish_reason != "stop" or last is None:
            return SampledText(text, None, requested, last)
        stop_text = self.encoder.text_of(last) if last in stop_token_ids else None
        return SampledText(text, self._stop_texts.get(last) or stop_text, requested, last)
