"""Encode text to ids, with control tokens only where the template wrote them
(I6 in docs/guarantees.md).

A *control token* is an added token of the tokenizer that contains more than white space:
`<|im_end|>`, but also the non-special `</tool_response>`. The same characters inside a message body
are ordinary text. The other added tokens, such as `customer_id`, are *words*: part of the
vocabulary, as in the tokenizer itself.

A `tokenizers` pipeline first splits a text at added tokens. Then it normalizes, splits and encodes
each piece separately. `Encoder` does the same: it splits the text at the real control tokens, and
encodes each piece with a tokenizer that has the same model, steps and words but no control
tokens. The encoding of a piece depends on what precedes it: a control token, ordinary text or
nothing. A piece that follows a control token is encoded after an anchor token. So the mark for the
start of a text (`▁`) is added only if the whole pipeline adds it there. If a control token strips
the white space next to it (`lstrip` or `rstrip`), `Encoder` strips it too.

Pieces are cached by the complete input of a pure function: the piece and what precedes it. If it is
proved that `re` splits ASCII text as the tokenizer does, such a piece is encoded by its pre-tokens
(`pretokens.py`). `Encoder(tokenizer)` refuses tokenizers that work differently.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from toolroll.parsers.types import Span
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.pretokens import PreTokenIds, ascii_split
from toolroll.rollout.types import IdArray

_Place = Literal["start", "control", "text"]
"""What precedes a piece: nothing, a control token, or ordinary text."""

ORDINARY = -1
"""Represents the id of any token that is not a control token."""

_ANCHOR = f"<anchor{secrets.token_hex(8)}>"
_SPACE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
_LEFT_SPACE = re.compile(_SPACE)
_RIGHT_SPACE = re.compile(_SPACE + r"\Z")
"""White space as Unicode defines it. `tokenizers` strips it next to added tokens with `lstrip` or
`rstrip`.
"""

_PROBE = 'Is it so?  Yes:\n\n{"x": [1, 2]}\tDone.'
"""A text that the tokenizer must decode unchanged."""

_UNKNOWN = "\U0010fffd"
"""A character that no vocabulary contains."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
_BLANK = " \t\r\n▁Ġ"
_WORD_EDGE = re.compile(r"\A\w|\w\Z")

_CACHED = 4 << 20
"""The maximum size of the cache in characters. A full cache is cleared."""
_LONGEST = 1 << 16
"""The maximum length of a cached piece in characters."""
_WINDOW = 64
"""The number of ids that `TextDecoder` decodes at once."""

_TINY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_HARMLESS = frozenset({"NFC"})
"""Control tokens that match normalized text are accepted only with these normalizers. Each text is
then checked (`_check_normalized`).
"""


