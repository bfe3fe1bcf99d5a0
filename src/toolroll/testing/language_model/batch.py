"""`Batch`: the sequences that the language model samples. Each step is one forward pass.
`Sequence`: one request, with its tokens and their logprobs.

Invariants: a sequence's cache contains the keys and values of its first `computed` tokens, under
the current weights. A step computes either prompts or the next token of all sequences, and prompts
come first. The batch is never used by two threads at once: the event loop changes it only between
two steps. A token that was sampled after its sequence ended is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toolroll.testing.language_model.model import KVCache, LanguageModel, Part
from toolroll.testing.language_model.sampling import (
    Sampling,
    TopLogprobs,
    log_softmax,
    sample,
    top_logprobs,
)
from toolroll.testing.language_model.weights import Tensor
from toolroll.testing.prefix_cache import common_length

_PROMPT_TOKENS = 4096
"""The maximum number of prompt tokens in one step. The running sequences wait for such a step."""
_WORTH_WAITING = 32
"""A prompt waits for another prompt of the same step if this lets it reuse more tokens than this
number.
"""
_INPUT_ROWS = 256
"""Prompt positions whose logits are computed at once."""
_FIRST_ROOM = 128
"""Sampled tokens for which a cache has room at first."""

_Ids = npt.NDArray[np.int32]
_Prefix = tuple[_Ids, KVCache]


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float
    top: TopLogprobs


class Sequence:
    """The prompt and the sampled tokens of one request.

    Args:
        limit: The maximum number of sampled tokens.
        sampled: Called in the event loop after each sampled token. It returns True if this token is
            the last.
        top: The number of top logprobs at each position.
        first_input: The first prompt position whose logprob is wanted, or None if no logprobs are
            wanted.

    Attributes:
        computed: The number of tokens whose keys and values are in `cache`.
        reused: The number of prompt tokens that were taken from the cache instead of computed. None
            before the prompt is computed.
        ended: True if no more tokens are sampled.
        error: The exception that ended the sequence, or None.
    """

    def __init__(
        self,
        prompt: _Ids,
        sampling: Sampling,
        *,
        limit: int,
        sampled: Callable[[], bool],
        top: int = 0,
        first_input: int | None = None,
    ) -> None:
        self.sampling = sampling
        self.top = top
        self.prompt_length = self.length = len(prompt)
        self.computed = 0
        self.cache: KVCache | None = None
        self.reused: int | None = None
        self.ended = False
        self.error: Exception | None = None
        self.tokens: list[Token] = []
        self.input_logprobs: list[tuple[float, TopLogprobs]] = []
        self._ids = np.empty(len(prompt) + limit, np.int32)
        self._ids[: len(prompt)] = prompt
        self._limit = limit
        self._sampled = sampled
        self._first_input = len(prompt) - 1 if first_input is None else first_input

    @property
    def ids(self) -> _Ids:
        """The prompt and the sampled tokens, as a view."""
        return self._ids[: self.length]

    @property
    def computed_ids(self) -> _Ids:
        """The tokens whose keys and values are computed, as a view."""
        return self._ids[: self.computed]

    @property
    def missing(self) -> int:
        """The number of tokens that are not computed yet."""
        return self.length - self.computed

    @property
    def room(self) -> int:
        """The number of tokens that may still be sampled."""
        return self._limit - len(self.tokens)

    @property
    def next_input(self) -> int:
        """The prompt position from whose logits the next wanted prompt logprob is computed."""
        return self._first_input + len(self.input_logprobs)

    @property
    def reusable(self) -> int:
        """The maximum number of leading tokens that need not be computed, because their logits are
        not wanted.
        """
        return min(self.length - 1, self.next_input)

    def append(self, token: Token) -> None:
        """Add a sampled token."""
        if len(self.tokens) < self._limit:
            self.tokens.append(token)
            self._ids[self.length] = token.id
            self.length += 1
        self.ended = self._sampled()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.ended = error, True
        self._sampled()


NewTokens = list[tuple[Sequence, Token]]


class Batch:
    """The running sequences. It is not thread-safe. To add a sequence, append it to `sequences`.
    `kept_tokens`: the maximum number of tokens of ended sequences whose keys and values are kept,
    for requests that continue them. The least recently used ones are dropped first.
    """

    def __init__(self, model: LanguageModel, kept_tokens: int) -> None:
        self.model = model
        self.sequences: list[Sequence] = []
        self._kept_tokens = kept_tokens
        self._ended: list[_Prefix] = []  # the last used is the last

    def step(self) -> NewTokens:
        """Remove ended sequences. Then compute prompts if there are any, or else the next token of
        all sequences. Return the sampled tokens, which the caller appends to their sequences.
        """
        self._remove_ended()
        if prompts := [sequence for sequence in self.sequences if sequence.missing > 1]:
            return self._prefill(prompts)
        return self._decode() if self.sequences else []

    def replace_model(self, model: LanguageModel) -> None:
        """Use the weights of `model`. Later steps compute all keys and values again."""
        self.model = model
        self._remove_ended()
        self._ended.clear()
        for sequence in self.sequences:
            sequence.computed = 0

    def _remove_ended(self) -> None:
        for sequence in self.sequences:
            if sequence.ended and sequence.computed and sequence.cache is not None:
                self._keep(sequence.computed_ids.copy(), sequence.cache)
        self.sequences = [each for each in self.sequences if not each.ended]

    def _keep(self, ids: _Ids, cache: KVCache) -> None:
        """Keep the keys and values of an ended sequence, and drop those that it continues."""
        self._ended = [each for each in self._ended if common_length(each[0], ids) < len(each[0])]
        self._ended.append((ids, cache))
        while sum(other.positions for _, other in self._ended) > self._kept_tokens:
            del self._ended[0]

    def _cache(self, sequence: Sequence) -> KVCache:
        """Return the sequence's cache, with room for all its tokens."""
        if sequence.cache is None:
            room = sequence.length + min(sequence.room, _FIRST_ROOM)
            sequence.cache = KVCache(self.model.config, room)
        sequence.cache.reserve(sequence.length)
        return sequence.cache

    # --- tokens -----------------------------------------------------------------------------------

    def _decode(self) -> NewTokens:
        caches = [self._cache(each) for each in self.sequences]
        ids = np.array([each.ids[-1] for each in self.sequences], np.int32)
        hidden = self.model.decode(caches, ids, [each.computed for each in self.sequences])
        for sequence in self.sequences:
            sequence.computed += 1
            sequence.reused = sequence.reused or 0
        return self._sample(self.sequences, hidden)

    def _sample(self, sequences: list[Sequence], hidden: Tensor) -> NewTokens:
        samplings = [sequence.sampling for sequence in sequences]
        logits = self.model.logits(hidden)
        ids, logprobs = sample(logits, samplings, [sequence.length for sequence in sequences])
        chosen = logprobs[np.arange(len(ids)), ids]
        return [
            (sequence, Token(index, value, top_logprobs(row, sequence.top)))
            for sequence, index, value, row in zip(
                sequences, ids.tolist(), chosen.tolist(), logprobs, strict=True
            )
        ]

    # --- prompts ----------------------------------------------------------------------------------

    def _prefill(self, prompts: list[Sequence]) -> NewTokens:
        chosen = self._chosen(prompts)
        if not chosen:  # all were computed before
            return []
        parts = [Part(self._cache(prompt), prompt.computed, ids) for prompt, ids in chosen]
        hidden = self.model.prefill(parts)
        ready, rows, end = [], [], 0
        for (sequence, _), part in zip(chosen, parts, strict=True):
            start, end = end, end + len(part.ids)
            self._score_input(sequence, part, hidden[start:end])
            sequence.computed = part.end
            if not sequence.missing:
                ready.append(sequence)
                rows.append(end - 1)
        return self._sample(ready, hidden[rows]) if ready else []

    def _chosen(self, prompts: list[Sequence]) -> list[tuple[Sequence, _Ids]]:
        """Return the prompts to compute in this step, each with the ids to compute. The keys and
        values of prefixes that are already computed are reused.
        """
        chosen: list[tuple[Sequence, _Ids]] = []
        room = _PROMPT_TOKENS
        for sequence in prompts:
            if not sequence.computed and not self._reuse(sequence, [each for each, _ in chosen]):
                continue
            if sequence.missing > 1 and room:
                ids = sequence.ids[sequence.computed : sequence.computed + room]
                chosen.append((sequence, ids))
                room -= len(ids)
        return chosen

    def _reuse(self, sequence: Sequence, chosen: list[Sequence]) -> bool:
        """Reuse the keys and values of the longest prefix that is already computed, and return
        True. If the sequence shares a much longer prefix with one of `chosen`, return False
        instead: it should wait until this prefix is computed.
        """
        prefix_ids = sequence.ids[: sequence.reusable]
        running = [(each.computed_ids, each.cache) for each in self.sequences if each.cache]
        longest = 0
        source: _Prefix | None = None
        for prefix in (*running, *self._ended):
            if (common := common_length(prefix[0], prefix_ids)) > longest:
                longest, source = common, prefix
        shared = max((common_length(each.ids, prefix_ids) for each in chosen), default=0)
        if shared > longest + _WORTH_WAITING:
            return False
        if source is not None:
            self._cache(sequence).copy_from(source[1], longest)
            self._ended.sort(key=lambda prefix: prefix is source)  # it is the last used
        sequence.computed = longest
        if sequence.reused is None:
            sequence.reused = longest
        return True

    def _score_input(self, sequence: Sequence, part: Part, hidden: Tensor) -> None:
        """Add the logprobs of prompt tokens. They are computed from the hidden states of `part`."""
        last = min(part.end, sequence.prompt_length - 1)
        for start in range(max(part.start, sequence.next_input), last, _INPUT_ROWS):
            end = min(start + _INPUT_ROWS, last)
            rows = log_softmax(self.model.logits(hidden[start - part.start : end - part.start]))
            following = sequence.ids[start + 1 : end + 1]
            for row, index in zip(rows, following.tolist(), strict=True):
                top = top_logprobs(row, sequence.top)
                sequence.input_logprobs.append((float(row[index]), top))


