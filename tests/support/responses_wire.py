"""A client of OpenAI's Responses without the SDK."""

from functools import partial
from typing import Any

from support.anthropic_wire import answer_of
from support.listed_environment import TOOL

PATH = "/sessions/s/v1/responses"
LOOK: dict[str, Any] = {"type": "function", **TOOL["function"]}
HELLO: dict[str, Any] = {"model": "m", "input": "Hi"}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the events add up to. Check it against the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "output_item.done":
            item = event["item"]
            parts = [*item.get("summary", ()), *item.get("content", ())]
            whole = item.get("arguments", "") + item.get("input", "")
            whole += "".join(part["text"] for part in parts)
            assert (item["id"], whole) == (items[-1]["id"], texts.pop(item["id"]))
            items[-1] = item
        elif kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items and not texts
    assert last["response"]["id"] == events[0]["response"]["id"]
    return last["response"]


ask = partial(answer_of, response_of)
