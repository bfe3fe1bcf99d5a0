"""When a user's line ends the episode, and which part of a model's answer is a line at all.

Invariant: the stop rule looks at visible text only; a marker inside a simulator's reasoning ends
nothing.
"""

from __future__ import annotations

import re

STOP_MARKER = "###STOP###"
"""What a simulated user writes when it has nothing more to say (tau-bench's marker, which models
know).
"""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def is_stop(text: str, marker: str = STOP_MARKER) -> bool:
    """Whether the line `text` ends the conversation."""
    return marker in text


def visible_text(text: str) -> str:
    """`text` without reasoning: closed `<think>` blocks, an unclosed one to the end, and what
    stands before a lone `</think>` (the chat template wrote the opening tag)."""
    text = _THOUGHT.sub("", text)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0].strip()
