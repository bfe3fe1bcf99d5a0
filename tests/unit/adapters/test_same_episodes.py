"""Every adapter gives the same sequences and rewards for the same episodes as `EpisodePlayer`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support import framework_engines as engines
from support import miles_mirror
from support.slime_trainer import arguments

from toolroll.rollout.adapters import slime
from toolroll.rollout.adapters.areal import ToolrollWorkflow
from toolroll.rollout.adapters.episodes import EpisodePlayer, EpisodeSettings
from toolroll.rollout.adapters.miles import generate
from toolroll.rollout.adapters.sequences import most_trained, training_sequences
from toolroll.rollout.adapters.skyrl import ToolrollGenerator
from toolroll.rollout.model.config import RolloutArgs
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runs.runner import session_id
from toolroll.rollout.testing import (
    EmbeddedEngine,
    Policy,
    PolicyRequest,
    load_embedded_tokenizer,
    play_references,
)
from toolroll.rollout.types import EnvironmentOptions

TASKS = 20
SETTINGS = EpisodeSettings(env="desk", tool_call_parser="hermes", verify="always", max_turns=12)

PARAMS = {"max_new_tokens": 256, "temperature": 1.0}
SKYRL_FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")

Sequence = tuple[list[int], list[int], list[float], float | None]
"""All ids, the loss mask and the logprobs of all tokens, and the reward."""


async def lines() -> dict[str, list[str]]:
    """The replies to each task, by its first message (two tasks have the same: one fails)."""
    desk = load_environment("desk")
    tasks = desk.tasks("test")[:TASKS]
    replies = play_references(desk, tasks, samples=1, mistakes=0.6)
    found = {}
    for task in tasks:
        started: Any = desk.make(EnvironmentOptions()).reset(task, 0)
        observation = await started
        found[observation.messages[-1]["content"]] = replies[session_id(desk.name, task.id, 0)]
    return found


def policy(replies: dict[str, list[str]]) -> Policy:
    """Reply by the text alone: adapters name their sessions differently."""

    def say(request: PolicyRequest) -> str:
        said = replies[max((text for text in replies if text in request.text), key=len)]
        turn = request.text.count("<|turn|>assistant") - 1
        return said[turn] if turn < len(said) else "Goodbye."

    return say


async def player(engine: EmbeddedEngine) -> list[Sequence]:
    args = RolloutArgs(engine_url=engine.url, hf_checkpoint="embedded", tool_call_parser="hermes")
    own = EpisodePlayer(Model.from_args(args), SETTINGS)
    played = []
    for index in range(TASKS):
        result = await own.play(index, dict(PARAMS))
        one = most_trained(training_sequences(result))
        ids, before = one.prompt_ids + one.response_ids, [0] * len(one.prompt_ids)
        played.append(
            (ids, before + one.loss_mask, [0.0] * len(before) + one.logprobs, result.reward)
        )
    await own.aclose()
    return played


def trainer_args(engine: EmbeddedEngine) -> Any:
    ip, port = engine.url.removeprefix("http://").split(":")
    return arguments(
        sglang_router_ip=ip, sglang_router_port=int(port), toolroll_max_turns=12, rollout_seed=0
    )


def of_sample(sample: Any) -> Sequence:
    before = [0] * (len(sample.tokens) - sample.response_length)
    return (
        sample.tokens,
        before + sample.loss_mask,
        [0.0] * len(before) + sample.rollout_log_probs,
        sample.reward,
    )


async def with_slime(engine: EmbeddedEngine) -> list[Sequence]:
    args = trainer_args(engine)
    asked = [miles_mirror.Sample(prompt=index) for index in range(TASKS)]
    return [of_sample(await slime.generate(args, sample, dict(PARAMS))) for sample in asked]


async def with_miles(engine: EmbeddedEngine) -> list[Sequence]:
    state = miles_mirror.GenerateState(trainer_args(engine))
    asked = [
        miles_mirror.GenerateFnInput(state, miles_mirror.Sample(prompt=index), dict(PARAMS), False)
        for index in range(TASKS)
    ]
    return [of_sample((await generate(one)).samples) for one in asked]


async def with_skyrl(engine: EmbeddedEngine) -> list[Sequence]:
    config = engines.GeneratorConfig()
    config.sampling_params.max_generate_length = 256
    tokenizer = load_embedded_tokenizer()
    own = ToolrollGenerator(config, tokenizer, engines.SkyrlClient(engine.url), SETTINGS)
    ids = [engines.TrajectoryID(str(index), 0) for index in range(TASKS)]
    prompts = [[{"role": "user", "content": str(index)}] for index in range(TASKS)]
    output = await own.generate({"prompts": prompts, "trajectory_ids": ids})
    await own.aclose()
    return [
        (prompt + ids, [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs, sum(rewards))
        for prompt, ids, mask, logprobs, rewards in zip(
            *(output[name] for name in SKYRL_FIELDS), strict=True
        )
    ]


async def with_areal(engine: EmbeddedEngine) -> list[Sequence]:
    config = engines.GenerationHyperparameters(max_new_tokens=256)
    own = ToolrollWorkflow(config, load_embedded_tokenizer(), SETTINGS)
    inference = engines.ArealInference(engine.url)
    played = []
    for index in range(TASKS):
        row = await own.arun_episode(inference, {"index": index})
        assert row is not None and row["rewards"].shape == (1,)
        names = ("input_ids", "loss_mask", "logprobs")
        ids, mask, logprobs = (row[name][0].tolist() for name in names)
        played.append((ids, mask, logprobs, row["rewards"].item()))
    await own.aclose()
    return played


ADAPTERS: dict[str, Callable[[EmbeddedEngine], Awaitable[list[Sequence]]]] = {
    "slime": with_slime,
    "miles": with_miles,
    "skyrl": with_skyrl,
    "areal": with_areal,
}


@pytest.mark.parametrize("name", ADAPTERS)
async def test_the_same_episodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "areal":
        pytest.importorskip("torch", reason="AReaL takes tensors: install torch for the CPU")
    miles_mirror.install(monkeypatch)
    engines.install_areal(monkeypatch)
    async with EmbeddedEngine(load_embedded_tokenizer(), policy(await lines())) as engine:
        expected = await player(engine)
        assert await ADAPTERS[name](engine) == expected
        await slime.aclose()
    assert all(sum(mask) for _, mask, *_ in expected)
    assert {reward for *_, reward in expected} == {0.0, 1.0}
