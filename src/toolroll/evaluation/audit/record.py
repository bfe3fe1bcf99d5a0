"""`EngineRecord`: what an engine was sent and what it sampled, as an index in memory.

Only hashes of the ids are kept, and the logprobs: about 4 bytes for each sampled token, and 600 for
each answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolroll.rollout.types import LogprobArray

TOLERANCE = 1e-4
"""Logprobs that differ by at most this are equal: traces.jsonl rounds to four decimals."""
Ids = npt.NDArray[np.integer]


@dataclass(slots=True)
class Answer:
    """All answers of `length` ids that have the same prompt and ids. `end`: the hash of both.

    `unused`: the logprobs of each answer that no row has used yet. None: they were not requested.
    """

    length: int
    end: int
    unused: list[LogprobArray | None] = field(default_factory=list)

    def use(self, logprobs: LogprobArray) -> bool:
        """Use an answer with these logprobs, or else any. Return whether they are the answer's.
        NaN is not compared.
        """
        for index, recorded in enumerate(self.unused):
            if recorded is None or not (np.abs(recorded - logprobs) > TOLERANCE).any():
                del self.unused[index]
                return True
        del self.unused[0]
        return False


Served = tuple[int, int, Answer]
"""The tokens [start, stop) of a row that are an answer to the tokens before them; the answer."""


class EngineRecord:
    """The answers of an engine. Each may be used by one row only.

    Example::

        record = EngineRecord()
        record.add(prompt_ids, output_ids, logprobs)
        audit(rows, record=record)
    """

    def __init__(self) -> None:
        self.answers = 0
        self.sampled_tokens = 0
        self.without_ids = 0
        """Prompts that were sent as text, and that cannot be encoded as the engine did."""
        self._by_prompt: dict[int, list[Answer]] = {}
        self._outputs: set[int] = set()

    def add(self, prompt_ids: Ids, output_ids: Ids, logprobs: LogprobArray | None) -> None:
        """Add an answer. `logprobs`: float32, one for each of `output_ids`, or None."""
        if not len(output_ids):
            return
        prompt, end = prefix_sums(np.append(prompt_ids, output_ids))[[len(prompt_ids), -1]].tolist()
        same_prompt = self._by_prompt.setdefault(prompt, [])
        answer = next((candidate for candidate in same_prompt if candidate.end == end), None)
        if answer is None:
            answer = Answer(len(output_ids), end)
            same_prompt.append(answer)
            self._outputs.add(int(prefix_sums(output_ids)[-1]))
        answer.unused.append(None if logprobs is None else np.array(logprobs, np.float32))
        self.answers += 1
        self.sampled_tokens += len(output_ids)

    def after(self, sums: Sequence[int], start: int) -> Iterator[Served]:
        """Yield the answers to the first `start` tokens of the row with these `prefix_sums`, if the
        row contains them there.
        """
        for answer in self._by_prompt.get(sums[start], ()):
            stop = start + answer.length
            if stop < len(sums) and sums[stop] == answer.end:
                yield start, stop, answer

    def chain(
        self, sums: Sequence[int], start: int, stop: int, *, unused: bool
    ) -> list[Served] | None:
        """Return answers that follow one another from `start` to `stop` in a row (the last one
        comes first), or None. A turn that was aborted and resumed has several answers.

        `unused`: only answers that no row has used yet.
        """
        reached: dict[int, Served] = {}
        for position in range(start, stop):
            if position == start or position in reached:
                for served in self.after(sums, position):
                    if served[1] <= stop and (served[2].unused or not unused):
                        reached.setdefault(served[1], served)
        chain: list[Served] = []
        while stop > start and stop in reached:
            chain.append(reached[stop])
            stop = reached[stop][0]
        return chain if stop == start else None

    def longest(self, sums: Sequence[int], start: int) -> int:
        """Return the length of the longest answer to the row's first `start` tokens, or 0."""
        return max((answer.length for answer in self._by_prompt.get(sums[start], ())), default=0)

    def length_of_output(self, ids: Ids) -> int:
        """Return the length of the longest answer to any prompt with which `ids` begin, or 0."""
        sums = prefix_sums(ids).tolist()
        return next((n for n in range(len(ids), 0, -1) if sums[n] in self._outputs), 0)


_TOKEN, _PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def prefix_sums(ids: Ids) -> npt.NDArray[np.uint64]:
    """Return n + 1 numbers of 64 bits: a hash of each prefix of `ids`, from the empty one to all.

    Each pair of an id and its position adds a number that looks random (the finalizer of
    splitmix64), so two different prefixes have the same hash by accident only.
    """
    mixed = ids.astype(np.uint64) * _TOKEN + np.arange(1, len(ids) + 1, dtype=np.uint64) * _PLACE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    return np.append(np.uint64(0), np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64))
