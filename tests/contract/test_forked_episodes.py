"""Forked and aborted episodes in the trainers' own advantages and losses: an episode counts once,
however many sequences it has, and an aborted one moves no other.

The policy is one row of logits, so that a token's logprob does not depend on its context. Two ways
to write the same trained tokens then have the same gradient if and only if they weigh the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from support import areal
from support.forked_episodes import VOCAB, episode, result_of, sequence
from support.framework_engines import GeneratorConfig, SkyrlClient, TrajectoryID
from support.trainer_source import theirs

from toolroll.rollout.runs.summary import trie_tokens
from toolroll.rollout.types import InteractionResult
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.advantages import group_advantages
from toolroll.trainers.areal import ToolrollWorkflow
from toolroll.trainers.areal.workflow import _tensors
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import select_sequences
from toolroll.trainers.skyrl import ToolrollGenerator
from toolroll.trainers.verl import to_fields
from toolroll.trainers.verl.agent_loop import counts_once

torch = pytest.importorskip("torch", reason="the trainers' losses need torch for the CPU")

KEPT = ("input_ids", "attention_mask")
SETTINGS = EpisodeSettings(env="desk", parser="hermes")


def padded(rows: Sequence[Sequence[float]], dtype: Any = None) -> Any:
    made = [torch.tensor(row, dtype=dtype or torch.float32) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(made, batch_first=True)


def gradient(ids: Any, loss: Callable[..., Any], *given: Any) -> Any:
    """The gradient of `loss`, which takes the tokens' logprobs and what is `given`."""
    logits = torch.linspace(-1.0, 1.0, VOCAB).requires_grad_()
    loss(torch.log_softmax(logits, 0)[ids.long()], *given).backward()
    return logits.grad


# --- verl -----------------------------------------------------------------------------------------


def verl_batch(results: Sequence[InteractionResult]) -> tuple[Any, list[str]]:
    """As `AgentLoopWorkerTQ._agent_loop_postprocess` stores them. An aborted one is an error."""
    rows, keys = [], []
    for session, result in enumerate(results):
        if result.reward is None:
            continue
        fields = to_fields(result, prompt_length=12, response_length=16, several=True)
        rows += fields
        keys += [f"task_{session}_{index}" for index in range(len(fields))]
    mask = padded([row["response_mask"] for row in rows])
    scores = torch.zeros_like(mask)
    for place, row in enumerate(rows):
        scores[place, len(row["response_ids"]) - 1] = row["reward_score"]
    return SimpleNamespace(
        ids=padded([row["response_ids"] for row in rows]),
        batch={"response_mask": mask, "token_level_rewards": scores},
        uids=["task"] * len(rows),
    ), keys


class VerlRows(SimpleNamespace):
    def select_idxs(self, rows: list[int]) -> VerlRows:
        batch = {name: tensor[rows] for name, tensor in self.batch.items()}
        return VerlRows(batch=batch, uids=[self.uids[row] for row in rows])

    def __len__(self) -> int:
        return len(self.uids)


def verl_advantages(results: Sequence[InteractionResult]) -> tuple[Any, Any]:
    """verl's advantages by its own code, and the batch."""
    made, keys = verl_batch(results)
    grpo = theirs(
        "verl/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage",
        torch=torch, np=np, defaultdict=defaultdict,
    )  # fmt: skip

    def compute_advantage(data: Any, **named: Any) -> Any:
        data.batch["advantages"], _ = grpo(
            data.batch["token_level_rewards"],
            data.batch["response_mask"],
            np.array(data.uids),
            norm_adv_by_std_in_grpo=named["norm_adv_by_std_in_grpo"],
        )
        return data

    compute = theirs(
        "verl/trainer/ppo/v1/utils.py", "compute_advantage_for_multi_trajectories",
        torch=torch, compute_advantage=compute_advantage,
        core_algos=SimpleNamespace(AdvantageEstimator=SimpleNamespace(GRPO="grpo")),
    )  # fmt: skip
    rows = VerlRows(batch=made.batch, uids=made.uids)
    return compute(rows, keys, "grpo").batch["advantages"], made


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_verl_counts_a_forked_episode_once(mode: str) -> None:
    """Except in the last mode, where the agent loop gives one sequence."""
    agg_loss = theirs(
        "verl/trainer/ppo/core_algos.py", "agg_loss",
        torch=torch, verl_F=SimpleNamespace(masked_sum=lambda values, mask: (values * mask).sum()),
    )  # fmt: skip

    def loss(logps: Any, advantages: Any, mask: Any) -> Any:
        return agg_loss(-advantages * logps, mask, mode, global_batch_size=4, loss_scale_factor=16)

    found = []
    for forked in (False, True):
        results = [episode(1.0), episode(0.0), episode(1.0, forked=forked), episode(0.0)]
        advantages, made = verl_advantages(results)
        mask = made.batch["response_mask"]
        found.append(gradient(made.ids, loss, advantages, mask))
        assert mask.sum() == 40
    assert torch.allclose(found[0], found[1], atol=1e-7) is counts_once(verl_config(mode))
    assert found[0].abs().sum() > 0


