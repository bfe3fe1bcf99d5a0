"""tau-bench's type of action, and the published rule that converts a reply to one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.parsers.types import ToolCall

logger = logging.getLogger(__name__)

RESPOND_ACTION_NAME = "respond"
RESPOND_ACTION_FIELD_NAME = "content"


@dataclass(slots=True)
class TauAction:
    """One tool call, or one utterance (`respond`), in tau-bench's interface."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def call_to_action_sglang(calls: Sequence[Any], text_response: str) -> TauAction:
    """Return the first call as an action, or `respond` with the text if there is no call or its
    arguments are not an object: the published rule.

    `calls`: `{name, parameters}` as SGLang's parsers return them (parameters as JSON text), or
    `ToolCall`. Never raises.
    """
    respond = TauAction(RESPOND_ACTION_NAME, {RESPOND_ACTION_FIELD_NAME: text_response})
    if not calls:
        return respond
    if len(calls) > 1:
        logger.debug("%d calls in one reply: only the first becomes an action", len(calls))
    name, arguments = _read(calls[0])
    if not isinstance(arguments, dict):
        logger.warning(
            "the arguments of %s are not a JSON object: the reply becomes an utterance", name
        )
        return respond
    return TauAction(name, arguments)


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
