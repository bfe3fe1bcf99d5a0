"""AReaL's own base class, client, actor and trees, beside the adapter."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import areal
from support.bare import run_apart
from support.forked_episodes import episode, result_of, sequence
from support.gradients import (
    PLAYED,
    World,
    assert_equal,
    gradient,
    groups,
    padded_logps,
    per_token,
    policy_of,
    step,
    terms,
    trained,
)

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.runs.summary import trie_tokens
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.advantages import group_advantages
from toolroll.trainers.areal import ToolrollWorkflow
from toolroll.trainers.areal.workflow import ArealEngine, _tensors
from toolroll.trainers.episodes import EpisodeSettings

pytest.importorskip("torch", reason="AReaL takes tensors: install torch for the CPU")

ACTOR = {"reward_scaling": 10.0, "reward_bias": -0.5}
"""The actor moves and scales the rewards."""


def rows_of(results: list[InteractionResult], **actor: Any) -> dict[str, Any]:
    """The rows of a group."""
    settings = EpisodeSettings(env="desk", parser="hermes")
    tokenizer, size = load_embedded_tokenizer(), len(results)
    own = ToolrollWorkflow(areal.gconfig(), tokenizer, settings, group_size=size, **actor)
    return _tensors(own._rows(results))


def advantages_of(results: list[InteractionResult], **actor: Any) -> list[list[float]]:
    """The actor's advantages of the trained tokens of each row."""
    (data,) = areal.actor(**actor).compute_advantages([rows_of(results, **actor)])
    rows = zip(data["advantages"], data["loss_mask"] == 1, strict=True)
    return [row[mask].tolist() for row, mask in rows]


def test_the_gradient_of_its_loss(world: World) -> None:
    """With `group_size`, and the engine's logprobs as the old ones (no recomputation)."""
    policy = policy_of(world.folder)
    rows = [rows_of(world.group(task), **ACTOR) for task in PLAYED]
    areal.update(partial(padded_logps, policy), rows, **ACTOR)
    losses = terms(groups(world), per_token(trained(world)), eps=0.0, ddof=0)
    assert_equal(gradient(policy), step(policy_of(world.folder), losses))


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("actor", [{}, ACTOR])
def test_its_actor_computes_the_advantages_of_the_workflow(
    actor: dict[str, float], rewards: tuple[float, ...]
) -> None:
    results = [episode(reward) for reward in rewards]
    expected = group_advantages(results, normalize=True)
    for row, advantage in zip(advantages_of(results, **actor), expected, strict=True):
        assert row == pytest.approx([advantage] * 10, abs=1e-5)


def test_a_sequence_whose_last_turn_is_excluded_is_rewarded() -> None:
    """AReaL puts the reward at the last token, and drops it if that is not trained."""
    excluded = sequence((4, 8, None), (10, 16, "invalid call"), length=16)
    assert advantages_of([result_of(1.0, excluded), episode(0.0)])[0] == [1.0] * 4


def test_the_rows_of_a_forked_episode_are_one_tree() -> None:
    results = [episode(1.0, forked=True), episode(0.0), episode(1.0)]
    data = rows_of(results)
    build = areal.real("areal.models.tree_attn.tree").build_packed_tree_batch
    spec = areal.real("areal.api.cli_args").MicroBatchSpec(max_tokens_per_mb=128)
    (packed,) = build(data, spec).mbs
    nodes = packed["trie_node"].nodes
    columns = data["input_ids"], data["attention_mask"]
    rows = [row[kept].tolist() for row, kept in zip(*columns, strict=True)]
    for number, row in enumerate(rows):
        path = [node for node in nodes if number in node.sequence_ids]
        assert [token for node in path for token in node.tokens] == row
    every = [trajectory for result in results for trajectory in result.trajectories]
    assert sum(map(len, rows)) == 56
    assert sum(len(node.tokens) for node in nodes) == trie_tokens(every) == 32
    assert int(packed["loss_mask"].sum()) == 30, "each token is trained once"


_CLASS = """
bare("areal", "areal.api")
from areal.api.workflow_api import RolloutWorkflow
from toolroll.trainers.areal import ToolrollWorkflow

assert issubclass(ToolrollWorkflow, RolloutWorkflow)
assert not issubclass(dict, RolloutWorkflow)
"""


def test_the_class_is_a_workflow_before_one_is_made() -> None:
    areal.real("areal")
    run_apart(_CLASS)


async def test_its_client_names_the_adapter_and_its_version() -> None:
    backend = areal.real("areal.engine.sglang_remote").SGLangBackend()
    answer = areal.real("areal.api").ModelResponse(
        output_tokens=[5], output_logprobs=[-1.0], output_versions=[3]
    )
    requests: list[Any] = []

    async def agenerate(req: Any) -> Any:
        requests.append(req)
        return answer

    gconfig = areal.gconfig(lora_name="agent")
    inference = SimpleNamespace(agenerate=agenerate)
    engine = ArealEngine(inference, gconfig, [None] * 9, context_length=None)
    prompt = np.array([1, 2], dtype=np.int32)
    await engine.generate(GenerateRequest(prompt, {"max_new_tokens": 4}, "s"))
    payload = backend.build_generation_request(requests[0], with_lora=True, version=3).payload
    assert (payload["lora_path"], payload["input_ids"]) == ("agent-v3", [1, 2])