def verl_config(mode: str) -> Any:
    return SimpleNamespace(
        algorithm=SimpleNamespace(adv_estimator="grpo"),
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(loss_agg_mode=mode)),
    )


# --- SkyRL ----------------------------------------------------------------------------------------


def skyrl_output(results: Sequence[InteractionResult]) -> dict[str, Any]:
    """What SkyRL gets, after its own check."""
    own = ToolrollGenerator(
        GeneratorConfig(step_wise_trajectories=True), load_embedded_tokenizer(), SkyrlClient(""),
        SETTINGS,
    )  # fmt: skip
    episodes = [(result, select_sequences(result, several=True)) for result in results]
    ids = [TrajectoryID("task", number) for number in range(len(results))]
    output = own._output(episodes, {"trajectory_ids": ids}, with_logprobs=True)
    check, _ = theirs(
        "skyrl/train/utils/trainer_utils.py",
        "validate_generator_output",
        "_validate_step_wise_fields",
        np=np,
        logger=None,
        _validate_per_token_side_channels=lambda *unused: None,  # of SkyRL 0.4.0
    )
    check(len(results), output, step_wise=True)
    return output


def skyrl_advantages(output: dict[str, Any], estimator: str) -> Any:
    file = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    compute = theirs(
        file, f"compute_{estimator}_outcome_advantage",
        torch=torch, np=np, defaultdict=defaultdict,
    )  # fmt: skip
    algorithm = defaultdict(float, advantage_estimator=estimator, grpo_norm_by_std=True)
    step = theirs(
        "skyrl/train/trainer.py", "RayPPOTrainer.compute_advantages_and_returns",
        torch=torch, np=np, logger=SimpleNamespace(info=print),
        ppo_utils=SimpleNamespace(
            compute_advantages_and_returns=lambda adv_estimator, config, **named: compute(**named)
        ),
    )  # fmt: skip
    rows = output["response_ids"]

    class Batch(dict[str, Any]):
        metadata: ClassVar[dict[str, Any]] = {
            "is_last_step": output["is_last_step"],
            "uids": [each.instance_id for each in output["trajectory_ids"]],
            "avg_response_length": 1.0,
        }

        def to(self, device: str) -> Batch:
            return self

    batch = Batch(
        rewards=padded(output["rewards"]),
        response_mask=padded([[1] * len(ids) for ids in rows]),
        loss_mask=padded(output["loss_masks"]),
        values=None,
    )
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            generator=SimpleNamespace(step_wise_trajectories=True),
            trainer=SimpleNamespace(
                algorithm=SimpleNamespace(**algorithm, gamma=1.0, lambd=1.0, use_kl_in_reward=False)
            ),
        ),
        all_metrics={},
    )
    return step(trainer, batch)["advantages"]


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_skyrl_counts_a_forked_episode_once(reduction: str) -> None:
    scaled = theirs(
        "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        "apply_loss_reduction_to_advantages_minibatch",
        torch=torch,
    )
    if reduction == "prompt_mean" and "prompt_boundaries" not in scaled.__annotations__:
        pytest.skip("SkyRL 0.3.0 has no such reduction")

    def weighted(logps: Any, weights: Any) -> Any:
        return -(weights * logps).sum()

    found = []
    for forked in (False, True):
        output = skyrl_output([episode(1.0), episode(0.0), episode(1.0, forked=forked)])
        advantages = skyrl_advantages(output, "grpo")
        mask = padded(output["loss_masks"])
        more = {"prompt_boundaries": [(0, len(mask))]} if reduction == "prompt_mean" else {}
        weights = scaled(advantages, mask, reduction, 1, 16, **more)
        ids = padded(output["response_ids"])
        made = gradient(ids, weighted, weights * mask)
        found.append(made / made.abs().sum())  # a mean over rows has one factor for the whole batch
    assert torch.allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_an_aborted_episode_moves_no_advantage_in_skyrl(estimator: str) -> None:
    graded = [episode(1.0), episode(0.0), episode(1.0, forked=True)]
    output = skyrl_output([*graded[:1], episode(None), *graded[1:]])
    without = skyrl_output(graded)
    assert torch.equal(skyrl_advantages(output, estimator), skyrl_advantages(without, estimator))
    assert output["rollout_metrics"]["toolroll/aborted"] == 1.0


