"""Text to ids, with control tokens only where the template wrote them (I6).

A *control token* is any added token of the tokenizer that is not mere white space: `<|im_end|>`, but also the non-special
`</tool_response>`. The same characters inside a message's body are encoded as ordinary text. Text is cut only at real control
tokens: ordinary BPE merges cross a body's edge (Qwen joins `}` and `\\n`), and a canonical render has them merged. `encode` is the
tokenizer's own work each time; `encode_known` gives the same ids from words that were encoded before, and the tokenizer's where
those do not help.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import orjson
from tokenizers import Tokenizer

from toolroll.rollout.template.word_split import state_of
from toolroll.rollout.template.words import Words, find_words
from toolroll.rollout.types import IdArray

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""[start, stop) in characters."""


class _Ordinary:
    """Text of one tokenizer in which control tokens are text like any other.

    One for all encoders of that tokenizer: a copy of its vocabulary takes about a second, and words are worth knowing everywhere.
    What others do to the tokenizer (truncation and padding are switched on in place) does not reach the copy.
    """

    def __init__(self, fast: Tokenizer, control: Mapping[str, int], added: Mapping[str, int], *, by_words: bool) -> None:
        self.added = added
        self._control = control
        self.by_words = by_words
        self._fast = fast

    @cached_property
    def plain(self) -> Tokenizer:
        """The same BPE without control tokens."""
        data = orjson.loads(self._fast.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in self._control]
        data["post_processor"] = data["truncation"] = data["padding"] = None
        return Tokenizer.from_str(orjson.dumps(data).decode())

    @cached_property
    def words(self) -> Words | None:
        """None where ordinary text cannot be encoded word by word."""
        return find_words(self.plain) if self.by_words else None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, each time by the tokenizer."""
        return list(self.plain.encode(text, add_special_tokens=False).ids) if text else []

    def known(self, text: str) -> bytes:
        """The same as bytes, from words where they help."""
        found = self.words.ids(text) if self.words is not None else None
        return found if found is not None else as_bytes(self.encode(text))


_SHARED: WeakKeyDictionary[Any, _Ordinary] = WeakKeyDictionary()


class Encoder:
    """Encodes rendered text with `tokenizer`, a fast one of `transformers`, with the tokens that it has now: one that is added to it
    later is not seen."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast: Tokenizer = tokenizer.backend_tokenizer
        added = tokenizer.get_added_vocab()
        self.control: dict[str, int] = {text: index for text, index in added.items() if text.strip(" \t\r\n▁Ġ")}
        """Text of each control token -> its id."""
        ordered = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.control_ids = frozenset(self.control.values())
        flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._texts: dict[int, str] = {}
        self._eats_left = {text for text in self.control if text in flags and flags[text].lstrip}
        self._eats_right = {text for text in self.control if text in flags and flags[text].rstrip}
        self._text = self._shared(added)

    def _is_cut_at_control(self, added: Mapping[str, int]) -> bool:
        """Whether the tokenizer takes its added tokens out of a text wherever they are spelled, and nothing with them: then what
        stands between two of them is ordinary text. Else no text is encoded by words."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        plain = all(not token.single_word and not (token.normalized and self._fast.normalizer is not None) for token in tokens)
        spaces = self._eats_left or self._eats_right or len(added) > len(self.control)
        parts = (self._fast.pre_tokenizer, self._fast.normalizer)
        custom = any(part is not None and state_of(part)["type"] == "Custom" for part in parts)
        return plain and not spaces and not custom and not self._fast.encode_special_tokens

    def _shared(self, added: Mapping[str, int]) -> _Ordinary:
        found = _SHARED.get(self.tokenizer)
        if found is None or found.added != added:  # some may have been added since
            found = _Ordinary(self._fast, self.control, added, by_words=self._is_cut_at_control(added))
            _SHARED[self.tokenizer] = found
        return found

    def prepare(self) -> None:
        """Build what is built on first need; call it off the event loop."""
        _ = self._text.plain, self._text.words

    def give_up_words(self) -> None:
        """A check found ids that are not the tokenizer's: from here on it encodes every text itself."""
        if self._text.by_words:
            logger.error("text that was encoded word by word has other ids than the tokenizer gives it: words are given up")
        self._text.by_words, self._text.words = False, None

    def holds_control(self, text: str) -> bool:
        """Whether `text` contains the characters of a control token."""
        return self.pattern.search(text) is not None

    def eats_left(self, control: str) -> bool:
        """Whether this control token swallows the white space before it."""
        return control in self._eats_left

    def encode(self, text: str, bodies: Sequence[Span] = ()) -> list[int]:
        """The ids of `text`. Control-token characters inside `bodies` are ordinary text; no BOS is added."""
        if not bodies and self._fast.truncation is None and self._fast.padding is None:  # others switch those on in place
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        begin = 0
        for match in self._controls(text, bodies):
            before, token = text[begin : match.start()], match.group()
            ids += self._text.encode(before.rstrip() if token in self._eats_left else before)
            ids.append(self.control[token])
            begin = match.end()
            if token in self._eats_right:
                begin += len(text[begin:]) - len(text[begin:].lstrip())
        return ids + self._text.encode(text[begin:])

    def _controls(self, text: str, bodies: Sequence[Span]) -> list[re.Match[str]]:
        """The control tokens of `text` that stand in none of `bodies`."""
        found = list(self.pattern.finditer(text))
        return [it for it in found if not any(start <= it.start() and it.end() <= stop for start, stop in bodies)] if bodies else found

    def encode_known(self, text: str, bodies: Sequence[Span] = ()) -> IdArray:
        """As `encode`, as int32."""
        return from_bytes(self.encode_bytes(text, bodies))

    def encode_bytes(self, text: str, bodies: Sequence[Span] = ()) -> bytes:
        """As `encode_known`, as the bytes of the int32 in the machine's order, for a caller that joins several."""
        if self._text.words is None:
            return as_bytes(self.encode(text, bodies))
        known = self._text.known
        parts: list[bytes] = []
        begin = 0
        for match in self._controls(text, bodies):
            parts += (known(text[begin : match.start()]), self._control_bytes[match.group()])
            begin = match.end()
        return b"".join((*parts, known(text[begin:]))) if parts else known(text)

    @cached_property
    def _control_bytes(self) -> dict[str, bytes]:
        return {text: as_bytes([index]) for text, index in self.control.items()}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens included, nothing tidied."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._joins:
            text = "".join(self._texts_of(plain))
            if "\ufffd" not in text:  # else an id holds a part of a character
                return text
        return self._decode(plain)

    def _decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=False))

    @cached_property
    def _joins(self) -> bool:
        """Whether a text's bytes are those of its ids in a row: then the texts of ids that are whole characters are joined."""
        return self._fast.decoder is not None and state_of(self._fast.decoder)["type"] == "ByteLevel"

    def text_of(self, token_id: int) -> str:
        """The text of one id by itself, remembered."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([token_id])
            if text:  # an id that has none may be given one yet
                self._texts[token_id] = text
        return text

    def _texts_of(self, ids: Sequence[int]) -> list[str]:
        try:
            return list(map(self._texts.__getitem__, ids))
        except KeyError:
            return list(map(self.text_of, ids))

    def offsets(self, ids: Sequence[int], text: str) -> list[Span]:
        """Where each id's text stands in `text`, which is `decode(ids)`.

        An id that holds only a part of a character has the span of the characters that were complete behind it.
        """
        ends = list(accumulate(map(len, self._texts_of(ids))))
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


def as_bytes(ids: Sequence[int]) -> bytes:
    """`ids` as int32 in the machine's order."""
    return array("i", ids).tobytes()


def from_bytes(ids: bytes) -> IdArray:
    """The array of what `as_bytes` gives, to be written like any other."""
    return np.frombuffer(bytearray(ids), dtype=np.intc)
