"""A trained token without a logprob, as from an engine client of one's own, reaches no trainer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.forked_episodes import result_of
from support.in_process import managed
from support.miles_mirror import Sample
from support.results import trajectory
from support.served import USER

from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import TokenError
from toolroll.rollout.types import Completion, GenerateRequest, StopReason
from toolroll.trainers.openrlhf import executor
from toolroll.trainers.sequences import training_sequences
from toolroll.trainers.slime import to_samples
from toolroll.trainers.trl import to_output
from toolroll.trainers.verl import to_fields


@pytest.mark.parametrize(
    "convert",
    [
        training_sequences,
        lambda result: to_samples(Sample(index=0), result),
        lambda result: to_output([result]),
        lambda result: to_fields(result, prompt_length=64, response_length=64),
        lambda result: executor._result(
            result.trajectories[0], executor._outcome(1.0, {}), 0, overflow=False, logprobs=True
        ),
    ],
)
def test_an_episode_is_refused_unless_it_was_aborted(convert: Any) -> None:
    """Of its two turns, the last trained token has no logprob. An aborted one trains nothing."""
    missing = trajectory()
    missing.logprobs[11] = np.nan
    with pytest.raises(TokenError, match="1 trained tokens have no logprob, the first at position"):
        convert(result_of(1.0, missing))
    (kept,) = training_sequences(result_of(1.0, missing, stop_reason=StopReason.ENGINE_ERROR))
    assert kept.trained_tokens == 0 and kept.logprobs[-1] == 0.0


class WithoutLogprobs(Engine):
    """An engine client that returns no logprobs, though they are requested."""

    async def generate(self, request: GenerateRequest, **more: Any) -> Completion:
        assert request.return_logprob
        return replace(await super().generate(request, **more), logprobs=None)


@pytest.mark.parametrize("tree", [False, True])
async def test_a_managed_session_gives_no_node(tree: bool) -> None:
    async with managed("A", tree=tree, client=WithoutLogprobs) as (_, session):
        await session.chat_completion(messages=[USER], logprobs=False)
        with pytest.raises(TokenError, match="2 trained tokens have no logprob"):
            session.get_state()