def test_the_last_graded_episode_gets_no_advantage_in_skyrl() -> None:
    """SkyRL's advantage of a group of one is its reward, so the aborted ones stay in the group."""
    advantages = skyrl_advantages(skyrl_output([episode(1.0), episode(None)]), "grpo")
    assert not advantages.any()


# --- AReaL ----------------------------------------------------------------------------------------


def areal_advantages(results: Sequence[InteractionResult], **actor: Any) -> dict[str, Any]:
    own = ToolrollWorkflow(
        areal.gconfig(), load_embedded_tokenizer(), SETTINGS, group_size=len(results), **actor
    )
    (found,) = areal.actor(**actor).compute_advantages([_tensors(own._rows(results))])
    made: dict[str, Any] = found
    return made


def test_areal_packs_the_rows_of_a_forked_episode_into_one_tree() -> None:
    results = [episode(1.0, forked=True), episode(0.0), episode(1.0)]
    own = ToolrollWorkflow(areal.gconfig(), load_embedded_tokenizer(), SETTINGS, group_size=3)
    data = _tensors(own._rows(results))
    build = areal.real("areal.models.tree_attn.tree").build_packed_tree_batch
    spec = areal.real("areal.api.cli_args").MicroBatchSpec(max_tokens_per_mb=128)
    (packed,) = build(data, spec).mbs
    nodes = packed["trie_node"].nodes
    rows = [row[kept].tolist() for row, kept in zip(*map(data.get, KEPT), strict=True)]
    for number, row in enumerate(rows):
        path = [node for node in nodes if number in node.sequence_ids]
        assert [token for node in path for token in node.tokens] == row
    every = [trajectory for result in results for trajectory in result.trajectories]
    assert sum(map(len, rows)) == 56
    assert sum(len(node.tokens) for node in nodes) == trie_tokens(every) == 32
    assert int(packed["loss_mask"].sum()) == 30, "each token is trained once"


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("actor", [{}, {"reward_scaling": 10.0, "reward_bias": -0.5}])
def test_areal_s_actor_computes_the_advantages_of_the_workflow(
    actor: dict[str, float], rewards: tuple[float, ...]
) -> None:
    results = [episode(reward) for reward in rewards]
    data = areal_advantages(results, **actor)
    trained = data["loss_mask"] == 1
    for row, mask, advantage in zip(
        data["advantages"], trained, group_advantages(results, normalize=True), strict=True
    ):
        assert row[mask].tolist() == pytest.approx([advantage] * 10, abs=1e-5)


def test_areal_rewards_a_sequence_whose_last_turn_is_excluded() -> None:
    """AReaL puts the reward at the last token, and drops it if that is not trained."""
    made = sequence((4, 8, None), (10, 16, "invalid call"), length=16)
    data = areal_advantages([result_of(1.0, made), episode(0.0)])
    assert data["advantages"][0][data["loss_mask"][0] == 1].tolist() == [1.0] * 4
