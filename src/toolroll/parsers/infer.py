"""`infer_parser`: finds the parser for a chat template. It lets the template render a call, and
tries which parsers can read the call. `better_parser`: finds a parser for a template if the given
parser cannot read the template's calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers
from toolroll.parsers.types import ParsedReply, UnknownParserError

_Template = str | Callable[..., str] | None
_NAME, _ARGUMENTS = "lookup_order", {"order_id": "W12 é", "count": 3, "deep": {"a": [1, "x"]}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks an order up.",
        "parameters": {
            "type": "object",
            "properties": {
                "order_id": {"type": "string", "description": "the order"},
                "count": {"type": "integer", "description": "how many"},
                "deep": {"type": "object", "description": "more", "properties": {}},
            },
            "required": ["order_id"],
        },
    },
}
# Kimi identifies a call by its id. Mistral's template accepts only ids of nine letters and digits.
_IDS = (f"functions.{_NAME}:0", "aB3dE6gH9")
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)


def infer_parser(tokenizer: Any, template: _Template = None) -> str:
    """Return the name of the parser for `template`: Jinja text, or a function that renders. If
    `template` is None, use the chat template of `tokenizer`.

    If several parsers can read the call that the template renders, return the one that leaves the
    least text as content. Raises `UnknownParserError` if no parser can read the call. In this case,
    name the parser explicitly.
    """
    for text in _renders(tokenizer, template):
        replies = {kind.name: kind().parse(text, tools=[_TOOL]) for kind in built_in_parsers()}
        lengths = {name: len(reply.content) for name, reply in replies.items() if _is_probe(reply)}
        if lengths:
            return min(lengths, key=lengths.__getitem__)
    raise UnknownParserError(
        "no parser can read the tool call that this chat template renders: the template may not "
        "support tools; if it does, name the parser, or register one for its format"
    )


def better_parser(parser: ToolCallParser, tokenizer: Any, template: _Template = None) -> str | None:
    """Return the name of a parser that reads the calls that the chat template renders, if `parser`
    cannot read them. Return None if `parser` can read them, or if no parser can.
    """
    texts = _renders(tokenizer, template)
    if any(_is_probe(parser.parse(text, tools=[_TOOL])) for text in texts):
        return None
    try:
        return infer_parser(tokenizer, template)
    except UnknownParserError:
        return None


def _is_probe(reply: ParsedReply) -> bool:
    return [(call.name, call.arguments, call.ok) for call in reply.tool_calls] == [
        (_NAME, _ARGUMENTS, True)
    ]


def _renders(tokenizer: Any, template: _Template) -> list[str]:
    """Return the different texts that the template renders for an assistant turn with the test
    call. The call is rendered with each of `_IDS`, and with its arguments as a dict and as JSON
    text. Calls that the template refuses are left out.
    """
    texts = []
    for call_id in _IDS:
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS, ensure_ascii=False)):
            call = {
                "id": call_id,
                "type": "function",
                "function": {"name": _NAME, "arguments": arguments},
            }
            user = {"role": "user", "content": "Where is my order?"}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                rendered = _render(tokenizer, template, [user, turn], generate=False)
                prompt = _render(tokenizer, template, [user], generate=True)
            except _REFUSALS:
                continue
            pos = next(
                (
                    index
                    for index, (first, second) in enumerate(zip(rendered, prompt, strict=False))
                    if first != second
                ),
                len(prompt),
            )
            # The texts may first differ inside a marker, after characters that both markers share.
            # Go back to the start of the marker.
            while pos < len(prompt) and rendered[pos - 1 : pos] in tuple("<[|｜"):
                pos -= 1
            if rendered[pos:] not in texts:
                texts.append(rendered[pos:])
    return texts


def _render(
    tokenizer: Any, template: _Template, messages: Sequence[Mapping[str, Any]], *, generate: bool
) -> str:
    options = {"tools": [_TOOL], "add_generation_prompt": generate}
    if callable(template):
        return str(template(list(messages), **options))
    options |= {"chat_template": template, "tokenize": False}
    return str(tokenizer.apply_chat_template(list(messages), **options))
