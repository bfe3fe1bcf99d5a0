"""`generate`: plays one sample's episode, for `--custom-generate-function-path`. slime's
configuration names functions, not objects. So one player per event loop and settings keeps what
calls share: the model, environments and user simulators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.trainers.episodes import PerLoop
from toolroll.trainers.slime.player import Player, never
from toolroll.trainers.slime.ray_player import RayPlayer
from toolroll.trainers.slime.samples import EpisodeSamples
from toolroll.trainers.slime.settings import (
    attribute,
    check_supported,
    lora_params,
    masks_off_policy,
    parks,
    read_settings,
    rollout_args,
)

_SLIME_LOOP = "slime.rollout.sglang_rollout"

_players: PerLoop[Player | RayPlayer] = PerLoop()


def player(args: Any) -> Player | RayPlayer:
    """Return the player for the current `args` in the running loop."""
    settings = read_settings(args)
    key = settings.model_dump_json() + rollout_args(args, settings).model_dump_json()
    make = Player if settings.workers == 1 else RayPlayer
    return _players.get(key, lambda: make(args, settings))


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
        return never
    state = module.GenerateState(args)
    return lambda: bool(state.aborted)


async def with_sample_hooks(args: Any, played: Any, *, evaluation: bool) -> Any:
    """Pass `played`, a sample or a list of samples, to slime's hooks for finished samples
    (`--rollout-sample-hook-path`), and return their result.
    """
    if not attribute(args, "rollout_sample_hook_path"):
        return played
    return await import_module("slime.rollout.sample_hooks").apply_rollout_sample_hooks(
        args, played, evaluation=evaluation
    )
