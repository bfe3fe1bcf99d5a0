"""SkyRL's own configuration, client, input and trainer: an episode through
`RayPPOTrainer.generate`, which ends with SkyRL's check of what a generator returns; and a step of
its loss.
"""

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from support import framework_engines as mirror
from support.bare import borrowed
from support.forked_episodes import episode
from support.gradients import PLAYED, SAMPLES, World, gradient, padded_logps, terms, weighted
from support.http import http_server
from support.slime_trainer import plays_the_reference
from support.verl_mirror import Keys

from toolroll.rollout.episode import InteractionResult
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import select_sequences
from toolroll.trainers.skyrl import ToolrollGenerator, generator
from toolroll.trainers.skyrl.generator import _HARMLESS, _HONORED

pytest.importorskip("torch", reason="SkyRL imports torch: install it for the CPU")
FOUND = find_spec("skyrl")
if FOUND is None or FOUND.origin is None:
    pytest.skip("pip install --no-deps skyrl", allow_module_level=True)
GYM = str(Path(FOUND.origin).parents[1] / "skyrl-gym")  # in SkyRL's wheel

SETTINGS = EpisodeSettings(env="desk", parser="hermes", verify="always")
LONGEST = 8192
REFUSED = {"batched", "chat_template", "use_conversation_multi_turn", "vision_language_generator"}
BARE = "skyrl skyrl.backends skyrl.train.generators skyrl.backends.skyrl_train.inference_servers"
"""The packages whose `__init__` imports engines, or needs Python 3.12."""


@pytest.fixture(scope="module")
def skyrl() -> Iterator[SimpleNamespace]:
    """SkyRL's modules."""
    with pytest.MonkeyPatch.context() as patch, borrowed(BARE):
        patch.syspath_prepend(GYM)
        from skyrl.backends.skyrl_train.inference_servers import (
            engine_utils,
            remote_inference_client,
        )
        from skyrl.train import config, trainer
        from skyrl.train.generators import base, utils

        yield SimpleNamespace(
            config=config, trainer=trainer, base=base, input=utils.prepare_generator_input,
            client=remote_inference_client.RemoteInferenceClient,
            sampling=engine_utils.get_sampling_params_for_backend,
        )  # fmt: skip


def test_its_settings_interface_and_output_are_theirs(skyrl: SimpleNamespace) -> None:
    """Each setting is honored, harmless or refused."""
    names = {field.name for field in dataclasses.fields(skyrl.config.GeneratorConfig)}
    assert names == _HONORED | _HARMLESS | REFUSED
    client = mirror.SkyrlClient("")
    own = ToolrollGenerator(mirror.GeneratorConfig(), load_embedded_tokenizer(), client, SETTINGS)
    assert isinstance(own, skyrl.base.GeneratorInterface)
    assert not issubclass(dict, skyrl.base.GeneratorInterface)
    fields = set(skyrl.base.GeneratorOutput.__annotations__)
    optional = {"trajectory_time_splits", "rollout_sample_support"}  # of SkyRL 0.4
    assert fields - set(own._output([], {}, with_logprobs=True)) in (set(), optional)


