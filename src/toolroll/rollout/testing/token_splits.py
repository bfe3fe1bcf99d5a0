"""Random token splits of a text. A model may sample such ids, but a tokenizer would not return them
for this text.

Invariant: a split decodes to exactly the text of the ids that it replaces. Control tokens are not
split.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

from tokenizers import Tokenizer

_MAX_PIECE = 24  # maximum length in characters of vocabulary entries to use


class TokenSplitter:
    """Splits texts for one tokenizer. `tokenizer`: a fast tokenizer of `transformers`, or a
    `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend: Tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
        )
        self._decode = backend.decode
        self._piece = backend.id_to_token
        self._added = set(backend.get_added_tokens_decoder())
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._ids = {
            piece: index for piece, index in vocabulary.items() if index not in self._added
        }

    def split(self, ids: Sequence[int], rng: random.Random, *, rate: float = 0.3) -> list[int]:
        """Return other ids for the text of `ids`. At the start of each id, with the probability
        `rate`, this id is replaced with a random vocabulary entry that matches the text there.

        The decoder may look at neighboring tokens. If the result therefore does not decode to the
        same text, return `ids`.
        """
        out: list[int] = []
        for added, group in groupby(ids, lambda index: index in self._added):
            run = list(group)
            out += run if added else self._walk(run, rng, rate)
        same = self._decode(out, skip_special_tokens=False) == self._decode(
            list(ids), skip_special_tokens=False
        )
        return out if same else list(ids)

    def _walk(self, run: list[int], rng: random.Random, rate: float) -> list[int]:
        """Return other ids for the text of `run`, which contains no added tokens."""
        pieces = [self._piece(index) or "" for index in run]
        text = "".join(pieces)
        starts = accumulate(map(len, pieces[:-1]), initial=0)
        begins = dict(zip(starts, run, strict=True))
        reachable = self._reachable(text)
        out: list[int] = []
        at = 0
        while at < len(text):
            canonical = begins.get(at)
            if canonical is not None and rng.random() >= rate:
                chosen = canonical
            else:
                ends = [
                    end for end in _ends(at, text) if reachable[end] and text[at:end] in self._ids
                ]
                if not ends:
                    return run  # an id whose text is not a sequence of vocabulary entries
                chosen = self._ids[text[at : rng.choice(ends)]]
            out.append(chosen)
            at += len(self._piece(chosen) or "")
        return out

    def _reachable(self, text: str) -> list[bool]:
        """Return a list with one value per position of `text`: True if vocabulary entries can form
        the rest of the text from there. In a byte-level vocabulary, all values are True.
        """
        good = [False] * len(text) + [True]
        for at in range(len(text) - 1, -1, -1):
            good[at] = any(good[end] and text[at:end] in self._ids for end in _ends(at, text))
        return good


def _ends(at: int, text: str) -> range:
    return range(at + 1, min(at + _MAX_PIECE, len(text)) + 1)
