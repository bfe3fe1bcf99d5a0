"""An episode that is driven from outside. tests/contract/test_tinker.py checks that its tokens are
those that were served and sampled.
"""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from support.desk_episodes import DESK, TASKS
from support.episodes import call

from toolroll.rollout.environment import EnvironmentOptions
from toolroll.rollout.errors import TokenError, UsageError
from toolroll.rollout.types import GenerateRequest, Status, StopReason
from toolroll.testing import reference_logprobs
from toolroll.trainers.driven import DrivenEpisode, DrivenPlayer, TurnByTurn
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import training_sequences

LINES = [call("search_catalog", title="Dune"), call("no_such_tool"), "Goodbye."]


def sampled(tokenizer: Any, prompt: list[int], turn: int) -> tuple[list[int], list[float]]:
    """The turn as the embedded engine samples it."""
    line = LINES[min(turn, len(LINES) - 1)]
    ids = [*tokenizer.encode(line, add_special_tokens=False), tokenizer.eos_token_id]
    return ids, reference_logprobs(prompt, ids)


def settings(**given: Any) -> EpisodeSettings:
    return EpisodeSettings(**{"context_length": 32768, "parser": "hermes", **given})


def driven(tokenizer: Any, **given: Any) -> DrivenEpisode:
    """An episode of the desk's first task."""
    return DrivenEpisode(DESK.make(EnvironmentOptions()), TASKS[0], tokenizer, settings(**given))


async def play(tokenizer: Any, episode: TurnByTurn, turns: int) -> Any:
    """Play an episode that says the last of `LINES` in the given turn."""
    prompt, turn = await episode.start(), len(LINES) - turns
    while prompt is not None:
        prompt = await episode.step(*sampled(tokenizer, prompt, turn))
        turn += 1
        await asyncio.sleep(0)
    return episode.result


async def test_the_episodes_of_a_player_do_not_mix(tokenizer: Any) -> None:
    player = DrivenPlayer(tokenizer, settings(env="desk", max_turns=4, reruns=3, seed=5))
    copy: Any = pickle.loads(pickle.dumps(player))
    plans = [(index, turns) for index in (0, 1) for turns in (1, 2, 3)]
    shared = await asyncio.gather(
        *(play(tokenizer, player.episode(index), turns) for index, turns in plans)
    )
    alone = [await play(tokenizer, copy.episode(index), turns) for index, turns in plans]
    assert player._engine.episodes == {}
    await player.aclose()
    ids, ids_alone = (
        [tuple(result.trajectories[0].input_ids.tolist()) for result in results]
        for results in (shared, alone)
    )
    assert ids == ids_alone and len(set(ids)) == 6


async def test_a_failed_episode_of_a_player_is_not_played_again(tokenizer: Any) -> None:
    player = DrivenPlayer(tokenizer, settings(env="desk", reruns=3))
    episode = player.episode(0)
    await episode.start()
    assert await episode.step([10**7], [-1.0]) is None
    assert episode.result.status is Status.ABORTED
    with pytest.raises(UsageError, match="has tasks 0 to"):
        await player.episode(10**6).start()
    await player.aclose()


async def test_an_agent_that_names_its_session_itself_shares_no_model(tokenizer: Any) -> None:
    player = DrivenPlayer(tokenizer, settings(env="desk"))
    first, second = player.episode(0), player.episode(0)
    prompt = await first.start()
    request = GenerateRequest(np.array(prompt, np.int32), {"stop_token_ids": []}, "mine")
    generating = asyncio.create_task(player._engine.generate(request))
    await asyncio.sleep(0)
    assert first.requests.get_nowait() is request
    generating.cancel()
    await second.start()
    with pytest.raises(UsageError, match="changes the session id to 'mine'"):
        await player._engine.generate(request)
    await first.aclose()
    await second.aclose()


async def test_a_turn_ends_with_a_stop_token_or_was_cut(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    for last, reason, stop_reason in (
        (102, None, StopReason.LENGTH),
        (end, None, StopReason.MAX_TURNS),
        (end, "stop", StopReason.MAX_TURNS),
        (102, "stop", StopReason.ENGINE_ERROR),
    ):
        episode = driven(tokenizer, max_turns=1)
        await episode.start()
        assert await episode.step([101, last], [-1.0, -2.0], finish_reason=reason) is None
        assert episode.result.stop_reason is stop_reason
    assert "after the id 102, which ends no turn" in episode.result.info["error"]["message"]


@pytest.mark.parametrize("context_length", [32768, None])
async def test_only_the_context_limits_a_turn(tokenizer: Any, context_length: int | None) -> None:
    episode = driven(tokenizer, context_length=context_length, max_turns=1)
    prompt = await episode.start()
    assert prompt is not None
    ids = [*tokenizer.encode("hello " * 300, add_special_tokens=False), tokenizer.eos_token_id]
    assert len(ids) > 300
    assert await episode.step(ids, [-0.5] * len(ids)) is None
    assert episode.result.stop_reason is StopReason.MAX_TURNS
    [turn] = episode.result.trajectories[0].turns
    assert turn.length == len(ids)
    room = 2**31 - 1 if context_length is None else context_length - len(prompt)
    assert turn.sampling_params["max_new_tokens"] == room


async def test_calls_in_the_wrong_order_or_without_a_logprob(tokenizer: Any) -> None:
    episode = driven(tokenizer)
    with pytest.raises(UsageError, match="no prompt is waiting"):
        await episode.step([1], [-1.0])
    with pytest.raises(UsageError, match="the episode is not over"):
        _ = episode.result
    await episode.start()
    with pytest.raises(UsageError, match="was started already"):
        await episode.start()
    assert await episode.step([101, 102], [-1.0]) is None
    assert episode.result.reward is None
    assert "logprobs for 2 sampled ids" in episode.result.info["error"]["message"]


async def test_logprobs_may_be_missing_but_not_trained(tokenizer: Any) -> None:
    """All those of a turn, which are NaN then."""
    episode = driven(tokenizer, max_turns=3, verify="always")
    prompt = await episode.start()
    for turn in range(3):
        assert prompt is not None
        ids, logprobs = sampled(tokenizer, prompt, turn)
        given = logprobs if turn == 1 else None
        prompt = await episode.step(ids, given, weight_version="7")
    [trajectory] = episode.result.trajectories
    first, second, third = trajectory.turns
    missing = np.isnan(trajectory.logprobs)
    assert missing[first.start : first.stop].all() and missing[third.start : third.stop].all()
    assert not missing[second.start : second.stop].any()
    assert [turn.excluded for turn in trajectory.turns] == [None, None, None]
    assert trajectory.trained_tokens == sum(turn.length for turn in trajectory.turns)
    assert {span.version for span in trajectory.weight_versions} == {"7"}
    assert episode.result.logprobs is None
    with pytest.raises(TokenError, match="trained tokens have no logprob"):
        training_sequences(episode.result)
