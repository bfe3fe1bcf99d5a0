"""Errors that quote megabytes: what is stored, shown and logged of them is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.client import client, flaky, refusal, request
from support.episodes import agent, serving
from support.http import completion, http_server
from support.toy_environment import PondFactory, look

from toolroll.rollout.errors import ActionError, EngineError, RolloutError, capped, describe
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Episode, Status
from toolroll.testing import Fault, fault_at

LONG = "x" * 2_000_000


def test_a_text_is_cut_and_says_how_much() -> None:
    assert capped("x" * 2200) == "x" * 2200
    assert capped("x" * 3234) == "x" * 2000 + "... (1,234 more characters)"
    assert capped(f"the engine at http://host says: {capped('x' * 3234, 1500)}").endswith(
        "(1,734 more characters)"
    )


def test_errors_and_what_is_stored_of_them() -> None:
    engine = EngineError(LONG, status=500, body=LONG)
    for error in (RolloutError(LONG), engine, ValueError(LONG)):
        assert len(orjson.dumps(describe(error))) < 5000
    assert len(str(engine)) < 2300 and len(engine.body) < 2300
    assert str(ActionError(LONG)) == LONG, "the model's observation is not cut"


@pytest.mark.parametrize("status", [400, 404, 500])
@pytest.mark.parametrize("body", [LONG.encode(), orjson.dumps({"error": {"message": LONG}})])
async def test_an_engine_that_refuses_with_megabytes(status: int, body: bytes) -> None:
    _, handle = flaky(refusal(status, body))
    async with http_server({"/generate": handle}) as url, client(url) as calls:
        with pytest.raises(EngineError) as raised:
            await calls.generate(request())
    assert raised.value.status == status
    assert len(str(raised.value)) < 2300 and len(raised.value.body) < 2300


LONG_ANSWERS: list[Callable[[dict[str, Any]], Any]] = [
    lambda answer: {**answer, "meta_info": {**answer["meta_info"], "id": LONG}},
    lambda answer: {
        **answer,
        "meta_info": {**answer["meta_info"], "finish_reason": {"type": LONG}},
    },
    lambda answer: {**answer, "text": [LONG]},
    lambda answer: {**completion([3]), "output_ids": [LONG]},
    lambda answer: {**answer, "meta_info": {**answer["meta_info"], "weight_versions": [LONG]}},
]


@pytest.mark.parametrize("spoil", LONG_ANSWERS)
async def test_an_episode_with_a_long_contradiction_is_a_short_line(
    tokenizer: Any, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faults = fault_at({0: Fault(garble=spoil)})
    config = {"retries": 0}
    episodes: list[Episode] = []
    async with serving(tokenizer, look, faults=faults, config=config) as (_, model):
        factory = PondFactory(1)
        await Runner(
            factory, lambda: agent(model), RunSettings(sampling_params={"max_new_tokens": 64})
        ).run(factory.tasks("test"), episodes.append)
    [episode] = episodes
    assert episode.result.status is Status.ABORTED
    assert len(to_line(episode)) < 20_000
    assert len(caplog.text) < 20_000


async def test_an_environment_that_fails_with_megabytes(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(task: Any, action: Any) -> None:
        raise ValueError(LONG)

    episodes: list[Episode] = []
    async with serving(tokenizer, look) as (_, model):
        factory = PondFactory(1, on_step=fail)
        await Runner(
            factory, lambda: agent(model), RunSettings(sampling_params={"max_new_tokens": 64})
        ).run(factory.tasks("test"), episodes.append)
    assert episodes[0].result.status is Status.ABORTED
    assert len(to_line(episodes[0])) < 50_000
    assert len(caplog.text) < 20_000
