"""`Scheduler`: runs the steps of a batch in a thread, while the event loop stays free.

Invariants: the batch is never used by two threads at once. The event loop changes it only between
two steps. A token that was sampled after its sequence ended is dropped.
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
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._joining or self._batch.sequences:
            async with self._lock:
                self._batch.sequences += self._joining
                self._joining.clear()
                try:
                    self._accept(await asyncio.to_thread(self._batch.step))
                except Exception as error:  # noqa: BLE001 - the model's border: requests report it
                    self._fail(error)

    def _accept(self, sampled: Sampled) -> None:
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
