"""Encode ASCII text by its pre-tokens, exactly as a byte-level tokenizer does.

A `tokenizers` pipeline splits a text into *pre-tokens* (about words), and encodes each one by
itself. The split takes most of the time. For ASCII text, `re` makes the same split several times
faster. The ids of a pre-token come from the tokenizer's model, and are then looked up.

Why both splits are equal:

- The normalizer does not change ASCII text, and each step of the split is a regular expression.
- `re` and the engine of `tokenizers` read the syntax that is accepted here alike. A Unicode
  property such as `\\p{L}` becomes the list of its ASCII members.
- Both are compared on a text with all pairs of ASCII characters, and all sequences of three
  characters from `_KINDS`. If one pre-token differs, `re` is not used.

All other text, and all other pipelines, are left to `tokenizers`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any

import orjson
from tokenizers import pre_tokenizers

Split = Callable[[str], list[str]]
"""Returns the pre-tokens of an ASCII text. There may be empty ones among them."""

_SYNTAX = re.compile(
    r"\\p\{(?P<property>[A-Z][a-z]?)\}"
    r"|(?P<outside>(?:[+*?]|\{[\d,]*\})[+*?{]|\)[+*{])"
    r"|(?P<same>\\[sSrnt]|\\[!-/:-@\[-`{-~]|\{\d+(?:,\d*)?\}"
    r"|\(\?:|\(\?i:(?=[]['a-z|]+\))|\(\?!\\S\))"
    r"|(?P<refused>\\|&&|\[\^?\])|(?P<one>.)",
    re.DOTALL,
)
"""One part of a regular expression. `outside` is refused outside a class: quantifiers that are not
greedy, and repeated groups. Of lookaheads, only `(?!\\S)` is accepted, and without regard to case
only ASCII letters.
"""
_REFUSED_OUTSIDE = "^$.({"
"""Characters that have other meanings outside a class, and are then refused."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The regular expression of the step `ByteLevel`."""
_NONE = "\uffff"
"""Stands for the members of a property that has none in ASCII."""
_ASCII = [chr(code) for code in range(128)]
_KINDS = "aZstrevmld'9 \n\r\t/_.\x00\x1c"
"""Characters that a tokenizer may treat differently."""
_LONGEST_RUN = 9
_LONGEST = 64
"""The maximum length of a pre-token whose ids are cached."""
_CACHED = 1 << 16
"""The maximum number of cached pre-tokens. A full cache is cleared."""


class PreTokenIds:
    """Encodes ASCII texts. `split` is the result of `ascii_split`, `encode` returns the ids of one
    pre-token, without splitting it again.
    """

    def __init__(self, split: Split, encode: Callable[[str], Sequence[int]]) -> None:
        self._split = split
        self._encode = encode
        self._ids: dict[str, Sequence[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of an ASCII text."""
        pre_tokens = self._split(text)
        try:
            return list(chain.from_iterable(map(self._ids.__getitem__, pre_tokens)))
        except KeyError:
            return list(chain.from_iterable(map(self._ids_of, pre_tokens)))

    def _ids_of(self, pre_token: str) -> Sequence[int]:
        ids = self._ids.get(pre_token)
        if ids is None:
            ids = tuple(self._encode(pre_token))
            if len(pre_token) <= _LONGEST:
                if len(self._ids) >= _CACHED:
                    self._ids = {}
                self._ids[pre_token] = ids
        return ids


@lru_cache(64)
def ascii_split(normalizer: bytes, pre_tokenizer: bytes) -> Split | None:
    """Return the split of a pipeline for ASCII text. The arguments are the JSON data of two of its
    steps, {} for none. Return None if `re` cannot make the same split.
    """
    if orjson.loads(normalizer) not in ({}, {"type": "NFC"}):
        return None
    try:
        sources = _sources(orjson.loads(pre_tokenizer))
        patterns = [re.compile(f"({source})", re.ASCII) for source in sources]
    except (_OtherStepError, re.error):
        return None
    if any(pattern.match("") for pattern in patterns):  # the engines go on differently after ""
        return None
    original = pre_tokenizers.Sequence([])
    original.__setstate__(pre_tokenizer)
    hard = "".join(map("".join, (*product(_ASCII, repeat=2), *product(_KINDS, repeat=3))))
    hard += "".join(kind * count for count in range(_LONGEST_RUN) for kind in _KINDS)
    expected = [hard[start:stop] for _, (start, stop) in original.pre_tokenize_str(hard)]
    split = partial(_split, patterns)
    return split if list(filter(None, split(hard))) == expected else None


def _split(patterns: list[re.Pattern[str]], text: str) -> list[str]:
    parts = [text]
    for pattern in patterns:
        # The group around the pattern makes `split` return its matches too.
        parts = [piece for part in parts for piece in pattern.split(part)]
    return parts


class _OtherStepError(Exception):
    """The pipeline has a step that `re` cannot replace."""


def _sources(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    """Yield a regular expression for each step that splits. Raises `_OtherStepError`."""
    *splits, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    for step in splits:
        match step:
            case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}:
                if "Regex" not in pattern:  # a literal text
                    raise _OtherStepError
                yield _for_re(pattern["Regex"])
            case _:
                raise _OtherStepError
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(use_regex)}:
            if use_regex:
                yield _for_re(_GPT2)
        case _:
            raise _OtherStepError


def _for_re(source: str) -> str:
    """Return a regular expression for `re` that equals `source` for ASCII text. Raises
    `_OtherStepError` if the two engines may read a part of it differently.
    """
    parts: list[str] = []
    in_class = False
    for match in _SYNTAX.finditer(source):
        part = match.group()
        if match["property"]:
            members = (c for c in _ASCII if unicodedata.category(c).startswith(match["property"]))
            part = re.escape("".join(members) or _NONE)
            part = part if in_class else f"[{part}]"
        elif match["refused"] or (
            part == "["  # a class in a class
            if in_class
            else match["outside"] or part in _REFUSED_OUTSIDE
        ):
            raise _OtherStepError
        elif match["one"] and part in "[]":
            in_class = part == "["
        parts.append(part)
    return "".join(parts)