@pytest.mark.parametrize("step_wise", [False, True])
async def test_an_episode_passes_skyrl_s_check(skyrl: SimpleNamespace, *, step_wise: bool) -> None:
    tokenizer: Any = load_embedded_tokenizer()
    config = skyrl.config.GeneratorConfig(max_turns=12, step_wise_trajectories=step_wise)
    seen: list[dict[str, Any]] = []
    async with EmbeddedEngine(tokenizer, plays_the_reference) as engine:

        async def generate(request: web.Request) -> web.Response:
            """vLLM's route, with the embedded engine behind it."""
            asked = await request.json()
            seen.append(asked)
            answer = await mirror.SkyrlClient(engine.url).generate({
                "prompt_token_ids": [asked["token_ids"]],
                "sampling_params": asked["sampling_params"],
                "session_ids": [request.headers["X-Session-ID"]],
            })  # fmt: skip
            content = [{"logprob": value} for value in answer["response_logprobs"][0]]
            choice = {
                "token_ids": answer["response_ids"][0], "logprobs": {"content": content},
                "finish_reason": answer["stop_reasons"][0],
            }  # fmt: skip
            return web.json_response({"choices": [choice]})

        async with http_server({"/inference/v1/generate": generate}) as url:
            client = skyrl.client(url, [url], 1, tokenizer=tokenizer)
            own = ToolrollGenerator(config, tokenizer, client, SETTINGS)
            row: dict[str, Any] = {"prompt": [], "env_class": None, "uid": "a"}
            row["env_extras"] = {"index": 0}
            sampling = skyrl.sampling("vllm", config.sampling_params)
            batch, _ = skyrl.input([row], 2, sampling, "desk", "train", 0)
            trainer = SimpleNamespace(
                generator=own, all_metrics={}, cfg=SimpleNamespace(generator=config)
            )
            output = await skyrl.trainer.RayPPOTrainer.generate(trainer, batch)
            await own.aclose()
            await client.teardown()
    assert [sum(rewards) for rewards in output["rewards"]] == [1.0, 1.0]
    assert trainer.all_metrics["toolroll/aborted"] == 0.0
    assert {one["cache_salt"] for one in seen} == {"toolroll-0"} and len(seen) > 2


# --- a step ---------------------------------------------------------------------------------------


def trainer_of(tokenizer: Any, prompts: int = 1, **changes: str) -> SimpleNamespace:
    """What a step of `RayPPOTrainer` reads of it. `changes`: fields of the algorithm."""
    correction = Keys(
        tis_ratio_type="token", token_tis_ratio_clip_high=1.1, sequence_mask_metric=None,
        outlier_token_is_threshold_low=None, outlier_token_is_threshold_high=None,
        token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
    )  # fmt: skip
    algorithm = {
        "max_seq_len": LONGEST, "off_policy_correction": correction, "gamma": 1.0, "lambd": 1.0,
        "advantage_estimator": "grpo", "grpo_norm_by_std": True, "use_kl_in_reward": False,
        "advantage_batch_normalize": False, "eps_clip_low": 0.2, "eps_clip_high": 0.2,
        "policy_loss_type": "regular", "loss_reduction": "token_mean", **changes,
    }  # fmt: skip
    config = SimpleNamespace(
        algorithm=SimpleNamespace(**algorithm), train_batch_size=prompts,
        policy_mini_batch_size=prompts, micro_train_batch_size_per_gpu=1,
        critic=SimpleNamespace(model=SimpleNamespace(path=None)),
    )  # fmt: skip
    episodes = SimpleNamespace(step_wise_trajectories=True, n_samples_per_prompt=SAMPLES)
    return SimpleNamespace(
        tokenizer=tokenizer,
        all_metrics={},
        dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 1),
        cfg=SimpleNamespace(generator=episodes, trainer=config),
    )


