"""`ToolList`: the tools of a conversation. Equal lists share one, so all episodes of an environment
do.

Invariant: nothing changes a `ToolList`, because only `Conversation` holds its `tools`, and gives
copies to other code.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from toolroll.parsers.reading.schema import Offered
from toolroll.rollout.runtime.unicode import replace_surrogates
from toolroll.rollout.types import Tool

_EXACT = 2
"""The last version of `marshal` whose output depends only on types and values, not on identity."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolList:
    """Tools without surrogates. `offered`: the same tools, for a parser. `size`: their approximate
    number of characters.
    """

    tools: list[Tool]
    offered: Offered
    size: int

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> ToolList:
        """Return the tool list for `tools`. It is not shared if they contain an object that
        `marshal` does not write, such as an instance of a subclass of `dict`.
        """
        try:
            return _shared(marshal.dumps(list(tools), _EXACT))
        except ValueError:
            return _made(list(tools))

    def copy(self) -> list[Tool]:
        """Return a copy of the tools. Tools that are not shared are not copied."""
        try:
            copied: list[Tool] = marshal.loads(marshal.dumps(self.tools, _EXACT))
        except ValueError:
            return list(self.tools)
        return copied


@lru_cache(64)
def _shared(content: bytes) -> ToolList:
    """Return the tool list that `marshal` wrote as `content`."""
    return _made(marshal.loads(content))


def _made(tools: list[Tool]) -> ToolList:
    tools = replace_surrogates(tools)
    return ToolList(tools, Offered(tools), text_size(tools))


def text_size(value: Any) -> int:
    """Return the approximate number of characters of text in `value`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 0
