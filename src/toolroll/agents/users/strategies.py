"""tau-bench's four strategies for a model that plays a user, with this library's own prompts.

- `llm`: the model writes the line.
- `react`: the model writes its reasoning, then the line.
- `verify`: the same model also plays a supervisor, who judges each line. If a line is refused,
    another one is sampled.
- `reflection`: like `verify`, but the supervisor reflects on what is wrong with a refused line and
    then writes the line that replaces it.

Invariant: the agent sees only the final lines, and neither reasoning nor verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from toolroll.rollout.types import Message

UserStrategy = Literal["llm", "react", "verify", "reflection"]

REACT_FORMAT = """
Think before you speak. Answer in exactly this form, and nothing after it:

Thought:
<what you make of the last message, and what to say next; nobody else sees this>

User Response:
<the one line that is sent>"""

_JUDGE = """You watch over a simulated customer who talks with a service agent. These are the customer's orders:

{orders}

The conversation so far:

{transcript}

The customer now wants to say:

{line}

Is that what a customer with these orders would say here? It must keep to the orders, invent nothing, give away no more than was asked
for, and end the conversation (by its stop marker) neither too early nor too late. Answer with one word, yes or no."""  # noqa: E501

_REFLECT = """You watch over a simulated customer who talks with a service agent. These are the customer's orders:

{orders}

The conversation so far:

{transcript}

The customer wanted to say the following, which does not fit the orders or the conversation:

{line}

Answer in exactly this form:

Reflection:
<what is wrong with it>

User Response:
<what the customer should say instead>"""  # noqa: E501

_SPOKEN = re.compile(r"(?:^|\n)\W*(?:User )?Response:\W*?(?=\S|$)", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def spoken(text: str) -> str:
    """Return the line in a reply of the `react` form: the text after the last `User Response:`.
    Return "" if there is none.
    """
    headings = list(_SPOKEN.finditer(text))
    return text[headings[-1].end() :].strip().strip("*").strip() if headings else ""


def judging(messages: Sequence[Message], line: str) -> list[Message]:
    """Return the messages that ask the supervisor for a verdict on `line`."""
    return [{"role": "user", "content": _filled(_JUDGE, messages, line)}]


def reflecting(messages: Sequence[Message], line: str) -> list[Message]:
    """Return the messages that ask the supervisor for a line in place of `line`."""
    return [{"role": "user", "content": _filled(_REFLECT, messages, line)}]


def approves(verdict: str) -> bool:
    """Return True if the verdict accepts the line.

    The last "yes" or "no" counts. A verdict with neither accepts the line.
    """
    verdicts = _WORD.findall(verdict)
    return not verdicts or verdicts[-1].lower() == "yes"


def _filled(template: str, messages: Sequence[Message], line: str) -> str:
    """Return `template` with its placeholders filled. In `messages`, the simulator is the assistant
    and the agent is the user.
    """
    names = {"user": "Agent", "assistant": "Customer"}
    lines = [
        f"{names[m['role']]}: {m['content']}"
        for m in messages
        if m["role"] in names and m.get("content")
    ]
    parts = {
        "{orders}": str(messages[0]["content"]),
        "{transcript}": "\n".join(lines),
        "{line}": line,
    }
    # In one pass, and not with str.format, because orders and lines may contain braces.
    return re.sub(r"\{(?:orders|transcript|line)\}", lambda match: parts[match[0]], template)
