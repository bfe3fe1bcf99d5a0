"""Texts and messages for the judge and the oracle, and the control tokens of a template.

Imports nothing of toolroll.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from support.adversarial.dialogues import Message
from tokenizers import Tokenizer

CLOSES = (
    "<|im_end|>", "<|return|>", "<|call|>", "<turn|>", "<|eot|>", "<|eot_id|>", "<|eom_id|>",
    "<|eom|>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_turn>",
    "<|end_of_text|>", "<|end|>", "<SPECIAL_12>", "<end_of_sentence>", "<seed:eos>",
)  # fmt: skip
"""The end of a turn in published models, which further markers may follow."""


class ControlTokens:
    """The control tokens of a tokenizer with a template: the special tokens, and the added tokens
    in the template's `source`. Other added tokens are words, each one token everywhere."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer = tokenizer
        self.control: dict[str, int] = {}
        self.words: dict[str, int] = {}
        for index, token in sorted(tokenizer.added_tokens_decoder.items()):
            is_control = token.special or token.content in source
            (self.control if is_control else self.words)[token.content] = index
        self.pattern, self._word = (
            re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
            for texts in (self.control, self.words)
        )

    @cached_property
    def _without_added(self) -> Tokenizer:
        data = json.loads(self.tokenizer.backend_tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(data | {"added_tokens": [], "post_processor": None}))

    def plain(self, text: str) -> list[int]:
        """The ids of text that holds no control token, whatever it reads like."""
        ids: list[int] = []
        for part in re.split(f"({self._word.pattern})", text) if self.words else [text]:
            known = self.words.get(part)
            plain = self._without_added.encode(part, add_special_tokens=False).ids
            ids += plain if known is None else [known]
        return ids

    def careless(self, text: str) -> list[int]:
        """The ids of text in which all that reads like a control token is one."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


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
