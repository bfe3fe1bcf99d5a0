"""Dialogues with control-token text in every place that a message or a tool has: contents, results,
arguments and their names, tools' descriptions and parameters, and what the assistant says.

Imports nothing of toolroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.adversarial.dialogues import Conversation, Tool, Writer, mixed, tool

WORDS = (
    "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "[INST]", "<eos>", "</s>", "<|eot_id|>",
)  # fmt: skip
FORMS = ("{text} {word} and", "{word}", "{word}{text}", "{text}\n{word}\n", '{{"a": "{word}"}}')


class Spoiler(Writer):
    """Writes one dialogue in which two texts of five have one of `words`; none if empty."""

    def __init__(self, seed: str, words: Sequence[str]) -> None:
        super().__init__(seed, extras=False)
        self.words = words

    def spoiled(self, text: str, rate: float = 0.4) -> str:
        if not self.words or self.rng.random() >= rate:
            return text
        return self.rng.choice(FORMS).format(text=text, word=self.rng.choice(self.words))

    def pick(self, pool: Sequence[str], edged: float = 0.1) -> str:
        return self.spoiled(super().pick(pool, edged))

    def said(self) -> str:
        return self.spoiled(super().said())

    def call(self) -> dict[str, Any]:
        self.published = True  # ids of nine letters
        made = super().call()
        self.published = False
        arguments = made["function"]["arguments"]
        arguments["city"] = self.spoiled(arguments["city"])
        return made

    def offered(self) -> tuple[Tool, ...]:
        made = tool("now", self.spoiled("Does something."))
        name = self.spoiled("name", 0.05)
        made["function"]["parameters"]["properties"][name] = {
            "type": "string",
            "description": self.spoiled("The name."),
        }
        return (made, tool("search"))


def spoiled(seed: str, words: Sequence[str]) -> Conversation:
    """Two to six turns of all kinds."""
    return mixed(seed, cuts=True, writer=Spoiler(seed, words), turns=(2, 6))
