"""Text to ids, with control tokens only where the template wrote them (I6).

A *control token* is any added token of the tokenizer that is not mere white space: `<|im_end|>`, but also the non-special
`</tool_response>`. The same characters inside a message's body are encoded as ordinary text. Text is cut only at real control
tokens: ordinary BPE merges cross a body's edge (Qwen joins `}` and `\\n`), and a canonical render has them merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

Span = tuple[int, int]
"""[start, stop) in characters."""


class Encoder:
    """Encodes rendered text with `tokenizer`, a fast one of `transformers`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast: Tokenizer = tokenizer.backend_tokenizer
        self.control: dict[str, int] = {text: index for text, index in tokenizer.get_added_vocab().items() if text.strip(" \t\r\n▁Ġ")}
        """Text of each control token -> its id."""
        ordered = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.control_ids = frozenset(self.control.values())
        flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._texts: dict[int, str] = {}
        self._eats_left = {text for text in self.control if text in flags and flags[text].lstrip}
        self._eats_right = {text for text in self.control if text in flags and flags[text].rstrip}

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same BPE without control tokens. Built on first need: a copy of a large vocabulary takes about a second."""
        data = orjson.loads(self._fast.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in self.control]
        data["post_processor"] = None
        return Tokenizer.from_str(orjson.dumps(data).decode())

    def prepare(self) -> None:
        """Build what is built on first need; call it off the event loop."""
        _ = self._plain

    def holds_control(self, text: str) -> bool:
        """Whether `text` contains the characters of a control token."""
        return self.pattern.search(text) is not None

    def eats_left(self, control: str) -> bool:
        """Whether this control token swallows the white space before it."""
        return control in self._eats_left

    def encode(self, text: str, bodies: Sequence[Span] = ()) -> list[int]:
        """The ids of `text`. Control-token characters inside `bodies` are ordinary text; no BOS is added."""
        if not bodies:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        begin = 0
        for match in self.pattern.finditer(text):
            if any(start <= match.start() and match.end() <= stop for start, stop in bodies):
                continue
            before, token = text[begin : match.start()], match.group()
            ids += self._ordinary(before.rstrip() if token in self._eats_left else before)
            ids.append(self.control[token])
            begin = match.end()
            if token in self._eats_right:
                begin += len(text[begin:]) - len(text[begin:].lstrip())
        return ids + self._ordinary(text[begin:])

    def _ordinary(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens included, nothing tidied."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return str(self._fast.decode(plain, skip_special_tokens=False))

    def text_of(self, token_id: int) -> str:
        """The text of one id by itself, remembered."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id])
        return text

    def offsets(self, ids: Sequence[int], text: str) -> list[Span]:
        """Where each id's text stands in `text`, which is `decode(ids)`.

        An id that holds only a part of a character has the span of the characters that were complete behind it.
        """
        ends = list(accumulate(map(len, map(self.text_of, ids))))
        if (not ends or ends[-1] == len(text)) and "\ufffd" not in text:
            return list(zip([0, *ends], ends, strict=False))
        ends = [len(self.decode(ids[: stop + 1]).rstrip("\ufffd")) for stop in range(len(ids))]
        return [(ends[at - 1] if at else 0, max(end, ends[at - 1] if at else 0)) for at, end in enumerate(ends)]

    def control_text(self, token_id: int) -> str | None:
        """The text of a control token, None for an ordinary id."""
        return self._control_by_id.get(token_id)

    @cached_property
    def _control_by_id(self) -> dict[int, str]:
        return {index: text for text, index in self.control.items()}
