"""One conversation in three dialects: bodies of requests from a neutral history, and replies of any
dialect, streamed or not, in the neutral form.

The neutral form is OpenAI's chat messages, with `reasoning_content`.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from support import anthropic_wire, responses_wire
from support.listed_environment import TOOL

Dialect = Literal["chat", "messages", "responses"]
DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")
PATHS: Mapping[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
History = list[dict[str, Any]]


def body_of(dialect: Dialect, history: History, *, stream: bool) -> dict[str, Any]:
    """The request for a reply to `history`, whose first message is the system's."""
    if dialect == "chat":
        return {"messages": history, "tools": [TOOL], "stream": stream}
    system, said = history[0]["content"], history[1:]
    if dialect == "messages":
        return {
            "model": "m",
            "max_tokens": 1000,
            "system": system,
            "messages": _blocks(said),
            "tools": [anthropic_wire.LOOK],
            "stream": stream,
        }
    return {
        "model": "m",
        "instructions": system,
        "input": items_of(said),
        "tools": [responses_wire.LOOK],
        "stream": stream,
    }


def _blocks(history: History) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "assistant":
            blocks: list[dict[str, Any]] = []
            if message.get("reasoning_content"):
                thought = message["reasoning_content"]
                blocks.append({"type": "thinking", "thinking": thought, "signature": "x"})
            if message.get("content"):
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls") or ():
                function = call["function"]
                used = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                blocks.append({**used, "input": _input(function["arguments"])})
            found.append({"role": "assistant", "content": blocks})
            continue
        block = {"type": "text", "text": message["content"]}
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            block["content"] = message["content"]
        if found and found[-1]["role"] == "user":
            found[-1]["content"].append(block)
        else:
            found.append({"role": "user", "content": [block]})
    return found


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return {"_unparsed_arguments": arguments}


def _arguments(given: dict[str, Any]) -> str:
    unparsed = given.get("_unparsed_arguments")
    return json.dumps(given) if unparsed is None else str(unparsed)


def items_of(history: History) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in history:
        if message["role"] == "tool":
            output = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            found.append({**output, "output": message["content"]})
            continue
        if message.get("reasoning_content"):
            thought = {"type": "summary_text", "text": message["reasoning_content"]}
            found.append({"type": "reasoning", "id": "rs", "summary": [thought]})
        if message.get("content") or not (
            message.get("reasoning_content") or message.get("tool_calls")
        ):
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = [{"type": kind, "text": message["content"] or ""}]
            found.append({"type": "message", "role": message["role"], "content": content})
        for call in message.get("tool_calls") or ():
            item = {"type": "function_call", "call_id": call["id"], **call["function"]}
            found.append(item)
    return found


def reply_of(dialect: Dialect, raw: str, *, stream: bool) -> tuple[dict[str, Any], str]:
    """The reply in the neutral form, and its id."""
    answer = _streamed(dialect, raw) if stream else json.loads(raw)
    if dialect == "chat":
        message = dict(answer["choices"][0]["message"])
        message.pop("refusal", None)
        return message, answer["id"]
    message = {"role": "assistant", "content": None}
    calls = []
    for part in answer["content"] if dialect == "messages" else answer["output"]:
        if part["type"] in ("thinking", "reasoning"):
            message["reasoning_content"] = part.get("thinking") or part["summary"][0]["text"]
        elif part["type"] in ("text", "message"):
            said = part["text"] if part["type"] == "text" else part["content"][0]["text"]
            message["content"] = (message["content"] or "") + said
        else:
            given = part["arguments"] if dialect == "responses" else _arguments(part["input"])
            function = {"name": part["name"], "arguments": given}
            call_id = part.get("call_id") or part["id"]
            calls.append({"id": call_id, "type": "function", "function": function})
    return {**message, **({"tool_calls": calls} if calls else {})}, answer["id"]


def _streamed(dialect: Dialect, raw: str) -> dict[str, Any]:
    lines = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if dialect == "messages":
        return anthropic_wire.message_of(events)
    if dialect == "responses":
        return responses_wire.response_of(events)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"]
    return {"id": events[-1]["id"], "choices": [{"message": message}]}
