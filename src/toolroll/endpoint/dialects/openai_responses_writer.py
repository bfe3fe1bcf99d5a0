"""The answers and stream events of OpenAI's Responses.

Invariants: events are numbered without gaps. The last event has the finished response, and the
other events add up to its items. The answer without `stream` has the same items.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.dialects.anthropic import signature
from toolroll.endpoint.dialects.dialect import Event
from toolroll.endpoint.dialects.openai_responses_items import ClientTool, Names
from toolroll.endpoint.errors import ApiError
from toolroll.parsers.openai import openai_function
from toolroll.parsers.types import Delta, ToolCall
from toolroll.rollout.template.encode import Encoder

Item = dict[str, Any]

_PAYLOADS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""For each type of a call's item: the field with what the model wrote, and the name of the events
for it.
"""


def output_of(
    result: CompletionResult, encoder: Encoder, names: Names, *, encrypted: bool
) -> list[Item]:
    """Return the items of a finished answer. A stream of the answer has the same items."""
    writer = ResponsesWriter(result, {"id": result.id}, encoder, names, encrypted=encrypted)
    for step in result.choices[0].pieces:
        list(writer.add(0, step))
    list(writer.end(state_of(result)["status"]))
    return writer.items


def state_of(result: CompletionResult) -> dict[str, Any]:
    """Return `status`, `incomplete_details` and `error` of a finished response."""
    cut = result.choices[0].completion.finish_reason == "length"
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
    }


def usage_of(result: CompletionResult, encoder: Encoder) -> dict[str, Any]:
    """Return OpenAI's usage for a response."""
    [choice] = result.choices
    read, sampled = len(result.prompt_ids), len(choice.completion.output_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": min(choice.completion.cached_tokens, read),
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(result, encoder)},
        "total_tokens": read + sampled,
    }


def _reasoning_tokens(result: CompletionResult, encoder: Encoder) -> int:
    """Return the number of tokens that start before the end of the reasoning."""
    [choice] = result.choices
    thought = choice.turn.parsed.reasoning if choice.turn is not None else None
    if not thought:
        return 0
    ids = choice.completion.output_ids.tolist()
    text = encoder.decode(ids)
    end = text.find(thought) + len(thought)
    return sum(start < end for start, _ in encoder.offsets(ids, text))


