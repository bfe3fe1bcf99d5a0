"""`Player`: plays samples of slime on the model that slime's `args` name.

Invariants: no turn starts after the rollout was stopped, because slime repeats its abort requests
until the engines are idle. A failed episode is retried a limited number of times, and then reported
as aborted. The samples that slime passes are not changed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from toolroll.rollout.engine import ROUTING_KEY, Engine, Progress
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.threads import call_of_size
from toolroll.rollout.types import Completion, GenerateRequest
from toolroll.trainers.episodes import EpisodePlayer, task_index
from toolroll.trainers.parking import ParkableEpisode, ParkedEpisodes
from toolroll.trainers.slime.samples import restarts, to_samples
from toolroll.trainers.slime.settings import (
    SlimeSettings,
    attribute,
    clean_sampling_params,
    experts_shape,
    option_name,
    rollout_args,
)


def never() -> bool:
    """Return False: the rollout is not stopped."""
    return False


_STOPPED: ContextVar[Callable[[], bool]] = ContextVar("toolroll_slime_stopped", default=never)
"""The function `stopped` of the running `Player.play`. One player may play samples of several
rollouts at once, and only one of the rollouts may be stopped.
"""


def session_field(sample: Any) -> str:
    """Return the name of the field of `sample` that holds the session id. slime and miles name this
    field differently.
    """
    return "routing_key" if "routing_key" in vars(sample) else "session_id"


def _routing_key(sample: Any, session: str, affinity: int) -> str:
    """Return the key that `affinity` samples of the group share, or the session id if the group is
    not known.
    """
    if affinity == 1 or sample.group_index is None or sample.index is None:
        return session
    return f"group {sample.group_index}/{sample.index // affinity}"


def _parking_key(sample: Any, session: str) -> Hashable:
    return session, sample.index, sample.prompt


class StoppableEngine(Engine):
    """An `Engine` that sends no request for tokens once `stopped()` is True. From then on, each
    call of `generate` returns an abort without tokens.
    """

    def stopped(self) -> bool:
        """Return True if the rollout of the running episode was stopped."""
        return _STOPPED.get()()

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Return one turn. If the rollout was stopped, return an abort without tokens."""
        if self.stopped():
            empty = np.zeros(0, dtype=np.float32) if request.return_logprob else None
            return Completion(np.zeros(0, dtype=np.int32), empty, "abort")
        return await super().generate(request, progress=progress)

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post `payload`. Agents that override `_call_llm` sample with this method. So if the
        rollout was stopped, a request to `/generate` gets an abort without tokens.
        """
        if self.stopped() and url.endswith("/generate"):
            reason = {"type": "abort", "message": "the rollout was stopped"}
            meta = {"finish_reason": reason, "output_token_logprobs": [], "completion_tokens": 0}
            return {"text": "", "output_ids": [], "meta_info": meta}
        return await super().post(url, payload)


class Player:
    """Plays samples with `settings` on the model that `args` names."""

    def __init__(self, args: Any, settings: SlimeSettings) -> None:
        self.settings = settings
        self.limit = asyncio.Semaphore(settings.concurrency)
        self.model = Model.from_args(rollout_args(args, settings), engine=StoppableEngine)
        self._episodes = EpisodePlayer(self.model, settings, name=option_name, images=True)
        self.parked = ParkedEpisodes(
            most=-(-settings.max_parked // settings.workers),
            seconds=settings.parked_timeout,
            versions=settings.max_weight_versions,
        )
        self._reward_key: str | None = attribute(args, "reward_key")
        self._experts_shape = experts_shape(args)

    async def play(
        self,
        sample: Any,
        sampling_params: Mapping[str, Any],
        *,
        stopped: Callable[[], bool] = never,
        park: bool = False,
        mask: bool = False,
    ) -> list[Any]:
        """Play the sample's episode. Return one sample, or several if the episode forked. `stopped`
        is called before each turn. Once it returns True, no further turn of this episode is
        started.

        If `park` is True, an aborted episode is parked, and the sample has its tokens so far. If
        the sample's episode is parked, it is resumed. With `mask`, its tokens so far are then not
        trained.
        """
        field = session_field(sample)
        session = vars(sample)[field] or uuid.uuid4().hex
        ROUTING_KEY.set((session, _routing_key(sample, session, self.settings.affinity)))
        play = partial(
            self._episodes.play,
            task_index(sample.prompt),
            clean_sampling_params(sampling_params),
            metadata=sample.metadata,
            number=sample.index or 0,
            session_id=session,
        )
        if park:
            key = _parking_key(sample, session)
            result = await self._play_parkable(key, session, play, stopped, mask=mask)
        else:
            result = await _play_until(stopped, play)
        result.metrics["restarts"] = restarts(sample, result)
        convert = partial(
            to_samples,
            sample,
            result,
            filler=self._episodes.filler,
            reward_key=self._reward_key,
            experts_shape=self._experts_shape,
            images=self.model.template.images,
        )
        has_images = any(trajectory.media for trajectory in result.trajectories)
        samples = await call_of_size(convert, large=has_images)
        for filled in samples:
            setattr(filled, field, session)
        return samples

    async def _play_parkable(
        self,
        key: Hashable,
        session: str,
        play: Callable[..., Coroutine[Any, Any, InteractionResult]],
        stopped: Callable[[], bool],
        *,
        mask: bool,
    ) -> InteractionResult:
        """Resume the episode that is parked under `key`, or start one. Return it at its end, or
        its tokens so far when it parks.
        """
        episode = self.parked.take(key)
        if episode is not None:
            episode.resume(stopped, mask=mask)
        else:
            episode = ParkableEpisode(session, stopped)
            episode.start(_play_until(episode.stopped, partial(play, begin=episode.begin)))
        if await self.parked.until_parked(key, episode):
            return episode.so_far(self.model.template.encoder.decode)
        return episode.result()

    async def parked_metrics(self) -> dict[str, float]:
        """Return the number of parked episodes, and of dropped ones by limit."""
        return self.parked.metrics("toolroll/")

    async def close_parked(self, samples: Iterable[Any]) -> None:
        """Close the parked episodes of `samples`, which `play` returned."""
        await self.parked.close(
            [_parking_key(sample, vars(sample)[session_field(sample)]) for sample in samples]
        )

    async def abort(self) -> None:
        """Abort all running requests at the engine."""
        assert isinstance(self.model.engine, StoppableEngine)
        await self.model.engine.abort_all()

    async def aclose(self) -> None:
        """Close the parked episodes, the user simulators and the model."""
        await self.parked.aclose()
        await self._episodes.aclose()


async def _play_until(
    stopped: Callable[[], bool], play: Callable[[], Coroutine[Any, Any, InteractionResult]]
) -> InteractionResult:
    token = _STOPPED.set(stopped)
    try:
        return await play()
    finally:
        _STOPPED.reset(token)
