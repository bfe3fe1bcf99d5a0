"""`ModelSource`: answers that a language model samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from toolroll.testing.generation import GenerationAborted
from toolroll.testing.language_model import LanguageModel
from toolroll.testing.language_model.batch import Scheduler, Sequence
from toolroll.testing.language_model.sampling import Sampling, check_sampling
from toolroll.testing.sampler import Sampler, StopRules
from toolroll.testing.token_source import (
    ABORTED,
    Answer,
    Report,
    TokenSource,
    Turn,
)
from toolroll.testing.wire import EngineRequest

_KEPT_TOKENS = 131072


class ModelSource(TokenSource):
    """Samples from `model`. The random numbers of a request depend on its `sampling_seed`. If it
    has none, they depend on `seed`, the routing key and `PolicyRequest.call`.
    """

    def __init__(self, model: LanguageModel, sampler: Sampler, seed: int) -> None:
        self._model = model
        self._sampler = sampler
        self._seed = seed
        self._scheduler = Scheduler(model, _KEPT_TOKENS)

    def check(self, request: EngineRequest) -> None:
        """Refuse sampling parameters that are not implemented."""
        check_sampling(request.params)

    async def update_weights(self, folder: str, updated: Callable[[], None]) -> None:
        """Load the weights in `folder`. Sampling continues while they load."""
        model = await asyncio.to_thread(self._model.updated, folder)
        await self._scheduler.replace(model, updated)

    def pause(self) -> None:
        """Sample no token until `resume`."""
        self._scheduler.resumed.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._scheduler.resumed.set()

    async def aclose(self) -> None:
        """Wait until no sequence is sampled any more."""
        await self._scheduler.aclose()

    async def sample(self, turn: Turn, report: Report | None) -> Answer:
        if turn.fault.abort_after is not None or turn.fault.weight_version is not None:
            raise ValueError("a fault with abort_after or weight_version needs scripted replies")
        turn.count_call()
        answer = _SampledAnswer(turn, StopRules(self._sampler, turn.request.params))
        seen, request = turn.seen, turn.request
        sequence = answer.sequence = Sequence(
            turn.entry.input_ids,
            Sampling.read(request.params, f"{self._seed}/{seen.routing_key}/{seen.call}"),
            limit=turn.limit,
            sampled=answer.sampled,
            top=request.top_logprobs_num if request.return_logprob else 0,
            first_input=turn.first_input,
        )
        self._scheduler.add(sequence)
        try:
            await answer.wait(report)
        except GenerationAborted:
            answer.finish = ABORTED
        finally:
            sequence.ended = True
        turn.entry.cached_tokens = sequence.reused or 0
        if sequence.error is not None:
            raise sequence.error
        return answer.part(len(sequence.tokens))


class _SampledAnswer:
    """The answer to `turn` while its tokens are sampled."""

    sequence: Sequence

    def __init__(self, turn: Turn, rules: StopRules) -> None:
        self.finish: dict[str, Any] | None = None
        self._turn = turn
        self._rules = rules
        self._ids: list[int] = []

    def sampled(self) -> bool:
        """Check the last sampled token. Return True if it ends the answer."""
        tokens, limit = self.sequence.tokens, self._turn.limit
        if self.sequence.error is None and len(tokens) > len(self._ids):
            self._ids.append(tokens[-1].id)
            self.finish = self._rules.finish_at(self._ids, len(self._ids) - 1)
        if self.finish is None and len(tokens) == limit:
            self.finish = {"type": "length", "length": limit}
        self._turn.generation.reach(len(tokens))
        return self.finish is not None

    async def wait(self, report: Report | None) -> None:
        """Wait until the answer ends. If `report` is given, call it with parts of the answer until
        then. Raise `GenerationAborted` if the request is aborted.
        """
        generation, sequence, sent = self._turn.generation, self.sequence, 0
        while report is not None:
            sent += self._turn.stream_interval
            await generation.wait_until(partial(self._reached, sent))
            if sequence.ended:
                return
            await report(self.part(sent))
        await generation.wait_until(lambda: sequence.ended)

    def _reached(self, tokens: int) -> bool:
        return self.sequence.ended or len(self.sequence.tokens) >= tokens

    def part(self, length: int) -> Answer:
        """Return the answer with its first `length` tokens."""
        finish = self.finish
        ids, tokens = self._ids[:length], self.sequence.tokens[:length]
        text = self._rules.text(ids, finish)
        scored = self.sequence.input_logprobs
        return Answer(
            ids,
            text if finish else text.rstrip("\ufffd"),  # bytes of a character that is not complete
            finish,
            [token.logprob for token in tokens],
            [token.top for token in tokens],
            [logprob for logprob, _ in scored],
            [top for _, top in scored],
        )
