"""`trace_rows`: the training samples in a line of `traces.jsonl`, which verifiers and prime-rl
write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.types import Message


def trace_rows(line: Mapping[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row with its place for each branch of each trace in `line`: a path from a root of the
    graph of messages to a leaf. Raise `UsageError` if `line` is no trace.
    """
    for number, trace in enumerate(line.get("traces", [line]), 1):
        try:
            nodes = trace["nodes"]
            parents = {node.get("parent") for node in nodes}
            leaves = [index for index in range(len(nodes)) if index not in parents]
            trainable = (trace.get("agent") or {}).get("trainable", True)
            for leaf in leaves if trainable else ():
                path = [nodes[leaf]]
                while path[0].get("parent") is not None:
                    path.insert(0, nodes[path[0]["parent"]])
                yield f"{place}, trace {number}, branch to node {leaf}", _row(path)
        except (LookupError, TypeError, AttributeError, StopIteration) as error:
            raise UsageError(f"{place}, trace {number} is no trace of verifiers: {error!r}") from error


def _row(path: list[dict[str, Any]]) -> dict[str, Any]:
    mask = [int(bit) for node in path for bit in node["mask"]]
    values = iter([value for node in path for value in node.get("logprobs") or ()])
    return {
        "input_ids": [index for node in path for index in node["token_ids"]],
        "loss_mask": mask,
        "logprobs": [next(values, None) if bit else None for bit in mask],
        "messages": [_message(node["message"]) for node in path],
        "tools": [
            {"type": "function", "function": {**tool, "type": None}}
            for tool in path[0].get("tools") or ()
        ],
    }


def _message(message: dict[str, Any]) -> Message:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message
