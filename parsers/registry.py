"""Parsers by the names that SGLang's `--tool-call-parser` uses; third parties add theirs through the entry-point group
`toolroll.parsers` (name -> a `ToolCallParser` class)."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from importlib.metadata import entry_points

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.cohere import ApertusParser, CohereParser
from toolroll.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from toolroll.parsers.dsml import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    GigaChat35Parser,
    KimiK3Parser,
    Step3Parser,
)
from toolroll.parsers.gemma4 import Gemma4Parser
from toolroll.parsers.glm import Glm45Parser, HunyuanParser
from toolroll.parsers.harmony import HarmonyParser
from toolroll.parsers.hermes import HermesParser, InternParser
from toolroll.parsers.kimi_k2 import KimiK2Parser
from toolroll.parsers.llama3 import Llama3Parser
from toolroll.parsers.minimax import DotsParser, MiniMaxM2Parser
from toolroll.parsers.mistral import MistralParser
from toolroll.parsers.plain import PlainParser
from toolroll.parsers.pythonic import Lfm2Parser, PythonicParser
from toolroll.parsers.qwen3_coder import MiMoParser, Qwen3CoderParser

_BUILT_IN: tuple[type[ToolCallParser], ...] = (
    HermesParser, InternParser, Qwen3CoderParser, MiMoParser, Glm45Parser, HunyuanParser, MiniMaxM2Parser, DotsParser,
    DeepSeekV3Parser, DeepSeekV31Parser, DeepSeekV32Parser, DeepSeekV4Parser, DeepSeekV41Parser, GigaChat35Parser, KimiK2Parser,
    KimiK3Parser, Step3Parser, MistralParser, Llama3Parser, PythonicParser, Lfm2Parser, Gemma4Parser, HarmonyParser, CohereParser,
    ApertusParser, PlainParser,
)  # fmt: skip
GROUP = "toolroll.parsers"


class UnknownParserError(ValueError):
    """No parser has that name; the message says which there are."""


def parser_names() -> tuple[str, ...]:
    """All names, aliases and entry points included."""
    own = [name for kind in _BUILT_IN for name in (kind.name, *kind.aliases)]
    return tuple(sorted({*own, *(entry.name for entry in entry_points(group=GROUP))}))


def get_parser(name: str, control_tokens: Collection[str] = ()) -> ToolCallParser:
    """A parser by name; `control_tokens`: what the vocabulary holds as single control tokens."""
    for kind in _BUILT_IN:
        if name == kind.name or name in kind.aliases:
            return kind(control_tokens)
    for entry in entry_points(group=GROUP, name=name):
        kind = entry.load()
        parser: ToolCallParser = kind(control_tokens)
        return parser
    names = parser_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
    raise UnknownParserError(f"there is no tool-call parser named {name!r}{hint}")
