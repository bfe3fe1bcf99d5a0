"""The pieces of a finished reply: its reasoning, text and calls, in the order in which the model
wrote them.

Invariant: the pieces are those that a stream of the reply sends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from toolroll.parsers.types import Delta
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.result import Choice

logger = logging.getLogger(__name__)


def pieces_of(choice: Choice) -> list[Delta]:
    """Return the pieces of a reply.

    In two cases, their order is not known, and the calls come last: the reply continues a message
    (such a reply is never streamed), or a stream could not send the reply.
    """
    if choice.shown is None and choice.stream is not None:
        try:
            return joined(choice.stream(choice))
        except ApiError as error:  # the message is right, so only a stream fails
            logger.warning("the order of text and calls is not known: %s", error)
    return list(_by_kind(choice))


def joined(steps: Iterable[Delta]) -> list[Delta]:
    """Return `steps` with neighbors of one kind joined, except calls."""
    found: list[Delta] = []
    for _, same in groupby(steps, lambda step: step.kind):
        first, *rest = same
        if first.call is not None:
            found += [first, *rest]
        else:
            found.append(replace(first, text="".join(step.text for step in (first, *rest))))
    return found


def _by_kind(choice: Choice) -> Iterator[Delta]:
    assert choice.reading is not None
    message = choice.shown or choice.reading.message
    if thought := message.get("reasoning_content"):
        yield Delta("reasoning", str(thought))
    if said := message.get("content"):
        yield Delta("content", str(said))
    for call in choice.reading.parsed.tool_calls:
        yield Delta("tool_call", call=call)
