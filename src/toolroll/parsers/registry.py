"""Find a parser by its name.

Most names are those of SGLang's `--tool-call-parser`. `plain` reads no calls. Other packages add
names with `register`, or with the entry-point group `toolroll.parsers`, which maps a name to a
`ToolCallParser` class.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from importlib.metadata import entry_points

from toolroll.parsers.base import PlainParser, ToolCallParser
from toolroll.parsers.formats.dsml import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    GigaChat35Parser,
    KimiK3Parser,
    Step3Parser,
)
from toolroll.parsers.formats.gemma4 import Gemma4Parser
from toolroll.parsers.formats.glm import Glm45Parser, HunyuanParser, IQuestParser, K2HorizonParser
from toolroll.parsers.formats.harmony import BeamParser, HarmonyParser
from toolroll.parsers.formats.hermes import (
    ApertusParser,
    CohereParser,
    GigaChat3Parser,
    HermesParser,
    InternParser,
)
from toolroll.parsers.formats.inkling import InklingParser
from toolroll.parsers.formats.llama3 import Llama3Parser
from toolroll.parsers.formats.minimax import (
    DotsParser,
    MiniCPM5Parser,
    MiniMaxM2Parser,
    MiniMaxM3Parser,
)
from toolroll.parsers.formats.mistral import MistralParser
from toolroll.parsers.formats.muse import MuseParser
from toolroll.parsers.formats.named_json import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from toolroll.parsers.formats.pythonic import Lfm2Parser, PythonicParser
from toolroll.parsers.formats.qwen3_coder import MiMoParser, Qwen3CoderParser
from toolroll.parsers.reasoning import get_reasoning
from toolroll.parsers.types import UnknownParserError

_BUILT_IN: tuple[type[ToolCallParser], ...] = (
    HermesParser, InternParser, Qwen3CoderParser, MiMoParser, Glm45Parser, HunyuanParser,
    MiniMaxM2Parser, DotsParser,
    DeepSeekV3Parser, DeepSeekV31Parser, DeepSeekV32Parser, DeepSeekV4Parser, DeepSeekV41Parser,
    GigaChat35Parser, KimiK2Parser,
    KimiK3Parser, Step3Parser, MistralParser, Llama3Parser, PythonicParser, Lfm2Parser,
    Gemma4Parser, HarmonyParser, CohereParser,
    ApertusParser, GigaChat3Parser, IQuestParser, MiniCPM5Parser, MuseParser, K2HorizonParser,
    MiniMaxM3Parser, InklingParser,
    BeamParser, PlainParser,
)  # fmt: skip
_NO_FORMATS = {
    "response_template": "it is not a wire format: SGLang parses a reply with the "
    "response_template in the tokenizer configuration of the checkpoint, so the format depends on "
    "the model. Name the parser of the format that the model writes, or register your own. "
    "parser='auto' and infer_parser(tokenizer) find the parser from the chat template",
}
"""The SGLang names that are not formats, each with an explanation."""

GROUP = "toolroll.parsers"
_REGISTERED: dict[str, Callable[[Collection[str]], ToolCallParser]] = {}


def built_in_parsers() -> tuple[type[ToolCallParser], ...]:
    """Return the parsers of this package, each once."""
    return _BUILT_IN


def parser_names() -> tuple[str, ...]:
    """Return all names, including aliases, registered names and entry points."""
    built_in = [name for kind in _BUILT_IN for name in (kind.name, *kind.aliases)]
    return tuple(
        sorted({*built_in, *_REGISTERED, *(entry.name for entry in entry_points(group=GROUP))})
    )


def register(name: str, parser: Callable[[Collection[str]], ToolCallParser]) -> None:
    """Register `parser` under `name` in this process.

    `parser` takes the control tokens and returns a parser. It may be a class or a function. Raises
    `ValueError` if the name is already used. Packages should use the entry-point group
    `toolroll.parsers` instead.
    """
    if name in parser_names():
        raise ValueError(f"there is already a tool-call parser named {name!r}: choose another name")
    _REGISTERED[name] = parser


def get_parser(
    name: str, control_tokens: Collection[str] = (), *, reasoning: str | None = None
) -> ToolCallParser:
    """Return the parser with this name.

    Args:
        name: One of `parser_names()`, or `sglang:NAME` for SGLang's own parser NAME.
        control_tokens: The control tokens of the vocabulary, as texts.
        reasoning: A name of SGLang's `--reasoning-parser`. Default: the reasoning tags of the
            tool-call format.

    Raises `UnknownParserError` if the parser is unknown, and `ValueError` if the reasoning format
    is unknown.
    """
    parser = _make(name, control_tokens)
    if reasoning is not None:
        parser.reasoning = get_reasoning(reasoning)
    return parser


def _make(name: str, control_tokens: Collection[str]) -> ToolCallParser:
    sglang_name = name.removeprefix("sglang:")
    if sglang_name in _NO_FORMATS:
        raise UnknownParserError(
            f"there is no tool-call parser named {name!r}, because {_NO_FORMATS[sglang_name]}"
        )
    for kind in _BUILT_IN:
        if name == kind.name or name in kind.aliases:
            return kind(control_tokens)
    if name in _REGISTERED:
        return _REGISTERED[name](control_tokens)
    if name.startswith("sglang:"):
        # SGLang is a large import, and may not be installed
        from toolroll.parsers.formats.sglang_parser import SGLangParser

        ours = get_parser(sglang_name, control_tokens) if sglang_name in parser_names() else None
        return SGLangParser(sglang_name, control_tokens, ours=ours)
    for entry in entry_points(group=GROUP, name=name):
        parser: ToolCallParser = entry.load()(control_tokens)
        return parser
    names = parser_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
    raise UnknownParserError(f"there is no tool-call parser named {name!r}{hint}")
