"""`ToolList`: the tools of a request. Requests that offer the same tools share one list.

Invariants: a list is found by its whole JSON text, and never changes. It is kept as long as a
request, a turn or a prompt uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from weakref import WeakValueDictionary

import orjson

from toolroll.parsers.reading.resolve import Schema
from toolroll.parsers.reading.schema import Offered
from toolroll.rollout.types import Tool

Schemas = Mapping[str, Schema | None]
"""The schemas of the parameters of tools, by the tool's name. None if no parameter has a default.
"""


class ToolList(list[Tool]):
    """Tools as in chat completions, and their JSON `text`. Create one with `of` or `read`."""

    def __init__(self, text: bytes) -> None:
        super().__init__(orjson.loads(text))
        self.text = text
        self.valid = False
        """True if `ChatRequest` accepts these tools. False if this is not known."""

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> ToolList:
        """Return the list that equals `tools`."""
        return cls.read(orjson.dumps(tools))

    @classmethod
    def read(cls, text: bytes) -> ToolList:
        """Return the list with the JSON text `text`."""
        tools = _USED.get(text)
        if tools is None:
            tools = _USED[text] = cls(text)
        return tools

    @cached_property
    def offered(self) -> Offered:
        """The same tools, for a parser."""
        return Offered(self)

    @cached_property
    def schemas(self) -> Schemas:
        """The schemas of the parameters."""
        schemas = dict[str, Schema | None]()
        for name, function in self.offered.functions.items():
            parameters = self.offered.parameters(name)
            has_default = b'"default":' in orjson.dumps(function.get("parameters"))
            schemas[name] = parameters.schema if parameters is not None and has_default else None
        return schemas


_USED: WeakValueDictionary[bytes, ToolList] = WeakValueDictionary()
