"""`EngineRecord`: what an engine was sent and what it sampled, as an index in memory.

Only hashes of the ids are kept, and the logprobs: about 4 bytes for each sampled token, and half a
kilobyte for each answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toolroll.audit.prefix_sums import prefix_sums
from toolroll.rollout.types import LogprobArray

TOLERANCE = 1e-4
"""The difference of logprobs that is no difference: traces.jsonl rounds to four decimals."""
_Ids = npt.NDArray[np.integer]


@dataclass(slots=True)
class Answer:
    """All answers of `length` ids that have the same prompt and the same ids. `logprobs`: those of
    each answer that no row has used yet, as bytes, or None if the request asked for none.
    """

    length: int
    end: int
    logprobs: list[bytes | None] = field(default_factory=list)

    def take(self, logprobs: LogprobArray) -> bool:
        """Use one of the answers, if possible one with these logprobs. Return False if none has
        them. Values that the row or the record lacks are not compared.
        """
        for index, known in enumerate(self.logprobs):
            if known is None or not _differ(np.frombuffer(known, np.float32), logprobs):
                del self.logprobs[index]
                return True
        del self.logprobs[:1]
        return False


def _differ(known: LogprobArray, logprobs: LogprobArray) -> bool:
    return bool((np.abs(known - logprobs) > TOLERANCE).any())


class Served(NamedTuple):
    """An answer that a row contains, directly after its prompt: the tokens [start, stop)."""

    start: int
    stop: int
    answer: Answer


class EngineRecord:
    """The answers of an engine. Each answer may be used by one row.

    Example::

        record = EngineRecord()
        record.add(prompt_ids, output_ids, logprobs)
        audit(rows, record=record)
    """

    def __init__(self) -> None:
        self.answers = 0
        self.sampled_tokens = 0
        self.without_ids = 0
        """Requests that have only a text, and no tokenizer was given to encode it."""
        self._by_prompt: dict[int, list[Answer]] = {}
        self._outputs: set[int] = set()

    def add(self, prompt_ids: _Ids, output_ids: _Ids, logprobs: LogprobArray | None) -> None:
        """Add an answer. `logprobs`: float32, one for each of `output_ids`, or None."""
        if not len(output_ids):
            return
        sums = prefix_sums(np.concatenate([prompt_ids, output_ids]))
        same_prompt = self._by_prompt.setdefault(sums[len(prompt_ids)], [])
        answer = next((one for one in same_prompt if one.end == sums[-1]), None)
        if answer is None:
            answer = Answer(len(output_ids), sums[-1])
            same_prompt.append(answer)
            same_prompt.sort(key=lambda one: -one.length)
            self._outputs.add(prefix_sums(output_ids)[-1])
        answer.logprobs.append(
            None if logprobs is None else np.asarray(logprobs, np.float32).tobytes()
        )
        self.answers += 1
        self.sampled_tokens += len(output_ids)

    def places(self, ids: _Ids) -> Places:
        """Return where the row `ids` contains answers."""
        return Places(prefix_sums(ids), self._by_prompt)

    def length_of_output(self, ids: _Ids) -> int:
        """Return the length of the longest answer, to any prompt, with which `ids` begins, or 0."""
        sums = prefix_sums(ids)
        return next((n for n in range(len(ids), 0, -1) if sums[n] in self._outputs), 0)


class Places:
    """Finds the answers that one row contains. `sums`: the row's `prefix_sums`."""

    def __init__(self, sums: list[int], by_prompt: dict[int, list[Answer]]) -> None:
        self._sums = sums
        self._by_prompt = by_prompt

    def at(self, start: int) -> Iterator[Served]:
        """Yield the answers that the row contains after its first `start` tokens, longest first."""
        for answer in self._by_prompt.get(self._sums[start], ()):
            stop = start + answer.length
            if stop < len(self._sums) and self._sums[stop] == answer.end:
                yield Served(start, stop, answer)

    def all(self) -> list[Served]:
        """Return all answers that the row contains."""
        starts = [n for n, key in enumerate(self._sums) if key in self._by_prompt]
        return [served for start in starts for served in self.at(start)]

    def longest(self, start: int) -> int:
        """Return the length of the longest answer to the row's first `start` tokens, or 0."""
        return max((one.length for one in self._by_prompt.get(self._sums[start], ())), default=0)

    def chain(self, start: int, stop: int, *, unused: bool) -> list[Served] | None:
        """Return the answers that follow one another from `start` to `stop`, or None if there are
        none. An engine gives several answers for one turn if it was aborted and resumed.

        `unused`: only answers that no row has used yet.
        """
        if start == stop:
            return []
        for served in self.at(start):
            if served.stop <= stop and (served.answer.logprobs or not unused):
                rest = self.chain(served.stop, stop, unused=unused)
                if rest is not None:
                    return [served, *rest]
        return None
