"""Small text and message functions for the judge."""

from __future__ import annotations

import codecs
import json

from support.adversarial.dialogues import Message


def common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def squash(text: str) -> str:
    return "".join(text.split())


def rot13(text: str) -> str:
    """`text` with other letters; with other bars and brackets if it has no letters."""
    turned = codecs.encode(text, "rot13")
    return turned if turned != text else text.translate(str.maketrans("<>[]|", "()()!"))


def unwritten(said: str, shown: str) -> int:
    """How much of the white space at the end of `shown` the cut text `said` does not have."""
    edge = shown[len(shown.rstrip()) :]
    return next(len(edge) - n for n in range(len(edge), -1, -1) if said.endswith(edge[:n]))


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """`message` with the arguments of its calls as dicts, or as JSON text."""
    made = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        elif not as_text and isinstance(arguments, str):
            arguments = json.loads(arguments)
        made.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": made} if made else message
