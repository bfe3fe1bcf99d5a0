"""The pieces of a finished reply: its reasoning, text and calls, in the order in which the model
wrote them.

Invariant: if the same reply is streamed, the joined deltas of the stream are these pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from toolroll.parsers.types import Delta
from toolroll.rollout.server.answers.result import Choice
from toolroll.rollout.server.errors import ApiError

logger = logging.getLogger(__name__)


def pieces_of(choice: Choice) -> list[Delta]:
    """Return the pieces of a reply.

    In two cases, the order of the pieces is not known. Then the calls come last. The first case is
    a reply that continues an assistant message. The second is a reply that a stream could not send,
    because the stream would contradict the finished reply.
    """
    if choice.shown is None and choice.stream is not None:
        try:
            return joined(choice.stream(choice))
        except ApiError as error:  # the message is right, so only a stream fails
            logger.warning("the order of text and calls is not known: %s", error)
    return list(_by_kind(choice))


def joined(steps: Iterable[Delta]) -> list[Delta]:
    """Return the deltas `steps`. Adjacent deltas of the same kind are joined into one, except
    calls.
    """
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
