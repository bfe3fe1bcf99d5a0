"""Tool calls that must be made: grammars in the model's own wire format.

EBNF, since it reaches the engine through every router (they drop `structural_tag`). It forces a call of an offered tool with a JSON
object for its arguments; the parser checks those against the tool's schema, as ever. One entry per wire format: a format that is not
here cannot be forced, and the request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from toolroll.rollout.server.errors import refused

_JSON = r"""
object ::= "{" ws (pair ("," ws pair)*)? "}"
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]"
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" character* "\""
character ::= [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= " "?
"""


def _hermes(names: Sequence[str], *, several: bool) -> str:
    alternatives = " | ".join(_literal(orjson.dumps(name).decode()) for name in names)
    root = 'root ::= call ("\\n" call)*' if several else "root ::= call"
    opened, closed = _literal('<tool_call>\n{"name": '), _literal("}\n</tool_call>")
    return f'{root}\ncall ::= {opened} name ", \\"arguments\\": " object {closed}\nname ::= {alternatives}{_JSON}'


_GRAMMARS: dict[str, Callable[..., str]] = {"hermes": _hermes}
CLOSERS = {"hermes": "</tool_call>"}
"""What a call ends with: a stop string where only one call is allowed."""


def call_grammar(parser: str, names: Sequence[str], *, several: bool) -> str:
    """EBNF of one call, or `several`, of one of the tools `names`, as the parser named `parser` reads it."""
    make = _GRAMMARS.get(parser)
    if make is None:
        raise refused("tool_choice", f"calls in the format {parser!r} cannot be forced: leave tool_choice at auto")
    return make(names, several=several)


def call_closer(parser: str) -> str:
    """The stop string that ends a turn behind its first call."""
    if parser not in CLOSERS:
        raise refused("parallel_tool_calls", f"calls in the format {parser!r} cannot be kept to one: leave parallel_tool_calls open")
    return CLOSERS[parser]


def _literal(text: str) -> str:
    """`text` as an EBNF string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
