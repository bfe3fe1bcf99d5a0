"""Grammars for forced tool calls and for `strict` tools, in the model's own format of tool calls.

A forced call uses an EBNF grammar, because routers forward `ebnf` but drop `structural_tag`. The
grammar allows any arguments; the parser checks them against the tool's schema. For `strict` tools,
a structural tag forces the arguments to follow the schema. Only some formats have a grammar. If a
request forces calls in another format, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from toolroll.endpoint.errors import ApiError, refused
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Completion

_JSON = r"""
object ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]"
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" character* "\""
character ::= [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= " "?
"""  # noqa: E501


def _hermes(names: Sequence[str], *, several: bool) -> str:
    opened, closed = _literal('<tool_call>\n{"name": '), _literal("}\n</tool_call>")
    call = f'call ::= {opened} name ", \\"arguments\\": " object {closed}'
    return f"{_root(several=several)}\n{call}\n{_json_names(names)}{_JSON}"


def _llama3(names: Sequence[str], *, several: bool) -> str:
    root = 'root ::= "{\\"name\\": " name ", \\"parameters\\": " object "}"'
    return f"{root}\n{_json_names(names)}{_JSON}"


def _root(*, several: bool) -> str:
    return 'root ::= call ("\\n" call)*' if several else "root ::= call"


def _json_names(names: Sequence[str]) -> str:
    return f"name ::= {' | '.join(_literal(orjson.dumps(name).decode()) for name in names)}"


def _marked_up(
    names: Sequence[str],
    *,
    several: bool,
    head: tuple[str, str],
    argument: tuple[str, str, str],
    tail: str,
) -> str:
    """Return the EBNF grammar of calls whose arguments are between tags.

    `head`: the texts before and after the function's name. `argument`: the texts before a key,
    between the key and its value, and after the value. `tail`: the text at the end of a call.
    """
    before, between, after = (_literal(text) for text in argument)
    return "\n".join(
        [
            _root(several=several),
            f"call ::= {_literal(head[0])} name {_literal(head[1])} argument* {_literal(tail)}",
            f"name ::= {' | '.join(_literal(name) for name in names)}",
            f"argument ::= {before} [a-zA-Z0-9_]+ {between} [^<]* {after}",
        ]
    )


_qwen3_coder = partial(
    _marked_up,
    head=("<tool_call>\n<function=", ">\n"),
    argument=("<parameter=", ">\n", "\n</parameter>\n"),
    tail="</function>\n</tool_call>",
)
_glm45 = partial(
    _marked_up,
    head=("<tool_call>", "\n"),
    argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    tail="</tool_call>",
)
_GRAMMARS: dict[str, Callable[..., str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
}
CLOSERS = {"hermes": "</tool_call>", "qwen3_coder": "</tool_call>", "glm45": "</tool_call>"}
"""The end of a call, by format. It is used as a stop string if only one call is allowed."""


def call_grammar(parser: str, names: Sequence[str], *, several: bool) -> str:
    """Return the EBNF grammar of a call of one of the tools `names`, in the format of `parser`. If
    `several` is True, the grammar allows more than one call, except in the format "llama3". Raise
    `ApiError` if the format has no grammar.
    """
    make = _GRAMMARS.get(parser)
    if make is None:
        raise refused(
            "tool_choice",
            f"calls in the format {parser!r} cannot be forced: use tool_choice auto",
        )
    return make(names, several=several)


def strict_tag(
    parser: str, tools: Sequence[Mapping[str, Any]], place: str, *, forced: bool, several: bool
) -> str:
    """Return a structural tag that forces calls of the strict tools among `tools` to follow the
    tool's schema.

    `forced`: the reply must consist of calls. `several`: it may have more than one call. `place` is
    the path of the first strict tool in the body, for the error message if the format is not
    supported.
    """
    if parser != "hermes":
        raise refused(
            place,
            f"{place} cannot be honored for calls in the format {parser!r}: leave it out or set "
            f"it to false",
        )
    tags = []
    for function in (tool["function"] for tool in tools):
        schema = (function.get("parameters") if function.get("strict") else None) or {
            "type": "object"
        }
        begin = f'<tool_call>\n{{"name": {orjson.dumps(function["name"]).decode()}, "arguments": '
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"})
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<tool_call>"]}
    if forced:
        form = {"type": "tags_with_separator", "separator": "\n"}
    form |= {"tags": tags, "at_least_one": forced, "stop_after_first": not several}
    return orjson.dumps({"type": "structural_tag", "format": form}).decode()


def check_called(
    forced: Sequence[str],
    strict: Sequence[str],
    turn: ParsedTurn,
    completion: Completion,
    template: ChatTemplate,
) -> None:
    """Raise `ApiError` if a complete reply has no call of the tools `forced`, or if a call of one
    of the tools `strict` violates its schema.

    Such a reply shows that the engine did not follow the grammar, so the turn must not be marked as
    constrained. (An engine without a grammar backend ignores grammars.) A reply that was truncated
    by its length, or by a stop string or stop token of the client, is accepted, because it may end
    before its call.
    """
    matched = completion.matched
    cut = isinstance(matched, str) or (
        isinstance(matched, int) and matched not in template.stop_token_ids
    )
    if completion.finish_reason != "stop" or cut:
        return
    calls = turn.parsed.tool_calls
    problem = None
    if forced and not any(call.name in forced for call in calls):
        problem = f"tool_choice forces a call of {' or '.join(forced)}, but the reply has none"
    wrong = next((call for call in calls if call.name in strict and not call.ok), None)
    if wrong is not None:
        problem = f"{wrong.name} is strict, but its call does not follow its schema ({wrong.error})"
    if problem is not None:
        raise ApiError(
            502,
            "engine_error",
            f"{problem}: the engine did not follow the grammar that it was sent",
        )


def call_closer(parser: str) -> str:
    """Return the stop string that ends a turn after its first call. Raise `ApiError` if there is
    none for the format of `parser`.
    """
    if parser not in CLOSERS:
        raise refused(
            "parallel_tool_calls",
            f"calls in the format {parser!r} cannot be limited to one: leave parallel_tool_calls "
            "out",
        )
    return CLOSERS[parser]


def _literal(text: str) -> str:
    """Return `text` as an EBNF string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
