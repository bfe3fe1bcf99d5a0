"""tau-bench's action type, and a function that converts a reply to an action as slime's tau-bench
example does.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.parsers.types import ToolCall

logger = logging.getLogger(__name__)

RESPOND_ACTION_NAME = "respond"
RESPOND_ACTION_FIELD_NAME = "content"


@dataclass(slots=True)
class TauAction:
    """One tool call, or one message to the user (`respond`), in tau-bench's interface."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_to_action_sglang(calls: Sequence[Any], text_response: str) -> Any:
    """Return the first call as an action. If there is no call, or if its arguments are not an
    object, return `respond` with the text.

    Each item of `calls` is a `ToolCall`, or `{name, parameters}` with JSON text as `parameters`, as
    SGLang's parsers return it. The action is tau-bench's own `Action` if tau-bench is imported,
    otherwise a `TauAction`. This function never raises an error.
    """
    kind = _action_type()
    respond = kind(name=RESPOND_ACTION_NAME, kwargs={RESPOND_ACTION_FIELD_NAME: text_response})
    if not calls:
        return respond
    if len(calls) > 1:
        logger.debug("%d calls in one reply: only the first becomes an action", len(calls))
    name, arguments = _read(calls[0])
    if not isinstance(arguments, dict):
        logger.warning(
            "the arguments of %s are not a JSON object: the reply is sent to the user as text", name
        )
        return respond
    return kind(name=name, kwargs=arguments)


def _action_type() -> Any:
    # Do not import tau_bench here: it imports litellm, which downloads its price list.
    return getattr(sys.modules.get("tau_bench.types"), "Action", TauAction)


def _read(call: Any) -> tuple[str, Any]:
    if isinstance(call, ToolCall):
        return call.name, call.arguments
    entry: Mapping[str, Any] = call if isinstance(call, Mapping) else vars(call)
    parameters = entry.get("parameters")
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except json.JSONDecodeError:
            parameters = None
    return str(entry.get("name") or ""), parameters
