"""Render messages and tools with one chat template.

Invariants:

- The text is the same as from `tokenizer.apply_chat_template(tokenize=False)` in the installed
    `transformers`. The code of `transformers` prepares the messages, the tools and the variables.
    The compilation of the template is replaced (`sandbox.py`), and what copies all messages and
    tools in each render is done once (`PASSES`). Code that renders in place of a template (a
    Python function, or a tokenizer's own `apply_chat_template`) is called as it is.
- Each `Renderer` reads the clock once, so that a template with the date renders the same prompt for
  the whole session.
- The input forms that the template accepts (tool arguments as a dict or as JSON text, text parts or
  one string, the field of the reasoning) are detected with fixed conversations, never with an
  episode's messages.
- Rendered text has no surrogates: they are replaced before rendering.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Literal

import jinja2

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.media import IMAGE_PARTS
from toolroll.rollout.runtime.unicode import replace_surrogates
from toolroll.rollout.template.applier import (
    PASSES,
    PLAIN,
    ChatFunction,
    applier,
    function_of,
    through,
)
from toolroll.rollout.template.snapshot import JsonTexts, SharedTools, json_texts, snapshot
from toolroll.rollout.types import Message, Tool

HeadHook = Callable[[str], str]
ArgumentForm = Literal["dict", "text"]

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template or its sandbox may raise for messages that it refuses."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_FIRST, _SECOND = "Pq1zP", "Pq2zP"
"""Sentinels made of ASCII letters and digits, which no template strips, escapes or splits."""
USER: Message = {"role": "user", "content": "x"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
        },
    },
}


@dataclass(frozen=True, slots=True)
class Head:
    """The part that all renders of one conversation share: its leading system messages and its
    tools.

    `text` is the render of this part, and `rewritten` is the result of `head_hook` for `text`.
    Without a hook, `text` and `rewritten` are empty. `texts` holds the JSON texts of the
    conversation's messages.
    """

    shared_tools: SharedTools
    text: str = ""
    rewritten: str = ""
    texts: JsonTexts = field(default_factory=JsonTexts, compare=False)

    @property
    def tools(self) -> list[Tool] | None:
        """The tools, or None if there are none."""
        return self.shared_tools.tools or None


class Renderer:
    """Renders conversations with `chat_template`, which is Jinja text or a `ChatFunction`, or with
    the tokenizer's own chat template or `apply_chat_template`.

    `kwargs` are the template's own switches (`enable_thinking` ...). `now` is the time that
    `strftime_now` returns in the template (default: the time of construction). Code that renders
    reads the clock itself. `head_hook` rewrites the head of each render: the leading system
    messages and the tools. It never sees a user message or a tool result.
    """

    images = False
    """Whether messages may contain images."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | ChatFunction | None = None,
        kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        head_hook: HeadHook | None = None,
    ) -> None:
        self.function = function_of(tokenizer, chat_template)
        """The code that renders in place of a template, or None."""
        self.template = self.function or chat_template
        """What `Verifier` and `infer_parser` take as the template."""
        has_text = not callable(chat_template) and (chat_template or tokenizer.chat_template)
        code: Any = chat_template or tokenizer.apply_chat_template
        self.code: ChatFunction | None = None if has_text else code
        """The code as the caller gave it (`function` wraps it), or None if there is Jinja text."""
        if not (has_text or self.function):
            raise TemplateError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: give one with "
                "chat_template=..., or use the tokenizer of an instruction-tuned model. For a "
                "model that renders in code, give a Python function as chat_template "
                "(FILE.py:NAME), or load its tokenizer class, which must have its own "
                "apply_chat_template, with trust_remote_code"
            )
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.kwargs = dict(kwargs or {})
        self.now = now or datetime.now()
        self.head_hook = head_hook
        variables = snapshot(replace_surrogates(self.kwargs))
        self._variables = variables if self.function else through(variables, PLAIN)
        self._apply = self.function or applier(tokenizer, self.now)
        self._fixed = {} if self.function else {"tokenize": False, "chat_template": chat_template}
        self._takes_parts: dict[str, bool] = {}
        self._thinking: dict[tuple[bool, bool], str | None] = {}
        self.argument_form: ArgumentForm | None = self._find_argument_form()
        """The form in which the template takes a call's arguments, or None if it does not render
        them.
        """

    @property
    def source(self) -> str:
        """The Jinja text of the template. If the template has several variants, this is the one for
        tools. If there is none, the text of `code`.
        """
        if self.code is None:
            return str(self.tokenizer.get_chat_template(self.chat_template, tools=[{}]))
        try:
            return inspect.getsource(self.code)
        except (OSError, TypeError):  # no file has it
            return repr(self.code)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generate: bool
    ) -> str:
        """Return the text of the conversation. If `generate` is True, the text ends with the
        generation prompt.

        Raises `TemplateError` with the template's own message if the template refuses the
        conversation.
        """
        prepared = self.prepare(messages)
        return self.render_prepared(prepared, self.head(prepared, tools), generate=generate)

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Return a snapshot of `messages` without surrogates, and with contents, arguments and
        reasoning in the form that the template accepts.

        Messages that are already prepared are only copied.
        """
        form = self.argument_form or "dict"
        prepared = [
            snapshot(
                replace_surrogates(
                    self._with_reasoning(_with_arguments(self.with_content(message), form))
                )
            )
            for message in messages
        ]
        return prepared if self.function else through(prepared, PASSES)

    def head(self, prepared: Sequence[Message], tools: Sequence[Tool] | SharedTools | None) -> Head:
        """Return the head of a conversation that starts with `prepared`."""
        shared_tools = SharedTools.of(tools or [])
        if not (shared_tools.plain or self.function):
            shared_tools = SharedTools(through(shared_tools.tools, PLAIN), JsonTexts())
        if self.head_hook is None:
            return Head(shared_tools)
        try:
            lead = list(itertools.takewhile(_is_lead, prepared))
            text = self._render(lead, shared_tools.tools or None, generate=False)
        except TemplateError:  # the template requires a user message: no head
            text = ""
        rewritten = self.head_hook(text)
        # Episodes with equal heads share their texts.
        return Head(shared_tools, _equal_text(text), _equal_text(rewritten))

    def render_prepared(self, prepared: Sequence[Message], head: Head, *, generate: bool) -> str:
        """Return the text of messages from `prepare`. `head` is their conversation's head."""
        with json_texts(head.shared_tools.texts, head.texts):
            text = self._render(list(prepared), head.tools, generate=generate)
        own_head = text.startswith(head.text)
        return head.rewritten + text[len(head.text) :] if own_head else text

    def _render(self, messages: list[Message], tools: list[Tool] | None, *, generate: bool) -> str:
        try:
            options = {"tools": tools, "add_generation_prompt": generate, **self._fixed}
            text = self._apply(messages, **options, **self._variables)
        except _RENDER_ERRORS as error:
            roles = " ".join(str(message.get("role")) for message in messages[-8:])
            raise TemplateError(
                f"the chat template refuses this conversation of {len(messages)} messages "
                f"(the last roles: {roles}): {str(error) or type(error).__name__}"
            ) from error
        return str(text)

    # --- what the template takes -----------------------------------------------------------------

    def shows(self, messages: list[Message], tools: list[Tool] | None, *texts: str) -> str | None:
        """Return the render of `messages` if it contains all of `texts`, else None."""
        wrapped = messages if self.function else through(messages, PASSES)
        try:
            text = self._render(wrapped, tools, generate=False)
        except TemplateError:
            return None
        return text if all(part in text for part in texts) else None

    def _find_argument_form(self) -> ArgumentForm | None:
        """Return the form in which the template renders a call's arguments. It is "dict" if the
        template renders both forms, and None if it renders neither.
        """
        for talk, tools in itertools.product(_calls_in_context(), ([TOOL], None)):
            for form in ("dict", "text"):
                if self.shows([_with_arguments(message, form) for message in talk], tools, _FIRST):
                    return form
        return None

    def with_content(self, message: Message) -> Message:
        """Return `message` with its text parts in the form that the template accepts for its role:
        a list of parts, or one string. If the template does not accept null as the content of a
        turn with calls, it becomes an empty text.
        """
        content = message.get("content")
        if content is None and message.get("tool_calls") and not self._takes_null:
            return {**message, "content": ""}
        if content is None or isinstance(content, str):
            return message
        parts = _content_parts(content, images=self.images)
        role = str(message.get("role"))
        if role not in self._takes_parts:
            self._takes_parts[role] = self._shows_parts(role)
        return {**message, "content": parts if self._takes_parts[role] else _joined(parts)}

    @cached_property
    def _takes_null(self) -> bool:
        """False if the template refuses null as the content of a turn with calls (gpt-oss), or
        writes it as text (GLM-4.5).
        """
        form = self.argument_form or "dict"
        call = _with_arguments(call_turn({"x": "x"}), form)
        for after, tools in itertools.product(([tool_result()], []), ([TOOL], None)):
            null, empty = (
                self.shows([USER, {**call, "content": content}, *after], tools)
                for content in (None, "")
            )
            if empty is not None:
                return null is not None and not any(
                    null.count(text) > empty.count(text) for text in ("None", "null")
                )
        return True

    def _with_reasoning(self, message: Message) -> Message:
        """Return `message` with its reasoning also in the field `thinking`, if the template reads
        only this field (gpt-oss, LFM2.5). The field is empty if the template refuses the reasoning
        there: gpt-oss does for a turn with text and calls, and transformers 5.24 adds the field.
        """
        reasoning = message.get("reasoning_content")
        if not reasoning or "thinking" in message:
            return message
        kind = calls, content = bool(message.get("tool_calls")), bool(message.get("content"))
        if kind not in self._thinking:
            self._thinking[kind] = self._find_thinking(calls=calls, content=content)
        thinking = self._thinking[kind]
        return message if thinking is None else {**message, "thinking": thinking and reasoning}

    def _find_thinking(self, *, calls: bool, content: bool) -> str | None:
        """Return the field `thinking` (None: without it) with which the template shows the
        reasoning `_FIRST` of a turn with or without calls and content, or else renders the turn.
        """
        text = "x" if content else ""
        turn = call_turn({"x": "x"}, text) if calls else {"role": "assistant", "content": text}
        turn = _with_arguments(turn, self.argument_form or "dict")
        for texts, thinking in itertools.product(([_FIRST], []), (None, _FIRST, "")):
            field = {} if thinking is None else {"thinking": thinking}
            talk = [USER, {**turn, "reasoning_content": _FIRST, **field}]
            if self.shows(talk, [TOOL], *texts) is not None:
                return thinking
        return None

    def _shows_parts(self, role: str) -> bool:
        """Return True if the template renders a list of text parts in a message of `role`.

        Return False if the template raises, drops a part, or prints the list as Python source, as
        `{{ message.content }}` does.
        """
        parts = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
        printed = repr(parts[0])
        for talk, tools in itertools.product(_parts_in_context(role, parts), ([TOOL], None)):
            form = self.argument_form or "dict"
            talk = [_with_arguments(message, form) for message in talk]
            text = self.shows(talk, tools, _FIRST, _SECOND)
            if text is not None:
                return printed not in text
        return False


