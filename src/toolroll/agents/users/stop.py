"""Extract the user's line from a model's reply, and detect the end of the episode.

Invariant: only visible text counts. A stop marker in a simulator's reasoning does not end the
episode.
"""

from __future__ import annotations

import re
from typing import Any

from toolroll.rollout.errors import UserSimulatorError

STOP_MARKER = "###STOP###"
"""The marker that a simulated user writes to end the conversation, as in tau-bench."""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def is_stop(text: str, marker: str = STOP_MARKER) -> bool:
    """Return True if the line `text` ends the conversation."""
    return marker in text


def visible_text(text: str) -> str:
    """Return `text` without reasoning. Three forms of reasoning are removed: closed `<think>`
    blocks, an unclosed block up to the end of the text, and the text before a lone `</think>`
    (whose opening tag the chat template wrote).
    """
    text = _THOUGHT.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()


def checked_line(line: Any) -> str:
    """Return the line of a simulated user. Raises `UserSimulatorError` if it is blank or not
    text.
    """
    if not isinstance(line, str) or not line.strip():
        raise UserSimulatorError(f"the user simulator returned a blank line or no text: {line!r}")
    return line
