"""Requests share a tool list only if their tools are rendered alike."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from support.listed_environment import TOOL
from support.served import CHAT, USER, serve

from toolroll.endpoint.dialects import openai_chat
from toolroll.endpoint.requests import tool_list
from toolroll.endpoint.requests.request_bodies import read
from toolroll.endpoint.requests.tool_list import ToolList


def offering(default: Any) -> list[Any]:
    parameters = {"type": "object", "properties": {"x": {"default": default}}}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def test_equal_tools_are_one_list_as_long_as_it_is_used() -> None:
    gc.collect()
    before = len(tool_list._USED)
    lists = [ToolList.of(json.loads(json.dumps(offering(f"{number % 2}")))) for number in range(6)]
    assert len({id(tools) for tools in lists}) == 2 and lists[0] == offering("0")
    assert len(tool_list._USED) == before + 2
    del lists
    gc.collect()
    assert len(tool_list._USED) == before


@pytest.mark.parametrize("other", [1.0, True, "1", None])
def test_values_that_are_rendered_differently_are_other_tools(other: Any) -> None:
    first, second = ToolList.of(offering(1)), ToolList.of(offering(other))
    assert first is not second and repr(second) == repr(offering(other))


def test_the_order_of_keys_counts() -> None:
    [tool] = offering(1)
    reordered = {"type": "function", "function": dict(reversed(tool["function"].items()))}
    assert ToolList.of([reordered]) is not ToolList.of([tool])


async def test_tools_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    validated: list[Any] = []

    def recorded(kind: Any, body: dict[str, Any]) -> Any:
        validated.append(body.get("tools"))
        return read(kind, body)

    monkeypatch.setattr(openai_chat, "read", recorded)
    async with serve() as bench:
        for default in (1, 1, 2, 1):
            await bench.ask(USER, tools=offering(default))
    assert validated == [offering(1), None, offering(2), None]


async def test_invalid_tools_are_refused_after_valid_ones() -> None:
    wrong: list[Any] = ["x", {"a": 1}, 7, "", {}, 0, [{"type": "function"}], [1]]
    async with serve() as bench:
        for tools in wrong:
            for valid in ([], [TOOL]):
                await bench.ask(USER, tools=valid)
            for _ in range(2):
                status, _, param = await bench.refusal(CHAT, {"messages": [USER], "tools": tools})
                assert status == 400 and str(param).startswith("tools")