@lru_cache(64)
def _equal_text(text: str) -> str:
    """Return `text`, or the same object as for an equal text before."""
    return text


def _is_lead(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


# --- messages -------------------------------------------------------------------------------------


def _with_arguments(message: Message, form: ArgumentForm) -> Message:
    """Return `message` with its calls' arguments in `form`, or `{}` for unreadable ones."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if form == "text" and not isinstance(arguments, str):
            function["arguments"] = json.dumps(
                arguments or {}, ensure_ascii=False, separators=(",", ":")
            )
        elif form == "dict" and not isinstance(arguments, Mapping):
            function["arguments"] = _read_arguments(arguments)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _read_arguments(arguments: Any) -> dict[str, Any]:
    """Return tool arguments as an object, decoded from JSON text if needed.

    Return `{}` for malformed arguments, because the history may contain malformed calls, and must
    still be rendered.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def plain_content(message: Message) -> Message:
    """Return `message` with its content's text parts joined into one string.

    Raises `TemplateError` for a part that is not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": _joined(_content_parts(content))}


def _content_parts(content: Any, *, images: bool = False) -> list[dict[str, Any]]:
    """Return the parts of a message's content. Parts of the Responses API become text parts. If
    `images` is True, an image becomes the part that templates expect, without the image itself.

    Raises `TemplateError`, with the field's name, for any other part.
    """
    if not isinstance(content, list):
        raise TemplateError(
            f"messages[].content must be text or a list of text parts, not {type(content).__name__}"
        )
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if images and kind in IMAGE_PARTS:
            parts.append({"type": "image"})
            continue
        if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
            raise TemplateError(
                f"messages[].content[{index}] is a part of type {kind!r}: only text parts "
                f"{'and images ' if images else ''}can be rendered"
            )
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"messages[].content[{index}].text must be a string")
        parts.append({**part, "type": "text"})
    return parts


def _joined(parts: list[dict[str, Any]]) -> str:
    if any(part["type"] == "image" for part in parts):
        raise TemplateError("the chat template shows no images in messages of this role")
    return "".join(part["text"] for part in parts)


# --- fixed conversations --------------------------------------------------------------------------


def call_turn(arguments: Mapping[str, Any], content: Any = "") -> Message:
    """Return an assistant turn of a fixed conversation that calls the tool `TOOL`."""
    function = {"name": "x", "arguments": arguments}
    call = {"id": "callid000", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def tool_result(content: Any = "x") -> Message:
    """Return the result of the call in `call_turn`."""
    return {"role": "tool", "tool_call_id": "callid000", "name": "x", "content": content}


def _calls_in_context() -> list[list[Message]]:
    """Return conversations with a call. A template with calls accepts at least one of them."""
    call, system = call_turn({"x": _FIRST}), {"role": "system", "content": "x"}
    return [
        [USER, call, tool_result()],
        [USER, call_turn({"x": _FIRST}, None), tool_result()],  # DeepSeek-V3: no calls next to text
        [USER, call],
        [system, USER, call, tool_result(), {"role": "assistant", "content": "x"}, USER],
    ]


def _parts_in_context(role: str, parts: list[dict[str, str]]) -> list[list[Message]]:
    """Return conversations that have a message of `role` with `parts` in its usual position."""
    if role == "tool":
        return [[USER, call_turn({"x": "x"}), tool_result(parts)]]
    message: Message = {"role": role, "content": parts}
    if role == "assistant":
        return [[USER, message, USER], [USER, message]]
    return [[message]] if role == "user" else [[message, USER]]
