"""`generate`: plays one sample's episode, for `--custom-generate-function-path`. slime's
configuration names functions, not objects. So one `Player` per event loop and settings keeps what
calls share: the model, environments and user simulators.

Invariants: no turn starts after the rollout was stopped, because slime repeats its abort requests
until the engines are idle. A failed episode is retried a limited number of times, and then reported
as aborted. The samples that slime passes are not changed.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from toolroll.rollout.adapters.episodes import EpisodePlayer, PerLoop, task_index
from toolroll.rollout.adapters.parking import ParkableEpisode, ParkedEpisodes
from toolroll.rollout.adapters.slime.samples import EpisodeSamples, restarts, to_samples
from toolroll.rollout.adapters.slime.settings import (
    PREFIX,
    SlimeSettings,
    attribute,
    check_supported,
    clean_sampling_params,
    experts_shape,
    lora_params,
    masks_off_policy,
    parks,
    read_settings,
    rollout_args,
)
from toolroll.rollout.engine import Engine, EngineConfig, Progress
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Completion, GenerateRequest, InteractionResult


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


def _parking_key(sample: Any, session: str) -> Hashable:
    return session, sample.index, sample.prompt


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
        self.model = Model.from_args(
            rollout_args(args, settings),
            engine=lambda config: StoppableEngine(config, _is_stopped),
        )
        self._episodes = EpisodePlayer(
            self.model,
            settings,
            stopped=_is_stopped,
            name=lambda field: PREFIX + field,
        )
        self.parked = ParkedEpisodes(
            most=settings.max_parked,
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
        stopped: Callable[[], bool] = _never,
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
        samples = to_samples(
            sample,
            result,
            filler=self._episodes.filler,
            reward_key=self._reward_key,
            experts_shape=self._experts_shape,
        )
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

    def is_parked(self, sample: Any) -> bool:
        """Return True if the episode of `sample`, which `play` returned, is parked."""
        return _parking_key(sample, vars(sample)[session_field(sample)]) in self.parked

    async def close_parked(self, samples: Iterable[Any]) -> None:
        """Close the parked episodes of `samples`, which `play` returned."""
        for sample in samples:
            await self.parked.close(_parking_key(sample, vars(sample)[session_field(sample)]))

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


_SLIME_LOOP = "slime.rollout.sglang_rollout"

_players: PerLoop[Player] = PerLoop()


def player(args: Any) -> Player:
    """Return the player for the current `args` in the running loop."""
    settings = read_settings(args)
    key = settings.model_dump_json() + rollout_args(args, settings).model_dump_json()
    return _players.get(key, lambda: Player(args, settings))


async def aclose() -> None:
    """Close the connections of the running event loop. A trainer that ends with its process need
    not call this.
    """
    for opened in _players.pop():
        await opened.aclose()


async def generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], *, evaluation: bool = False
) -> Any:
    """Play the task whose index is `sample.prompt`. This is a custom generate function for slime,
    which miles accepts too.

    Return `EpisodeSamples`: a list with one sample, or, if the episode forked, with several samples
    that share one `rollout_id`. If `evaluation` is True, return only the first sample.

    A failure that the model did not cause gives one ABORTED sample without a reward, with a zero
    mask and `remove_sample`. If `sample` is ABORTED, its parked episode is continued, or, if there
    is none, played from the beginning. Raise `UsageError` if the settings are not valid.
    """
    return await play_sample(
        args, sample, sampling_params, evaluation=evaluation, stopped=_slime_stops(args)
    )


async def play_sample(
    args: Any,
    sample: Any,
    sampling_params: Mapping[str, Any],
    *,
    evaluation: bool,
    stopped: Callable[[], bool],
) -> Any:
    """Play the sample's episode and return what `generate` returns. `stopped` is called before each
    turn. Once it returns True, no further turn is started.
    """
    playing = player(args)
    if isinstance(sample, EpisodeSamples):  # an aborted episode from the trainer's data buffer
        sample = sample[0]
    if "rollout_top_p_token_ids" in vars(sample):  # slime's; miles' loss reads no such ids
        check_supported(args, evaluation=evaluation)
    aborted = type(sample).Status.ABORTED
    if (sample.response or sample.response_length) and sample.status is not aborted:
        raise UsageError(
            f"sample {sample.index} already has a response of {sample.response_length} tokens: "
            "only an ABORTED sample can be continued; pass the sample without a response"
        )
    samples = await playing.play(
        sample,
        {**sampling_params, **lora_params(args, sample)},
        stopped=stopped,
        park=parks(args, playing.settings) and not evaluation,
        mask=masks_off_policy(args),
    )
    # The trainer's own evaluation counts each sample of a list as an episode.
    if evaluation:
        return samples[0]
    return EpisodeSamples(samples[:1] if samples[0].status is aborted else samples)


def _slime_stops(args: Any) -> Callable[[], bool]:
    """Return a function that returns True while slime's own loop aborts its rollout."""
    module = sys.modules.get(_SLIME_LOOP)
    if module is None:  # slime's own loop is not imported: another loop calls `generate`
        return lambda: False
    state = module.GenerateState(args)
    return lambda: bool(state.aborted)


async def with_sample_hooks(args: Any, item: Any, *, evaluation: bool) -> Any:
    """Pass `made`, a sample or a list of samples, to slime's hooks for finished samples
    (`--rollout-sample-hook-path`), and return their result.
    """
    if not attribute(args, "rollout_sample_hook_path"):
        return item
    return await import_module("slime.rollout.sample_hooks").apply_rollout_sample_hooks(
        args, item, evaluation=evaluation
    )