class ResponsesWriter:
    """Writes one response as events. The arguments of a tool call are a single delta.

    `response`: the response before the first delta. `items`: the finished items so far. Their ids
    are derived from the response's id, so a caller that needs only `items` can pass only the `id`
    of a response.
    """

    def __init__(
        self,
        result: CompletionResult,
        response: dict[str, Any],
        encoder: Encoder,
        names: Names,
        *,
        encrypted: bool,
    ) -> None:
        self.items: list[Item] = []
        self._result = result
        self._response = response
        self._encoder = encoder
        self._names = names
        self._encrypted = encrypted
        self._kind: str | None = None
        self._texts: list[str] = []
        self._opened: Item = {}
        self._number = -1

    def start(self) -> Iterable[Event]:
        """Return `response.created` and `response.in_progress`."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response)

    def add(self, index: int, step: Delta) -> Iterable[Event]:
        """Return the events for one delta. If its kind is different from the open item's kind, a
        new item is opened.
        """
        if step.call is not None:
            yield from self._close()
            yield from self._call(step.call)
            return
        if self._kind != step.kind:
            yield from self._close()
            yield from self._open(step.kind)
        self._texts.append(step.text)
        if step.kind == "reasoning":
            yield self._part("response.reasoning_summary_text.delta", delta=step.text)
        else:
            yield self._part("response.output_text.delta", delta=step.text, logprobs=[])

    def end(self, status: str) -> Iterable[Event]:
        """Return the events that end the last item, and set the status of this item. An empty reply
        becomes an empty message, so that a client can send the reply back.
        """
        if self._kind is None and not self.items:
            yield from self.add(0, Delta("content", ""))
        yield from self._close(status)

    async def finish(self) -> AsyncIterator[Event]:
        """Yield the events that end the last item, and the event with the finished response."""
        result = self._result
        state = state_of(result)
        for event in self.end(state["status"]):
            yield event
        response = {
            **self._response,
            **state,
            "output": self.items,
            "usage": usage_of(result, self._encoder),
        }
        yield self._event(f"response.{state['status']}", response=response)

    def failed(self, error: ApiError) -> Event:
        """Return `response.failed`."""
        failure = {"code": error.code, "message": str(error)}
        response = {**self._response, "status": "failed", "error": failure}
        return self._event("response.failed", response={**response, "output": self.items})

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _part(self, kind: str, **fields: Any) -> Event:
        """Return an event for the only part of the open item."""
        index = "summary_index" if self._kind == "reasoning" else "content_index"
        location = {"item_id": self._opened["id"], "output_index": len(self.items), index: 0}
        return self._event(kind, **location, **fields)

    def _open(self, kind: str) -> Iterable[Event]:
        self._kind = kind
        thinks = kind == "reasoning"
        item = self._reasoning("") if thinks else self._message("")
        [part] = item["summary" if thinks else "content"]
        empty = {**item, "status": "in_progress", "summary" if thinks else "content": []}
        if thinks:
            empty["encrypted_content"] = None
        self._opened = empty
        index = len(self.items)
        yield self._event("response.output_item.added", output_index=index, item=empty)
        name = "reasoning_summary_part" if thinks else "content_part"
        yield self._part(f"response.{name}.added", part=part)

    def _close(self, status: str = "completed") -> Iterable[Event]:
        if self._kind is None:
            return
        if self._kind == "tool_call":
            yield from self._close_call(status)
            return
        thinks, text = self._kind == "reasoning", "".join(self._texts)
        item = self._reasoning(text) if thinks else self._message(text)
        item["status"] = status
        if thinks:
            [part] = item["summary"]
            yield self._part("response.reasoning_summary_text.done", text=text)
            yield self._part("response.reasoning_summary_part.done", part=part)
        else:
            [part] = item["content"]
            yield self._part("response.output_text.done", text=text, logprobs=[])
            yield self._part("response.content_part.done", part=part)
        yield self._done(item)

    def _done(self, item: Item) -> Event:
        index = len(self.items)
        self.items.append(item)
        self._kind, self._texts = None, []
        return self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, call: ToolCall) -> Iterable[Event]:
        """Return the events of a call. A call that cannot be read stays open, because the reply may
        have been cut within it.
        """
        item = self._call_item(call)
        field, kind = _PAYLOADS[item["type"]]
        empty = {**item, "status": "in_progress", field: ""}
        index = len(self.items)
        yield self._event("response.output_item.added", output_index=index, item=empty)
        location = {"item_id": item["id"], "output_index": index}
        yield self._event(f"response.{kind}.delta", **location, delta=item[field])
        self._kind, self._opened = "tool_call", item
        if call.arguments is not None:
            yield from self._close()

    def _close_call(self, status: str) -> Iterable[Event]:
        item = {**self._opened, "status": status}
        field, kind = _PAYLOADS[item["type"]]
        location = {"item_id": item["id"], "output_index": len(self.items)}
        name = {"name": item["name"]} if field == "arguments" else {}
        yield self._event(f"response.{kind}.done", **location, **name, **{field: item[field]})
        yield self._done(item)

    def _head(self, prefix: str, kind: str) -> Item:
        stem = self._response["id"].removeprefix("resp_")
        return {
            "id": f"{prefix}_{stem}_{len(self.items)}",
            "type": kind,
            "status": "completed",
        }

    def _reasoning(self, thought: str) -> Item:
        """Return a reasoning item whose summary is the reasoning."""
        return {
            **self._head("rs", "reasoning"),
            "summary": [{"type": "summary_text", "text": thought}],
            "encrypted_content": signature(thought) if self._encrypted else None,
        }

    def _message(self, content_text: str) -> Item:
        """Return an item that contains text."""
        content = [{"type": "output_text", "text": content_text, "annotations": [], "logprobs": []}]
        return {**self._head("msg", "message"), "role": "assistant", "content": content}

    def _call_item(self, call: ToolCall) -> Item:
        """Return an item that contains a tool call, with the name and the namespace that the client
        gave to the tool. A call of a custom tool that is not a single text is an ordinary call.
        """
        function = openai_function(call)
        name, arguments = function["name"], function["arguments"]
        tool = self._names.get(name, ClientTool(name))
        named = {"call_id": call.id, "name": tool.name}
        if tool.namespace:
            named["namespace"] = tool.namespace
        values = call.arguments or {}
        if tool.custom and values.keys() == {"input"} and isinstance(values["input"], str):
            return {
                **self._head("ctc", "custom_tool_call"),
                **named,
                "input": values["input"],
            }
        return {**self._head("fc", "function_call"), **named, "arguments": arguments}
