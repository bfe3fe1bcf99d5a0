"""Parse the text of a reply into reasoning, content and tool calls.

This module exports the public names. Each is imported from its own module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolroll.parsers.openai import (
        OpenAICompatibleToolCallAdapter,
        create_openai_adapter,
        parse_tools,
    )
    from toolroll.parsers.registry import get_parser, parser_names

__all__ = [
    "OpenAICompatibleToolCallAdapter",
    "create_openai_adapter",
    "get_parser",
    "parse_tools",
    "parser_names",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "registry" if name in ("get_parser", "parser_names") else "openai"
    return getattr(import_module(f"toolroll.parsers.{home}"), name)
