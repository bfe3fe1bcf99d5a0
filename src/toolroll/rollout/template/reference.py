"""`ReferenceRender`: renders conversations as `transformers` does, for `Verifier`.

This module shares no code with `Renderer`. It calls `tokenizer.apply_chat_template` directly, or
the code that renders in place of a template. It uses its own probe conversations to find out which
input forms a template accepts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jinja2

from toolroll.rollout.types import Message, Tool

RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template or its sandbox raises for messages that it refuses."""
TemplateText = str | Callable[..., str] | None
"""Jinja text, or a function that renders. None: the tokenizer's own template."""


class ReferenceRender:
    """Renders conversations with `chat_template`, or with the tokenizer's own chat template if
    `chat_template` is None. `kwargs` are the template's switches.
    """

    def __init__(
        self, tokenizer: Any, chat_template: TemplateText, kwargs: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = dict(kwargs)
        self._shows_parts: dict[str, bool] = {}
        self._thinking: dict[tuple[bool, bool], Message] = {}

    def render(
        self, messages: list[Message], tools: list[Tool] | None, *, generate: bool = True
    ) -> str:
        """Return the text of prepared messages. Raises one of `RENDER_ERRORS` if the template
        refuses them.
        """
        options = {"tools": tools, "add_generation_prompt": generate, **self._kwargs}
        if callable(self._chat_template):
            return str(self._chat_template(messages, **options))
        options |= {"tokenize": False, "chat_template": self._chat_template}
        return str(self._tokenizer.apply_chat_template(messages, **options))

    def names(self, token: str) -> bool:
        """Return True if the template may write or search for the text `token`, unless it is a word
        of letters, digits and `_`. Code may use any token.
        """
        if callable(self._chat_template):
            return True
        if not token.replace("_", "a").isalnum():
            return token.lower() in self._known_text or self._joins(token)
        return False

    def _joins(self, token: str) -> bool:
        """Return True if the template has text that ends like the start of `token`, and text that
        starts like its end. It may write a value between them, such as a role.
        """
        outer = token[0] + token[-1]
        if any(letter.isspace() or letter == "_" or letter.isalnum() for letter in outer):
            return False
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        return any(f"{left}\0" in self._literals for left, _ in halves) and any(
            f"\0{right}" in self._literals for _, right in halves
        )

    @cached_property
    def _literals(self) -> str:
        """What the template has outside its tags, and between quotes: each text once, between null
        characters.
        """
        lexed = (jinja2.Environment().lex(source) for source in self._sources)
        texts = {
            text.strip("'\"") if kind == "string" else text
            for tokens in lexed
            for _, kind, text in tokens
            if kind in ("data", "string")
        }
        return "\0".join(["", *texts, ""])

    @cached_property
    def _sources(self) -> list[str]:
        """The template in all its variants."""
        template = self._tokenizer.chat_template
        variants = template.values() if isinstance(template, dict) else ()
        return [self._tokenizer.get_chat_template(self._chat_template, tools=[{}]), *variants]

    @cached_property
    def _known_text(self) -> str:
        """The text of the template, in all its variants, and of small conversations."""
        call = _calling({"x": "x"} if self._takes_objects else '{"x":"x"}')
        turns = call, {**call, "reasoning_content": "x", "thinking": "x"}
        talks = [[_USER, turn, _result("x")] for turn in turns]
        talks.append([{"role": "system", "content": "x"}, _USER])
        texts = [*self._sources, *self.around_answer, *map(self._text, talks)]
        return "\n".join(texts).lower()

    def prepared(self, message: Message) -> Message:
        """Return the message with its arguments, content and reasoning in the form that the
        template accepts.
        """
        changed = dict(message)
        if isinstance(changed.get("content"), list):
            if self._takes_parts(str(changed.get("role"))):
                changed["content"] = [
                    {"type": "image"} if "image_url" in part else {**part, "type": "text"}
                    for part in changed["content"]
                ]
            else:
                changed["content"] = "".join(str(part["text"]) for part in changed["content"])
        if changed.get("content") is None and changed.get("tool_calls") and not self._takes_null:
            changed["content"] = ""
        if changed.get("tool_calls"):
            changed["tool_calls"] = [self._prepared_call(call) for call in changed["tool_calls"]]
        if changed.get("reasoning_content"):
            for name, value in self._thinking_field(changed).items():
                changed.setdefault(name, value and changed["reasoning_content"])
        result: Message = readable(changed)
        return result

    def _prepared_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if self._takes_objects and not isinstance(arguments, Mapping):
            function["arguments"] = _as_object(arguments)
        elif not self._takes_objects and not isinstance(arguments, str):
            function["arguments"] = json.dumps(
                arguments or {}, ensure_ascii=False, separators=(",", ":")
            )
        return {**call, "function": function}

    @cached_property
    def around_answer(self) -> tuple[str, str]:
        """The text before and after an answer that a user message follows. Both are empty if the
        template refuses it.
        """
        answer: Message = {"role": "assistant", "content": "qxa"}
        try:
            render = self.render([_USER, answer, _USER], None)
        except RENDER_ERRORS:
            return "", ""
        before, _, after = render.rpartition("qxa")
        return before, after

    @cached_property
    def scaffold(self) -> str:
        """The empty element, such as `<think>\\n\\n</think>\\n\\n`, that the generation prompt
        writes before a turn and that history does not show there. Empty if there is none.
        """
        opening = self.around_answer[0]
        prompt = self.render([_USER], None) if opening else ""
        scaffold = prompt[len(opening) :] if prompt.startswith(opening) else ""
        return scaffold if _EMPTY_ELEMENT.fullmatch(scaffold) else ""

    @cached_property
    def _takes_objects(self) -> bool:
        """True if the template takes tool arguments as objects. False if it takes only JSON text,
        like DeepSeek-V3's template.
        """
        return self._shows_argument({"x": "qxa"}) or not self._shows_argument('{"x":"qxa"}')

    def _shows_argument(self, arguments: object) -> bool:
        # DeepSeek-V3 does not render calls next to text. Some templates do not render calls without
        # tools.
        for content, tools in itertools.product(("", None), (None, [_TOOL])):
            call = {**_calling(arguments), "content": content}
            try:
                if "qxa" in self.render([_USER, call, _result("x")], tools):
                    return True
            except RENDER_ERRORS:
                continue
        return False

    @cached_property
    def _takes_null(self) -> bool:
        """False if the template raises for a turn with calls whose content is null, or writes
        None or null, but renders it with an empty content.
        """
        calling = _calling({"x": "x"} if self._takes_objects else '{"x":"x"}')
        for end, tools in itertools.product(([_result("x")], []), ([_TOOL], None)):
            texts: list[str | None] = []
            for content in ("", None):
                try:
                    talk = [_USER, {**calling, "content": content}, *end]
                    texts.append(self.render(talk, tools, generate=False))
                except RENDER_ERRORS:
                    texts.append(None)
            empty, null = texts
            if empty is not None:
                return null is not None and all(
                    null.count(word) <= empty.count(word) for word in ("None", "null")
                )
        return True

    def _takes_parts(self, role: str) -> bool:
        """Return True if the template renders all texts of a content that is a list of parts."""
        if role not in self._shows_parts:
            parts = [{"type": "text", "text": "qxa"}, {"type": "text", "text": "qxb"}]
            message = {"role": role, "content": parts}
            call = _calling({"x": "x"} if self._takes_objects else '{"x":"x"}')
            talks = {"user": [message], "tool": [_USER, call, _result(parts)]}
            try:
                text = self.render(talks.get(role, [message, _USER]), None)
            except RENDER_ERRORS:
                text = ""
            takes_parts = "qxa" in text and "qxb" in text and repr(parts[0]) not in text
            self._shows_parts[role] = takes_parts
        return self._shows_parts[role]

    def _thinking_field(self, message: Message) -> Message:
        """Return the field that a turn like `message` needs besides `reasoning_content`: `thinking`
        if the template reads only that (gpt-oss, LFM2.5), an empty `thinking` if it refuses the
        field that transformers 5.24 adds (gpt-oss with text and calls), or none.
        """
        calls, content = bool(message.get("tool_calls")), bool(message.get("content"))
        if (calls, content) not in self._thinking:
            turn = _calling({"x": "x"} if self._takes_objects else '{"x":"x"}')
            turn |= {"content": "x" if content else "", "reasoning_content": "qxa"}
            if not calls:
                del turn["tool_calls"]
            fields: list[Message] = [{}, {"thinking": "qxa"}, {"thinking": ""}]
            renders = [self._text([_USER, {**turn, **field}]) for field in fields]
            shown = [field for field, text in zip(fields, renders, strict=True) if "qxa" in text]
            accepted = [field for field, text in zip(fields, renders, strict=True) if text]
            self._thinking[calls, content] = [*shown, *accepted, {}][0]
        return self._thinking[calls, content]

    def _text(self, messages: list[Message]) -> str:
        """Return the render of `messages` with a tool, or "" if the template refuses them."""
        try:
            return self.render(messages, [_TOOL])
        except RENDER_ERRORS:
            return ""

    @cached_property
    def uses_clock(self) -> bool:
        """True if the template uses the current time, or may use it because it is code."""
        if callable(self._chat_template):
            return True
        template = self._tokenizer.get_chat_template(self._chat_template, tools=[{}])
        return "strftime_now" in str(template)


def readable(value: Any) -> Any:
    """Return JSON data without lone surrogates, because tokenizers reject them."""
    if isinstance(value, str):
        if value.isascii():
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, (dict, Mapping)):  # dict comes first: the check against Mapping is slow
        return {readable(name): readable(item) for name, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


_EMPTY_ELEMENT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")
_USER: Message = {"role": "user", "content": "x"}
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "x", "description": "x", "parameters": _PARAMETERS},
}


def _calling(arguments: Any) -> Message:
    function = {"name": "x", "arguments": arguments}
    call = {"id": "callid000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "callid000", "name": "x", "content": content}


def _as_object(arguments: Any) -> dict[str, Any]:
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return dict(decoded) if isinstance(decoded, Mapping) else {}
