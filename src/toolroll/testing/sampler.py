"""`Sampler`: converts a policy's reply to sampled ids, and sampled ids to text.

Invariants: `output_ids` keep the stop token. `text` does not, unless `no_stop_trim` is set. A stop
string truncates the text, never the ids. At each token, stops are checked in SGLang's order:
strings, tokens, length.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, Literal

from tokenizers import Tokenizer

from toolroll.testing.policy import Reply

_REMEMBERED_TEXTS = 8192


@dataclass(frozen=True, slots=True)
class SampledReply:
    """An answer before faults and aborts. `reply_ids`: all ids of the reply, including ids after a
    stop or beyond the length limit.
    """

    ids: list[int]
    reply_ids: list[int]
    finish: dict[str, Any]
    text: str


class Sampler:
    """Encodes and decodes with one tokenizer, and applies the stops.

    `tokenizer`: a fast tokenizer of `transformers`, or a `tokenizers.Tokenizer`, which requires
    `stop_token_ids`. `split`: see `EmbeddedEngine`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int] | None,
        split: Literal["canonical", "random"],
    ) -> None:
        self.backend: Tokenizer = (
            tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
        )
        eos: int | None = None if isinstance(tokenizer, Tokenizer) else tokenizer.eos_token_id
        stops = stop_token_ids if stop_token_ids is not None else [] if eos is None else [eos]
        if not stops:
            raise ValueError(
                "the tokenizer has no end-of-sequence token: pass stop_token_ids to EmbeddedEngine"
            )
        self.stops = frozenset(stops)
        self.stop_id: int = eos if eos is not None and eos in self.stops else min(self.stops)
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1
        self._splitter = TokenSplitter(tokenizer) if split == "random" else None
        # benchmarks repeat the same texts
        self.encode = lru_cache(_REMEMBERED_TEXTS)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def reply_ids(self, reply: Reply, rng: random.Random) -> list[int]:
        """Return all ids of a reply."""
        if reply.output_ids is not None:
            return [int(index) for index in reply.output_ids]
        ids = list(self.encode(reply.text))
        if self._splitter is not None:
            ids = self._splitter.split(ids, rng)
        return [*ids, self.stop_id] if reply.stop else ids

    def stop_at(self, reply_ids: list[int], params: Mapping[str, Any], limit: int) -> SampledReply:
        """Return the answer, with its text and its finish reason. Its ids are `reply_ids` up to and
        including the first stop, but at most `limit` ids.
        """
        rules = StopRules(self, params)
        reply_text = self.decode(reply_ids[:limit]) if rules.strings else ""
        if not any(string in reply_text for string in rules.strings):
            rules.strings = []
        for last in range(len(reply_ids[:limit])):
            if finish := rules.finish_at(reply_ids, last):
                ids = reply_ids[: last + 1]
                return SampledReply(ids, reply_ids, finish, rules.text(ids, finish))
        ids = reply_ids[:limit]
        finish = {"type": "length", "length": len(ids)}
        return SampledReply(ids, reply_ids, finish, rules.text(ids, finish))

    def text(self, ids: Sequence[int], params: Mapping[str, Any]) -> str:
        """Return the text of `ids`, without special tokens unless `params` sets
        `skip_special_tokens` to False.
        """
        return self.decode(ids, skip_special_tokens=params.get("skip_special_tokens", True))


class StopRules:
    """The stop strings and stop tokens of one request. They determine where its answer ends."""

    def __init__(self, sampler: Sampler, params: Mapping[str, Any]) -> None:
        stop = params.get("stop") or ()
        self.strings = [stop] if isinstance(stop, str) else list(stop)
        self._ids = sampler.stops | set(params.get("stop_token_ids") or ())
        self._sampler = sampler
        self._params = params
        # a token has at least one byte
        self._window = max((len(string.encode()) for string in self.strings), default=0) + 1

    def finish_at(self, ids: Sequence[int], last: int) -> dict[str, Any] | None:
        """Return the finish_reason if the answer stops with `ids[at]`, else None."""
        if self.strings:
            tail = self._sampler.decode(ids[max(0, last + 1 - self._window) : last + 1])
            matched = next((string for string in self.strings if string in tail), None)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if ids[last] in self._ids and not self._params.get("ignore_eos"):
            return {"type": "stop", "matched": ids[last]}
        return None

    def text(self, ids: list[int], finish: Mapping[str, Any] | None) -> str:
        """Return the text of an answer, without the matched stop string or stop token unless
        `no_stop_trim` is set.
        """
        matched = (finish or {}).get("matched")
        trimmed = not self._params.get("no_stop_trim")
        if isinstance(matched, int):
            return self._sampler.text(ids[:-1] if trimmed else ids, self._params)
        text = self._sampler.text(ids, self._params)
        # the match may be in control tokens that are not in the text
        if matched is None or (start := text.find(matched)) < 0:
            return text
        return text[:start] if trimmed else text[: start + len(matched)]


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
        out: list[int] = []
        start = 0
        while start < len(text):
            canonical = begins.get(start)
            if canonical is not None and rng.random() >= rate:
                chosen = canonical
            else:
                last = min(start + _MAX_PIECE, len(text))
                ends = [end for end in range(start + 1, last + 1) if text[start:end] in self._ids]
                if not ends:  # only if the vocabulary lacks single bytes
                    return run
                chosen = self._ids[text[start : rng.choice(ends)]]
            out.append(chosen)
            start += len(self._piece(chosen) or "")
        return out
