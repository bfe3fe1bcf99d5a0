"""`Words`: the ids of ordinary text, word by word, each word encoded once by the tokenizer itself.

A byte-level BPE never merges across the places where its pre-tokenizer cuts, so the ids of a text are those of its words, in order;
and the words of tools, policies and users come again and again. Looking them up costs a tenth of encoding the text. So do whole
texts: the samples of one task read the same results from its tools. Invariants:
the ids of each word are the tokenizer's own, and the tokenizer takes each word by itself as one piece, so that its ids hang on nothing
around it; the cuts were compared with the tokenizer's, on texts made to tell one from another, before they are used (`find_words`);
what cannot be cut for certain is the caller's to encode in the ordinary way (None).
"""

from __future__ import annotations

import random
import sys
from array import array

from tokenizers import Tokenizer

from toolroll.rollout.template.word_split import ALPHABET, WordSplit, read_split

_LIMIT = 1 << 16
"""How many words are kept; then all are forgotten, and those that are still in use come back."""
_LONGEST = 64
"""Characters: what is longer (base64, a hash of hashes) does not come again."""
_TEXTS = 8 << 20
"""Bytes of whole texts and their ids that are kept in each of two generations."""
_ENTRY = 250  # bytes of an entry beside them
_SHORTEST = 32
"""Characters: a text that is shorter costs no more by its words."""


class Words:
    """The words of `tokenizer`, which nobody else may change; `split` cuts text into them."""

    def __init__(self, split: WordSplit, tokenizer: Tokenizer) -> None:
        self._split = split
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}  # str and bytes alone: the garbage collector has nothing to visit in it
        self._texts: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._room = _TEXTS

    def ids(self, text: str) -> bytes | None:
        """The ids of `text` as int32 in the machine's order; None where the text must be encoded as a whole."""
        found = self._texts.get(text)
        if found is None:
            found = self._older.get(text)
            if found is None:
                found = self._by_words(text)
            if found is not None and len(text) >= _SHORTEST:
                self._keep(text, found)
        return found

    def _keep(self, text: str, ids: bytes) -> None:
        """Remember a whole text. What was not asked for while `_TEXTS` others were is forgotten."""
        size = sys.getsizeof(text) + len(ids) + _ENTRY
        if size > _TEXTS // 8:
            return
        if size > self._room:
            self._older, self._texts, self._room = self._texts, {}, _TEXTS
        self._texts[text] = ids
        self._room -= size

    def _by_words(self, text: str) -> bytes | None:
        words = self._split.words(text)
        if words is None:
            return None
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            found = [self._look_up(word) for word in words]
        return None if None in found else b"".join(word for word in found if word is not None)

    def _look_up(self, word: str) -> bytes | None:
        found = self._known.get(word)
        if found is None:
            if len(_pieces(self._tokenizer, word)) != 1:
                return None
            found = array("i", self._tokenizer.encode(word, add_special_tokens=False).ids).tobytes()
            if len(word) <= _LONGEST:
                if len(self._known) >= _LIMIT:
                    self._known.clear()
                self._known[word] = found
        return found


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """`text` as the tokenizer's own pre-tokenizer cuts it."""
    return [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def find_words(tokenizer: Tokenizer) -> Words | None:
    """The words of `tokenizer`, which must have no control tokens; None where its way of cutting is not understood, or where it cuts a
    probe otherwise."""
    split = read_split(tokenizer)
    if split is None or any(split.words(text) != _pieces(tokenizer, text) for text in probes()):
        return None
    return Words(split, tokenizer)


_FRAGMENTS = (
    *ALPHABET,
    *"don't WE'LL I'd you've 's 'S it's HTTPServer camelCase CONST_NAME a1b2 x 0 12 123 1234 00000 3.14 -1e9 Straße".split(),
    *(" ", "  ", "   ", " " * 9, "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "\t\t", " \t ", "\n\t", "  \n  ", "...", "!?", "//", "/\n"),
    *('{"', '": "', '", "', '"}', "}\n", "},", "[{", "}]", "<|", "|>", "</", "\\n", "''", '""', "--", "=>", "#!", "$5", "@x", "_"),
)


_KINDS = "aZs1 \t\n\r/.'\"_-{<|é—\xa0"
"""One or two characters of each kind that expressions of this sort tell apart."""


def probes() -> list[str]:
    """Texts in which characters of all kinds stand beside each other in many ways; the same ones each time."""
    picks = random.Random(0)
    mixed = ["".join(picks.choices(_FRAGMENTS, k=picks.randint(1, 24))) for _ in range(400)]
    return mixed + ["".join(picks.choices(_KINDS, k=picks.randint(1, 40))) for _ in range(800)]