class Encoder:
    """Encodes rendered text with `tokenizer`, a fast tokenizer of `transformers`.

    It uses the added tokens that the tokenizer has at construction. Those in `words` (see
    `find_words`) and those of white space are encoded in every text as the tokenizer does; all
    others are control tokens. The tokenizer's truncation and padding have no effect.

    Raises `TemplateError` for a tokenizer that cannot encode a text exactly in separate pieces, or
    that does not decode a text as it was encoded.

    Example::

        encoder = Encoder(AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"))
        text = "<|im_start|>user\\nWhat is <|im_end|>?<|im_end|>\\n"
        body = text.index("<|im_end|>?")
        ids = encoder.encode(text, [(body, body + len("<|im_end|>"))])
        # the first <|im_end|> is ordinary text, the second one is the control token
    """

    def __init__(self, tokenizer: Any, *, words: Collection[str] = ()) -> None:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise TemplateError(
                f"the tokenizer {type(tokenizer).__name__} has no fast form: load it with "
                "AutoTokenizer.from_pretrained(..., use_fast=True), or convert it to tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._fast: Tokenizer = fast
        added = tokenizer.get_added_vocab()
        flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self.control: dict[str, int] = {
            text: index for text, index in added.items() if text not in words and text.strip(_BLANK)
        }
        """Maps the text of each control token to its id."""
        self.control_ids = frozenset(self.control.values())
        self.special = frozenset(
            text for text in self.control if text in flags and flags[text].special
        )
        """The texts of special control tokens. No message should contain them."""
        self.pattern = _any_of(self.control)
        self._eats_left = {text for text in self.control if text in flags and flags[text].lstrip}
        self._eats_right = {text for text in self.control if text in flags and flags[text].rstrip}
        self._eating_ids = frozenset(self.control[text] for text in self._eats_right)
        self._words = [flags[text] for text in added if text not in self.control]
        # A normalizer may write a word with ASCII characters: NFC makes the Kelvin sign a K.
        contents = {word.content for word in self._words}
        self._any_word = _any_of(contents | {normalize("NFC", text) for text in contents})
        self._match_checked = _refuse_flags(self.control, self._words, tokenizer)
        self._texts: dict[int, str] = {}
        self._pieces: dict[tuple[str, str], array[int]] = {}
        self._room = _CACHED
        if (
            self._fast.decode(self._encode_piece(_PROBE, "text"), skip_special_tokens=False)
            != _PROBE
        ):
            raise TemplateError(
                f"the tokenizer {tokenizer.name_or_path!r} does not decode text as it was encoded "
                "(it changes case or white space), so sampled text cannot be compared with what "
                "the chat template renders"
            )

    # --- encoding ---------------------------------------------------------------------------------

    def encode(
        self, text: str, bodies: Sequence[Span] = (), *, previous: int | None = None
    ) -> list[int]:
        """Return the ids of `text`. No BOS is added.

        Control-token characters inside `bodies` are ordinary text. `previous` is the id before
        `text` in its sequence, or None if the sequence begins with `text`.

        Raises `TemplateError` if ordinary text would become a control token.
        """
        if self._match_checked and not text.isascii():
            self._check_normalized(text)
        place: _Place = "start" if previous is None else "text"
        if previous in self.control_ids:
            place = "control"
        eaten = previous in self._eating_ids
        ids: list[int] = []
        begin = 0
        for match in self._controls(text, bodies):
            token = match.group()
            piece = _stripped(
                text[begin : match.start()], left=eaten, right=token in self._eats_left
            )
            ids += self._ids_of(piece, place)
            ids.append(self.control[token])
            begin, place, eaten = match.end(), "control", token in self._eats_right
        ids += self._ids_of(_stripped(text[begin:], left=eaten, right=False), place)
        return ids

    def _controls(self, text: str, bodies: Sequence[Span]) -> list[re.Match[str]]:
        """Return the control tokens of `text` that are outside `bodies`."""
        matches = list(self.pattern.finditer(text))
        for start, stop in bodies:
            matches = [match for match in matches if match.start() < start or stop < match.end()]
        return matches

    def _ids_of(self, piece: str, place: _Place) -> Sequence[int]:
        if not piece:
            return ()
        key = (piece, place)
        ids = self._pieces.get(key)
        if ids is None:
            ids = array("i", self._encode_piece(piece, place))
            if len(piece) <= _LONGEST:
                self._room -= len(piece)
                if self._room < 0:
                    self._pieces, self._room = {}, _CACHED
                self._pieces[key] = ids
        return ids

    def _encode_piece(self, piece: str, place: _Place) -> list[int]:
        fast = self.pre_tokens
        if fast is not None and piece.isascii() and self._any_word.search(piece) is None:
            return fast.encode(piece)
        return self._encode_by_pipeline(piece, place)

    @cached_property
    def pre_tokens(self) -> PreTokenIds | None:
        """Encodes ASCII text without words. None if the pipeline may encode it differently."""
        model = self._fast.model
        if not isinstance(model, BPE) or model.dropout:
            return None
        steps = map(component_state, (self._fast.normalizer, self._fast.pre_tokenizer))
        split = ascii_split(*map(orjson.dumps, steps))
        if split is None:
            return None
        # The steps would split some pre-tokens again: their context is gone.
        unsplit = Tokenizer(self._fast.model)
        unsplit.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        return PreTokenIds(split, partial(self._encode_with, unsplit))

    @property
    def method(self) -> str:
        """The way in which text is encoded: "pre-tokens" (ASCII text) or "tokenizers"."""
        return "tokenizers" if self.pre_tokens is None else "pre-tokens"

    def _encode_by_pipeline(self, piece: str, place: _Place) -> list[int]:
        if place == "control":
            return self._encode_with(self._plain, _ANCHOR + piece, first=1)
        return self._encode_with(self._plain if place == "start" else self._unprefixed, piece)

    def _encode_with(self, tokenizer: Tokenizer, text: str, *, first: int = 0) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[first:]
        if self._renumbered:
            ids = [self._renumbered.get(index, index) for index in ids]
        if not self._never.isdisjoint(ids):
            raise TemplateError(
                "a message contains ordinary text that the tokenizer encodes as a control token"
            )
        return ids

    @cached_property
    def _never(self) -> frozenset[int]:
        """The ids that ordinary text must not get: the ids of control tokens, except the ids for
        unknown characters and for single bytes.
        """
        unknown = self._plain.encode(_UNKNOWN, add_special_tokens=False).ids
        in_bytes = {index for text, index in self.control.items() if _BYTE.fullmatch(text)}
        return self.control_ids - in_bytes - set(unknown)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer without control tokens, and with the anchor. It shares the
        vocabulary.
        """
        return self._without_control(self._fast.normalizer, self._fast.pre_tokenizer)

    @cached_property
    def _unprefixed(self) -> Tokenizer:
        """`_plain` for text that continues other text: it adds no mark (`▁`) at the start."""
        parts = {"normalizer": self._fast.normalizer, "pre_tokenizer": self._fast.pre_tokenizer}
        states = {name: component_state(part) for name, part in parts.items()}
        plain = {name: _without_prefix(state) for name, state in states.items()}
        if plain == states or any(state.get("type") == "Custom" for state in states.values()):
            return self._plain
        data = {**_EMPTY, **{name: state or None for name, state in plain.items()}}
        tokenizer = Tokenizer.from_str(orjson.dumps(data).decode())
        return self._without_control(tokenizer.normalizer, tokenizer.pre_tokenizer)

    def _without_control(self, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
        tokenizer = Tokenizer(self._fast.model)
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.add_tokens([*self._words, AddedToken(_ANCHOR, normalized=False)])
        return tokenizer

    @cached_property
    def _renumbered(self) -> dict[int, int]:
        """Maps the id of each word in `_plain` to its id in `tokenizer`. Equal ids are omitted."""
        vocabulary = self.tokenizer.get_added_vocab()
        ids = ((self._plain.token_to_id(t.content), vocabulary[t.content]) for t in self._words)
        return {plain: index for plain, index in ids if plain is not None and plain != index}

    def _check_normalized(self, text: str) -> None:
        """Raise `TemplateError` if normalizing `text` adds or removes a control token."""
        normalized = self._fast.normalizer.normalize_str(text)
        if normalized != text and self.pattern.findall(normalized) != self.pattern.findall(text):
            raise TemplateError(
                "the tokenizer's normalizer would create or destroy the text of a control token in "
                "a message"
            )

    def ending_id(self, text: str) -> int | None:
        """Return the argument `previous` of `encode` for encoding a text that follows `text`."""
        if not text:
            return None
        ending = (index for mark, index in self.control.items() if text.endswith(mark))
        return next(ending, ORDINARY)

    # --- decoding ---------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, including control tokens, without clean-up."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._joins:
            text = "".join(self._texts_of(plain))
            if "\ufffd" not in text:  # otherwise an id holds part of a character
                return text
        return self._decode(plain)

    def _decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=False))

    @cached_property
    def _joins(self) -> bool:
        """True if the bytes of a text are the concatenated bytes of its ids."""
        return bool(component_state(self._fast.decoder).get("type") == "ByteLevel")

    def text_of(self, token_id: int) -> str:
        """Return the text of one id by itself. The text is cached."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([token_id])
            if text:  # an id without text may get one later
                self._texts[token_id] = text
        return text

    def _texts_of(self, ids: Sequence[int]) -> list[str]:
        try:
            return list(map(self._texts.__getitem__, ids))
        except KeyError:
            return list(map(self.text_of, ids))

    def ends_open(self, ids: Sequence[int], text: str) -> bool:
        """Return True if further ids may change the end of `text`, which is `decode(ids)`. They may
        if `text` ends with part of a character, or with a byte that is decoded together with the
        next ones.
        """
        if text.endswith("\ufffd"):
            return True
        last = self._fast.id_to_token(ids[-1]) if ids and not self._joins else None
        return last is not None and _BYTE.fullmatch(last) is not None

    def offsets(self, ids: Sequence[int], text: str) -> list[Span]:
        """Return the span of each id's text in `text`, which is `decode(ids)`.

        If an id is only part of a character, its span contains the characters that it completes,
        and may be empty.
        """
        ends = self._ends(ids, text)
        if ends is None:
            return TextDecoder(self).feed(ids, last=True)[1]
        return list(zip([0, *ends], ends, strict=False))

    def _ends(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Return where the text of each id ends in `text`. Return None if the single texts of the
        ids do not add up to `text`, or are not whole characters.
        """
        texts = self._texts_of(ids)
        # Equal lengths are not enough: a decoder may strip spaces and join bytes, and the lengths
        # may then be equal by chance.
        if "\ufffd" in text or "".join(texts) != text:
            return None
        return list(accumulate(map(len, texts)))

    def window_offsets(self, ids: Sequence[int], text: str) -> list[Span]:
        """Return `offsets(ids, text)`. If needed, decode each prefix of `ids`. The cost is then
        quadratic, so pass few ids.
        """
        ends = self._ends(ids, text)
        if ends is None:
            sizes = range(1, len(ids) + 1)
            ends = [len(self.decode(ids[:size]).rstrip("\ufffd")) for size in sizes]
        return [(start, max(end, start)) for start, end in zip([0, *ends], ends, strict=False)]


class TextDecoder:
    """Decodes ids as they arrive, with offsets. Each id is decoded a bounded number of times."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._ids: list[int] = []  # the last ids, which are decoded together
        self._known = 0  # number of leading ids of `_ids` whose text was returned
        self._size = 0  # length in characters of all text that was returned

    def feed(self, ids: Sequence[int], *, last: bool = False) -> tuple[str, list[Span]]:
        """Add `ids`. Return the new text, and the spans of its ids in all text so far.

        Text that further ids may change is returned later. If `last` is True, no ids follow, and
        all text is returned.
        """
        text: list[str] = []
        spans: list[Span] = []
        for start in range(0, len(ids), _WINDOW):
            self._ids += ids[start : start + _WINDOW]
            self._decode(text, spans, last=last and start + _WINDOW >= len(ids))
        if last and not ids:
            self._decode(text, spans, last=True)
        return "".join(text), spans

    def _decode(self, text: list[str], spans: list[Span], *, last: bool) -> None:
        returned = len(self._encoder.decode(self._ids[: self._known]))
        decoded = self._encoder.decode(self._ids)
        if not last and (len(decoded) <= returned or self._encoder.ends_open(self._ids, decoded)):
            return
        shift = self._size - returned
        offsets = self._encoder.window_offsets(self._ids, decoded)[self._known :]
        spans += [(start + shift, stop + shift) for start, stop in offsets]
        text.append(decoded[returned:])
        self._size += len(decoded) - returned
        del self._ids[: self._known]
        self._known = len(self._ids)


def as_ids(ids: Sequence[int]) -> IdArray:
    """Return `ids` as int32."""
    return np.array(ids, dtype=np.int32)


def component_state(component: Any) -> dict[str, Any]:
    """Return the JSON data of a component of a `tokenizers` pipeline. It is {} for None, and
    {"type": "Custom"} for a component that is written in Python.
    """
    if component is None:
        return {}
    try:
        return dict(orjson.loads(component.__getstate__()))
    except Exception:  # noqa: BLE001 - tokenizers raises Exception itself for Python components
        return {"type": "Custom"}


_EMPTY: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": _TINY_MODEL,
}  # fmt: skip


def _without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    """Return a component's JSON data, without the mark that it adds at a text's start."""
    for name in ("normalizers", "pretokenizers"):
        if name in state:
            parts = [_without_prefix(part) for part in state[name] if part.get("type") != "Prepend"]
            return {**state, name: parts}
    if state.get("type") == "Prepend":
        return {}
    changed = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: changed.get(name, value) for name, value in state.items()}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of `texts`. Of those that start alike, it matches the longest."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _stripped(piece: str, *, left: bool, right: bool) -> str:
    """Return `piece` without the white space that its adjacent control tokens strip."""
    if left:
        piece = piece[_LEFT_SPACE.match(piece).end() :]  # type: ignore[union-attr]
    if right:
        piece = piece[: _RIGHT_SPACE.search(piece).start()]  # type: ignore[union-attr]
    return piece