class Scheduler:
    """Samples all added sequences together: runs the steps of a batch in a thread, while the event
    loop stays free. `kept_tokens`: the maximum number of tokens of ended
    sequences whose keys and values stay in memory, for requests that continue these sequences.
    """

    def __init__(self, model: LanguageModel, kept_tokens: int) -> None:
        self._kept_tokens = kept_tokens
        self._batch = Batch(model, kept_tokens)
        self._joining: list[Sequence] = []
        self._lock = asyncio.Lock()  # held during a step
        self.resumed = asyncio.Event()
        """While this is not set, no step begins."""
        self.resumed.set()
        self._task: asyncio.Task[None] | None = None

    def add(self, sequence: Sequence) -> None:
        """Start to sample a sequence. Sampling goes on until the sequence has ended."""
        self._joining.append(sequence)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def replace(self, model: LanguageModel, replaced: Callable[[], None]) -> None:
        """Use the weights of `model` from the next token on. Call `replaced` before that token is
        sampled. All keys and values are computed again.
        """
        async with self._lock:
            self._batch.replace_model(model)
            replaced()

    async def aclose(self) -> None:
        """Wait until all sequences have ended."""
        self.resumed.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._joining or self._batch.sequences:
            await self.resumed.wait()
            async with self._lock:
                self._batch.sequences += self._joining
                self._joining.clear()
                try:
                    self._accept(await asyncio.to_thread(self._batch.step))
                except Exception as error:  # noqa: BLE001 - the model's border: requests report it
                    self._fail(error)

    def _accept(self, sampled: NewTokens) -> None:
        for sequence, token in sampled:
            if sequence.ended:
                sequence.computed = sequence.length - 1  # its logits are needed again
            else:
                sequence.append(token)

    def _fail(self, error: Exception) -> None:
        """End all sequences with `error`, because a failed step leaves an unknown state."""
        failed = self._batch.sequences
        self._batch = Batch(self._batch.model, self._kept_tokens)
        for sequence in failed:
            if not sequence.ended:
                sequence.fail(error)
