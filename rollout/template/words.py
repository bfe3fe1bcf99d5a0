"""`Words`: the ids of ordinary text, word by word, each word encoded once by the tokenizer itself.

A byte-level BPE never merges across the places where its pre-tokenizer cuts, so the ids of a text are those of its words, in order;
and the words of tools, policies and users come again and again. Looking them up costs a tenth of encoding the text. Invariants:
the ids of each word are the tokenizer's own; the cut was compared with the tokenizer's, on texts made to tell one from another,
before it is used (`find_words`); what cannot be cut for certain is the caller's to encode in the ordinary way (None).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from toolroll.rollout.template.word_split import ALPHABET, WordSplit, read_split

_LIMIT = 1 << 16
"""How many words are kept; then all are forgotten, and those that are still in use come back."""
_LONGEST = 64
"""Characters: what is longer (base64, a hash of hashes) does not come again."""

Encode = Callable[[str], Sequence[int]]


class Words:
    """`encode` gives the ids of one word; `split` cuts text into words."""

    def __init__(self, split: WordSplit, encode: Encode) -> None:
        self._split = split
        self._encode = encode
        self._known: dict[str, bytes] = {}  # str and bytes alone: the garbage collector has nothing to visit in it

    def ids(self, text: str) -> bytes | None:
        """The ids of `text` as int32 in the machine's order; None where the text must be encoded as a whole."""
        words = self._split.words(text)
        if words is None:
            return None
        try:
            return b"".join(map(self._known.__getitem__, words))
        except KeyError:
            return b"".join(map(self._look_up, words))

    def _look_up(self, word: str) -> bytes:
        found = self._known.get(word)
        if found is None:
            found = array("i", self._encode(word)).tobytes()
            if len(word) <= _LONGEST:
                if len(self._known) >= _LIMIT:
                    self._known.clear()
                self._known[word] = found
        return found


def find_words(tokenizer: Tokenizer, encode: Encode) -> Words | None:
    """The words of `tokenizer`; None where its way of cutting is not understood, or where a probe is cut otherwise.

    `encode` encodes text without control tokens.
    """
    split = read_split(tokenizer)
    if split is None:
        return None
    found = Words(split, encode)
    for text in probes():
        if found.ids(text) != array("i", encode(text)).tobytes():
            return None
    return found


_FRAGMENTS = (
    *ALPHABET,
    *"don't WE'LL I'd you've 's 'S it's HTTPServer camelCase CONST_NAME a1b2 x 0 12 123 1234 00000 3.14 -1e9 Straße".split(),
    *(" ", "  ", "   ", " " * 9, "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "\t\t", " \t ", "\n\t", "  \n  ", "...", "!?", "//", "/\n"),
    *('{"', '": "', '", "', '"}', "}\n", "},", "[{", "}]", "<|", "|>", "</", "\\n", "''", '""', "--", "=>", "#!", "$5", "@x", "_"),
)


def probes() -> list[str]:
    """Texts in which every kind of character stands beside every other one; the same ones each time."""
    picks = random.Random(0)
    return ["".join(picks.choices(_FRAGMENTS, k=picks.randint(1, 24))) for _ in range(600)]