def batch_of(skyrl: SimpleNamespace, trainer: Any, *played: list[InteractionResult]) -> Any:
    """The trainer's batch of these groups of episodes, with its advantages."""
    config = skyrl.config.GeneratorConfig(step_wise_trajectories=True)
    own = ToolrollGenerator(config, load_embedded_tokenizer(), mirror.SkyrlClient(""), SETTINGS)
    ids = [
        skyrl.base.TrajectoryID(str(task), sample)
        for task, group in enumerate(played)
        for sample in range(len(group))
    ]
    episodes = [(each, select_sequences(each, several=True)) for group in played for each in group]
    output = own._output(episodes, {"trajectory_ids": ids}, with_logprobs=True)
    skyrl.trainer.trainer_utils.validate_generator_output(len(ids), output, step_wise=True)
    steps = skyrl.trainer.RayPPOTrainer
    instances = [each.instance_id for each in output["trajectory_ids"]]
    batch = steps.convert_to_training_input(trainer, output, instances)
    batch["values"] = None  # of a critic
    return steps.compute_advantages_and_returns(trainer, batch)


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_the_gradient_of_its_loss(skyrl: SimpleNamespace, world: World, reduction: str) -> None:
    """With step-wise trajectories and truncated importance sampling."""
    trainer = trainer_of(world.tokenizer, len(PLAYED), loss_reduction=reduction)
    batch = batch_of(skyrl, trainer, *map(world.group, PLAYED))
    bounds = [batch.metadata[f"policy_{name}_boundaries"] for name in ("mini_batch", "prompt")]
    batch = skyrl.trainer.RayPPOTrainer._normalize_advantages(trainer, batch, *bounds)
    policy = world.policy()
    logps = padded_logps(policy, batch["sequences"], batch["attention_mask"])
    logps = logps[:, -batch["response_mask"].shape[1] :]
    loss, _ = skyrl.trainer.ppo_utils.ppo_policy_loss(
        logps, logps.detach(), batch["advantages"], trainer.cfg.trainer.algorithm,
        batch["loss_mask"], batch["rollout_logprobs"],
    )  # fmt: skip
    loss.backward()
    losses = []
    for group in world.played:
        tokens = {
            "token_mean": world.trained,
            "seq_mean_token_sum_norm": LONGEST * len(batch["sequences"]),
            "prompt_mean": len(PLAYED) * sum(each.tokens for each in group),
        }
        losses += terms([group], weighted(tokens[reduction], 1.1), eps=1e-6)
    world.check(gradient(policy), losses)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_an_aborted_episode_moves_no_advantage(skyrl: SimpleNamespace, estimator: str) -> None:
    """SkyRL's advantage of a group of one is its reward, so the aborted ones stay in the group: the
    last graded one gets none.
    """
    trainer = trainer_of(load_embedded_tokenizer(), advantage_estimator=estimator)
    first, *others = episode(1.0), episode(0.0), episode(1.0, forked=True)
    batches = (
        batch_of(skyrl, trainer, group)
        for group in ([first, *others], [first, episode(None), *others])
    )
    without, beside = (batch["advantages"].tolist() for batch in batches)
    assert without == beside
    if estimator == "grpo":
        assert not batch_of(skyrl, trainer, [first, episode(None)])["advantages"].any()


def test_experts_are_in_its_batch(skyrl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is at its token's position. The second sequence is padded on the left, and the last
    token of each has no row.
    """
    config = skyrl.config.GeneratorConfig()
    config.inference_engine.enable_return_routed_experts = True
    client, tokenizer = mirror.SkyrlClient("", experts=True), load_embedded_tokenizer()
    own = ToolrollGenerator(config, tokenizer, client, SETTINGS)
    model = SimpleNamespace(engine=SimpleNamespace(experts_shape=(2, 2)))
    players = SimpleNamespace(get=lambda client: SimpleNamespace(model=model))
    monkeypatch.setattr(own, "_players", players)
    rows = [[[[7, token], [token, 1]] for token in range(count)] for count in (6, 4)]
    arrays = [np.array(each, np.int32) for each in rows]
    monkeypatch.setattr(generator, "routed_experts", lambda sequence, shape: arrays[sequence])
    sequences: Any = [0, 1]
    output = skyrl.trainer.convert_prompts_responses_to_batch_tensors(
        type("Tokenizer", (), {"pad_token_id": 0, "__int__": lambda self: 0})(),
        [[1, 2, 3], [4, 5]], [[6, 7, 8, 9], [6, 7, 8]], [[0.0] * 4, [0.0] * 3],
        [[1] * 4, [1] * 3], rollout_expert_indices=own._experts(sequences),
    )  # fmt: skip
    if "rollout_sample_support" in skyrl.base.GeneratorOutput.__annotations__:  # of SkyRL 0.4
        experts = output[-2].values  # packed
        assert experts[:6].tolist() == rows[0] and experts[7:11].tolist() == rows[1]
    else:
        experts = output[-1]
        assert experts[0, :6].tolist() == rows[0] and not experts[0, 6].any()
        assert experts[1, 2:6].tolist() == rows[1] and not experts[1, [0, 1, 6]].any()
