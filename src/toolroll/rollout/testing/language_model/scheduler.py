"""`Scheduler`: runs the steps of a batch in a thread, while the event loop stays free.

Invariants: the batch is never used by two threads at once. The event loop changes it only between
two steps. A token that was sampled during a pause, or after its sequence ended, is dropped. The
keys and values of the earlier tokens stay in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from toolroll.rollout.testing.language_model.batch import Batch, Sampled
from toolroll.rollout.testing.language_model.model import LanguageModel
from toolroll.rollout.testing.language_model.sequence import Sequence


class Scheduler:
    """Samples all added sequences together. `kept_tokens`: the maximum number of tokens of ended
    sequences whose keys and values stay in memory, for requests that continue these sequences.
    """

    def __init__(self, model: LanguageModel, kept_tokens: int) -> None:
        self._kept_tokens = kept_tokens
        self._batch = Batch(model, kept_tokens)
        self._joining: list[Sequence] = []
        self._lock = asyncio.Lock()  # held during a step
        self._task: asyncio.Task[None] | None = None
        self._paused = self._flush = self._retract = False

    def add(self, sequence: Sequence) -> None:
        """Start to sample a sequence. Sampling goes on until the sequence has ended."""
        self._joining.append(sequence)
        self._wake()

    def pause(self, *, retract: bool) -> None:
        """Stop sampling until `resume`. `retract`: also drop the keys and values of the running
        sequences.
        """
        self._paused = True
        self._retract |= retract

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        self._wake()

    def flush(self) -> None:
        """Drop the keys and values of ended sequences."""
        self._flush = True

    async def replace(self, model: LanguageModel, replaced: Callable[[], None]) -> None:
        """Use the weights of `model` from the next token on. Call `replaced` before that token is
        sampled. All keys and values are computed again.
        """
        async with self._lock:
            self._batch.model = model
            self._batch.retract()
            self._batch.clear_store()
            replaced()

    async def aclose(self) -> None:
        """Wait until all sequences have ended, or until a pause."""
        if self._task is not None:
            await self._task

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._paused and (self._joining or self._batch.sequences):
            async with self._lock:
                self._prepare()
                try:
                    self._accept(await asyncio.to_thread(self._batch.step))
                except Exception as error:  # noqa: BLE001 - the model's border: requests report it
                    self._fail(error)

    def _prepare(self) -> None:
        self._batch.sequences += self._joining
        self._joining.clear()
        if self._retract:
            self._batch.retract()
        if self._flush:
            self._batch.clear_store()
        self._retract = self._flush = False

    def _accept(self, sampled: Sampled) -> None:
        for sequence, token in sampled:
            if self._paused or sequence.ended:
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