def _refuse_flags(control: Iterable[str], words: Sequence[AddedToken], tokenizer: Any) -> bool:
    """Raise `TemplateError` if the flags of an added token prevent exact encoding.

    Return True if some control tokens match normalized text. Each text must then be checked with
    `_check_normalized`.
    """
    types = _types(component_state(tokenizer.backend_tokenizer.normalizer))
    flags = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    has_blank = any(word.content != word.content.strip(_BLANK) for word in words)
    has_single = any(word.single_word for word in words)
    checked = False
    for text in control:
        token = flags.get(text)
        if token is None:
            continue
        if token.single_word or (has_single and _WORD_EDGE.search(text)):
            raise TemplateError(
                f"the token {text!r}, or a word next to it, is a token only next to certain "
                "characters (single_word=True), so its position in a text is unknown. Add it "
                "without single_word"
            )
        if token.normalized and types:
            if not types <= _HARMLESS:
                raise TemplateError(
                    f"the token {text!r} matches text only after the tokenizer's normalizer "
                    f"({', '.join(sorted(types))}) changed it (normalized=True), so its position "
                    "in a text is unknown. Add it with normalized=False"
                )
            checked = True
        if has_blank and (text[0].isspace() or token.lstrip or token.rstrip):
            raise TemplateError(
                f"the token {text!r} strips the white space next to it, but the tokenizer also has "
                "added tokens with white space at an edge, so the ids of the space are unknown"
            )
    return checked


def _types(state: dict[str, Any]) -> set[str]:
    """Return the types of the steps of a normalizer."""
    if "normalizers" in state:
        return {name for part in state["normalizers"] for name in _types(part)}
    return {str(state["type"])} if state else set()
