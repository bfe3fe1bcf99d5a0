"""`Player`: plays slime's samples. There is one player per event loop and settings, with its own
model, environments and user simulators.

Invariants: no turn starts after the rollout was stopped, because slime repeats its abort requests
until the engines are idle. A failed episode is retried a limited number of times, and then reported
as aborted. The samples that slime passes are not changed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from toolroll.rollout.adapters.episodes import EpisodePlayer, task_index
from toolroll.rollout.adapters.slime.samples import to_samples
from toolroll.rollout.adapters.slime.settings import (
    PREFIX,
    SlimeSettings,
    attribute,
    clean_sampling_params,
    rollout_args,
)
from toolroll.rollout.engine import Engine, EngineConfig, Progress
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Completion, GenerateRequest


def _never() -> bool:
    return False


_STOPPED: ContextVar[Callable[[], bool]] = ContextVar("toolroll_slime_stopped", default=_never)
"""The function `stopped` of the running `Player.play`. One player may play samples of several
rollouts at once, and only one of the rollouts may be stopped.
"""


def _is_stopped() -> bool:
    return _STOPPED.get()()


def session_field(sample: Any) -> str:
    """Return the name of the field of `sample` that holds the session id. slime and miles name this
    field differently.
    """
    return "routing_key" if "routing_key" in vars(sample) else "session_id"


class StoppableEngine(Engine):
    """An `Engine` that sends no request for tokens once `stopped()` is True. From then on, each
    call of `generate` returns an abort without tokens.
    """

    def __init__(self, config: EngineConfig, stopped: Callable[[], bool]) -> None:
        super().__init__(config)
        self._stopped = stopped

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Return one turn. If the rollout was stopped, return an abort without tokens."""
        if self._stopped():
            empty = np.zeros(0, dtype=np.float32) if request.return_logprob else None
            return Completion(np.zeros(0, dtype=np.int32), empty, "abort")
        return await super().generate(request, progress=progress)

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post `payload`. Agents that override `_call_llm` sample with this method. So if the
        rollout was stopped, a request to `/generate` gets an abort without tokens.
        """
        if self._stopped() and url.endswith("/generate"):
            reason = {"type": "abort", "message": "the rollout was stopped"}
            meta = {"finish_reason": reason, "output_token_logprobs": [], "completion_tokens": 0}
            return {"text": "", "output_ids": [], "meta_info": meta}
        return await super().post(url, payload)


class Player:
    """Plays samples with `settings` on the model that `args` names."""

    def __init__(self, args: Any, settings: SlimeSettings) -> None:
        self.settings = settings
        self.limit = asyncio.Semaphore(settings.concurrency)
        self.served = Model.from_args(
            rollout_args(args, settings),
            engine=lambda config: StoppableEngine(config, _is_stopped),
        )
        self._episodes = EpisodePlayer(
            self.served,
            settings,
            stopped=_is_stopped,
            name=lambda field: PREFIX + field,
        )
        self._reward_key: str | None = attribute(args, "reward_key")

    async def play(
        self,
        sample: Any,
        sampling_params: Mapping[str, Any],
        *,
        stopped: Callable[[], bool] = _never,
    ) -> list[Any]:
        """Play the sample's episode. Return one sample, or several if the episode forked. `stopped`
        is called before each turn. Once it returns True, no further turn of this episode is
        started.
        """
        field = session_field(sample)
        session = vars(sample)[field] or uuid.uuid4().hex
        token = _STOPPED.set(stopped)
        try:
            result = await self._episodes.play(
                task_index(sample.prompt),
                clean_sampling_params(sampling_params),
                metadata=sample.metadata,
                number=sample.index or 0,
                session_id=session,
            )
        finally:
            _STOPPED.reset(token)
        filler = next(iter(self.served.template.stop_token_ids), 0)
        samples = to_samples(sample, result, filler=filler, reward_key=self._reward_key)
        for made in samples:
            setattr(made, field, session)
        return samples

    async def aclose(self) -> None:
        """Close the user simulators and the model."""
        await self._episodes.aclose()
