"""One chat template, rendered: messages and tools in, text out.

Invariants: the text is exactly what `tokenizer.apply_chat_template(tokenize=False)` gives for the same messages, and where it is made
in a quicker way, the two are compared again and again; one clock reading per `Renderer`, so that a template with the date in it
renders the same prompt all session long; the form in which the template wants tool arguments (dict, or JSON text as DeepSeek-V3
does) is learned once, by trying.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

import jinja2
import orjson

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.sandbox import quick
from toolroll.rollout.types import Message, Tool

logger = logging.getLogger(__name__)

HeadHook = Callable[[str], str]
ArgumentForm = Literal["dict", "text"]

_CHECK_EVERY = 256  # a check costs as much as what is checked, many times over
# What a template or its sandbox may raise for messages that it does not take.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class Renderer:
    """Renders conversations with `tokenizer`'s chat template, or with `chat_template` in its place.

    `kwargs` are the template's own switches (`enable_thinking` ...). `now` is the time that a template sees which asks for
    it with `strftime_now`; default: the time of construction. `head_hook` rewrites the head of each render: the leading system
    messages and the tools, which the template's author and the developer wrote, never a user's or a tool's text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        head_hook: HeadHook | None = None,
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise TemplateError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: give one with chat_template=..., "
                "or take the tokenizer of an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.kwargs = dict(kwargs or {})
        self.now = now or datetime.now()
        self.head_hook = head_hook
        self.argument_form: ArgumentForm | None = None
        self._heads: dict[str, tuple[str, str]] = {}
        self._variables = {"strftime_now": self.now.strftime, **self.kwargs}
        self._may_be_quick = as_it_comes(tokenizer, self._variables)
        self._quick_renders = 0
        self._compiled: dict[str, jinja2.Template | None] = {}

    @property
    def source(self) -> str:
        """The template's Jinja text (of the variant for tools, where the tokenizer has several)."""
        return str(self.tokenizer.get_chat_template(self.chat_template, tools=[{}]))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool) -> str:
        """The conversation's text; with `generate`, the generation prompt at its end.

        Raises `TemplateError` with the template's own words where it refuses the messages.
        """
        # A form that was learned from a turn whose calls the template left out can still turn out to be the wrong one.
        forms: tuple[ArgumentForm, ...] = ("text", "dict") if self.argument_form == "text" else ("dict", "text")
        failure: Exception | None = None
        for form in forms:
            try:
                text = self._render(arguments_as(messages, form), tools, generate=generate)
            except _RENDER_ERRORS as error:
                failure = failure or error
                continue
            if any(message.get("tool_calls") for message in messages):
                self.argument_form = form
            return self._with_head(text, messages, tools)
        roles = " ".join(str(message.get("role")) for message in messages[-8:])
        raise TemplateError(
            f"the chat template refuses this conversation of {len(messages)} messages (the last roles: {roles}): {failure}"
        ) from failure

    def _with_head(self, text: str, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        if self.head_hook is None:
            return text
        lead = list(itertools.takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
        key = repr((lead, tools))
        if key not in self._heads:
            try:
                head = self._render(lead, tools, generate=False)
            except _RENDER_ERRORS:  # a template that asks for a user message has no head of its own
                head = ""
            self._heads = {key: (head, self.head_hook(head))}
        head, hooked = self._heads[key]
        return hooked + text[len(head) :] if text.startswith(head) else text

    def _render(self, messages: list[Message], tools: Sequence[Tool] | None, *, generate: bool) -> str:
        offered = list(tools) if tools else None
        quick = self._quickly(messages, offered, generate=generate)
        if quick is not None:
            self._quick_renders += 1
            if not is_due(self._quick_renders):
                return quick
        text = str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=offered,
                chat_template=self.chat_template,
                add_generation_prompt=generate,
                tokenize=False,
                **self._variables,
            )
        )
        if quick is not None and quick != text:
            logger.warning("the chat template renders otherwise in the quick sandbox: from here on it is rendered by transformers")
            self._may_be_quick = False
        return text

    def _quickly(self, messages: list[Message], tools: list[Tool] | None, *, generate: bool) -> str | None:
        """The render in the quick sandbox; None where `transformers` must be asked, for the text or for the error."""
        if not self._may_be_quick or not messages:
            return None
        source = self.tokenizer.get_chat_template(self.chat_template, tools)
        if source not in self._compiled:
            self._compiled[source] = compiled(source)
        template = self._compiled[source]
        if template is None:
            return None
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generate,
                **{**self.tokenizer.special_tokens_map, **self._variables},
            )
        except _RENDER_ERRORS:
            return None


@lru_cache(64)
def compiled(source: str) -> jinja2.Template | None:
    """The template as `transformers` compiles it, in the quick sandbox; None where it cannot be told how it does."""
    from transformers.utils import chat_template_utils

    compile_ = getattr(chat_template_utils, "_compile_jinja_template", None)
    try:
        return quick(compile_(source), source) if compile_ is not None else None
    except jinja2.TemplateError:
        return None


def as_it_comes(tokenizer: Any, variables: Mapping[str, Any]) -> bool:
    """Whether `tokenizer` renders templates as `transformers` does, with `variables` for the template alone: some tokenizers bring
    another `apply_chat_template`, and some names are arguments of it."""
    from transformers import PreTrainedTokenizerBase

    theirs = PreTrainedTokenizerBase.apply_chat_template
    arguments = inspect.signature(theirs).parameters
    own = getattr(getattr(tokenizer, "apply_chat_template", None), "__func__", None)  # a tokenizer may have been given one of its own
    return own is theirs and not set(variables) & set(arguments)


def is_due(count: int) -> bool:
    """Whether what is done for the `count`th time is checked: the 1st, 2nd, 4th ... 128th, then one in 256."""
    return count % _CHECK_EVERY == 0 or (count < _CHECK_EVERY and count & (count - 1) == 0)


def arguments_as(messages: Sequence[Message], form: ArgumentForm) -> list[Message]:
    """`messages` with the arguments of all tool calls as dicts or as JSON text; what cannot be read stands as `{}`."""
    return [_with_arguments(message, form) if message.get("tool_calls") else message for message in messages]


def _with_arguments(message: Message, form: ArgumentForm) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if form == "text" and not isinstance(arguments, str):
            function["arguments"] = orjson.dumps(arguments or {}).decode()
        elif form == "dict" and not isinstance(arguments, Mapping):
            function["arguments"] = read_arguments(arguments)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Tool arguments as an object: JSON text decoded; `{}` for what is not an object (a malformed call kept in history)."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def plain_content(message: Message) -> Message:
    """`message` with a content of text parts joined to one string; other parts are refused with the field named."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise TemplateError(f"messages[].content must be text or a list of text parts, not {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"messages[].content[{index}] is a part of type {kind!r}: only text parts can be rendered")
        texts.append(str(part["text"]))
    return {**message, "content": "".join(texts)}
