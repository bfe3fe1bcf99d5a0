"""Read the labels of a request. They say to which conversation, thread or turn of the client the
request belongs, which agent sent it, and what kind of request it is.

Invariant: only such labels are kept. Ids for the client's installation, device or account are
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

_KNOWN = frozenset(
    {
        "agent_name",
        "context_window_id",
        "request_kind",
        "root_turn_id",
        "session_id",
        "thread_id",
        "thread_source",
        "turn_id",
        "window_number",
    }
)

_ATTRIBUTION = "x-anthropic-billing-header"
_ATTRIBUTION_LINE = re.compile(rf"{_ATTRIBUTION}:([^\n]*)\n*")


def split_attribution(system: str) -> tuple[dict[str, str], str]:
    """Return the label in the first line of a system prompt, if there is one, and the rest of the
    prompt.

    Claude Code begins its system prompt with a line for Anthropic's servers, which contains a hash
    of the request. It is a label of the request, not a part of the conversation.
    """
    line = _ATTRIBUTION_LINE.match(system)
    if line is None:
        return {}, system
    return {_ATTRIBUTION: line[1].strip()}, system[line.end() :]


def lineage_of(metadata: Any) -> dict[str, str]:
    """Return the conversation labels in `metadata`: the names in `_KNOWN`, and names that start
    with `parent_`. Integers become text. Labels whose value is empty, or neither text nor an
    integer, are left out. `metadata` is an object, or the JSON text of an object. For anything
    else, return an empty dict.

    A value of the object may itself be the JSON text of an object (Codex's `x-codex-turn-metadata`,
    Claude Code's `user_id`). The labels in that inner object are returned too.
    """
    lineage: dict[str, str] = {}
    labels = _object(metadata)
    for name, value in labels.items():
        if name in _KNOWN or name.startswith("parent_"):
            if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
                lineage[name] = str(value)
        elif isinstance(value, str):
            inner = _object(value)
            lineage |= {key: text for key, text in lineage_of(inner).items() if key not in lineage}
    return lineage


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {}
    return value if isinstance(value, Mapping) else {}
