"""Texts, their control tokens under a template, and messages, for the judge and the oracle.

Control tokens are those that the template itself writes. They are found in a render in which the
letters of control-token text in bodies are replaced (ROT13). Length, case and punctuation do not
change, so a template that measures, cuts or transforms the text treats both in the same way.
Imports nothing of toolroll.
"""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from support.adversarial.dialogues import Message, Messages, Tools
from tokenizers import Tokenizer

CLOSES = (
    "<|im_end|>", "<|return|>", "<|call|>", "<turn|>", "<|eot|>", "<|eot_id|>", "<|eom_id|>",
    "<|eom|>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_turn>",
    "<|end_of_text|>", "<|end|>", "<SPECIAL_12>", "<end_of_sentence>", "<seed:eos>",
)  # fmt: skip
"""The end of a turn in published models, which further markers may follow."""


Piece = tuple[str, bool]
"""Text, and whether it is a control token of the template."""


class Refused(Exception):
    """The template refuses the conversation."""


class Inapplicable(Exception):
    """The step says nothing about this template; the text says why."""


class Unclear(Inapplicable):
    """Which control tokens are the template's cannot be seen."""


@dataclass(frozen=True)
class Render:
    """A text and the places of the template's own control tokens in it."""

    text: str
    marks: tuple[tuple[int, int], ...]

    def pieces(self, start: int = 0) -> list[Piece]:
        """The text from `start` on, cut at the marks."""
        found: list[Piece] = []
        for begin, end in self.marks:
            if begin < start:
                continue
            found += [(self.text[start:begin], False), (self.text[begin:end], True)]
            start = end
        return [piece for piece in [*found, (self.text[start:], False)] if piece[0]]


class ControlTokens:
    """The control tokens of a tokenizer with a template: the special tokens, and the added tokens
    in the template's `source`. Other added tokens are words, each one token everywhere."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer, self.source = tokenizer, source
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

    def ids(self, pieces: Sequence[Piece]) -> list[int]:
        """The ids of text cut at the template's control tokens: no others are in it."""
        found: list[int] = []
        for text, is_control in pieces:
            found += [self.control[text]] if is_control else self.plain(text)
        return found

    def text(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text. Arguments are dicts, or JSON text if it takes no dicts."""
        failure: Exception | None = None
        for as_text in (False, True):
            try:
                return self.applied(
                    [with_arguments(message, as_text=as_text) for message in messages],
                    tools,
                    generate=generate,
                )
            except Exception as error:
                failure = failure or error
                if not any(message.get("tool_calls") for message in messages):
                    break
        raise Refused(str(failure)) from failure

    def applied(self, messages: Messages, tools: Tools = None, *, generate: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self.source,
                add_generation_prompt=generate,
                tokenize=False,
            )
        )

    def marked(
        self, messages: Messages, tools: Tools, *, generate: bool, as_they_are: Messages = ()
    ) -> Render:
        """The text with the places of its own control tokens, and of those in the messages of
        `as_they_are`. Raises `Refused`, `Unclear`."""
        text, offered = self.text(messages, tools, generate=generate), list(tools or ())
        kept = {id(message) for message in as_they_are}
        bodies = [message if id(message) in kept else self._masked(message) for message in messages]
        if bodies == list(messages) and self._masked(offered) == offered:
            return Render(text, tuple(found.span() for found in self.pattern.finditer(text)))
        try:
            masked = self.text(bodies, self._masked(offered), generate=generate)
        except Refused as error:
            raise Unclear("the template reads control-token text in a body, and raises") from error
        pairs = zip(text, masked, strict=False)
        if len(masked) != len(text) or any(rot13(a) != b for a, b in pairs if a != b):
            raise Unclear("the template reads control-token text in a body")
        spans = (found.span() for found in self.pattern.finditer(masked))
        return Render(text, tuple((a, b) for a, b in spans if text[a:b] == masked[a:b]))

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(lambda found: rot13(found.group()), value)
        if isinstance(value, dict):
            return {
                self._masked(key): item if key == "role" else self._masked(item)
                for key, item in value.items()
            }
        return [self._masked(item) for item in value] if isinstance(value, list | tuple) else value


def common(one: Sequence[object], other: Sequence[object]) -> int:
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
