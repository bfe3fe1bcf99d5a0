"""AReaL 1.0.4 with the adapter: its client and executor play the workflow, and its actor, trees and
base class take what the workflow returns.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import areal
from support.bare import run_apart
from support.forked_episodes import episode, result_of, sequence, versioned
from support.gradients import PLAYED, World, gradient, padded_logps, per_token, terms
from support.slime_trainer import plays_the_reference
from support.vocabulary import Vocabulary

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError
from toolroll.rollout.runs.summary import trie_tokens
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.areal import ToolrollWorkflow
from toolroll.trainers.areal.workflow import ArealEngine, _tensors
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import select_sequences

pytest.importorskip("torch", reason="AReaL takes tensors: install torch for the CPU")

Statistics = dict[str, list[float]]
SETTINGS = EpisodeSettings(env="desk", parser="hermes", verify="always", max_turns=12, reruns=0)
ACTOR: dict[str, Any] = {"reward_scaling": 10.0, "reward_bias": -0.5}
"""The actor moves and scales the rewards."""


# --- episodes -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def recorded() -> Statistics:
    """AReaL's statistics of rollouts."""
    tracker = areal.real("areal.utils.stats_tracker").get("rollout")
    tracker.export(reset=True)
    stats: Statistics = tracker.stats
    return stats


@asynccontextmanager
async def workflow(
    settings: EpisodeSettings = SETTINGS, *, n_samples: int = 1, concurrency: int = 64, **given: Any
) -> AsyncIterator[tuple[ToolrollWorkflow, Any]]:
    tokenizer = load_embedded_tokenizer()
    gconfig = areal.gconfig(max_new_tokens=256, n_samples=n_samples)
    own = ToolrollWorkflow(gconfig, tokenizer, settings, **given)
    async with (
        EmbeddedEngine(tokenizer, plays_the_reference) as engine,
        areal.inference(engine.url, concurrency=concurrency) as client,
    ):
        yield own, client
        await own.aclose()


async def rollout_batch(client: Any, *args: Any, **options: Any) -> list[Any]:
    """AReaL's outermost call: its executor's thread plays the groups."""
    return list(await asyncio.to_thread(client.rollout_batch, *args, **options))


async def test_an_episode_is_a_row_of_tensors(recorded: Statistics) -> None:
    async with workflow() as (own, engine):
        row: Any = await own.arun_episode(engine, {"index": 0, "metadata": {"env": "desk"}})
    length = row["input_ids"].numel()
    assert {name: (tuple(value.shape), str(value.dtype)) for name, value in row.items()} == {
        **dict.fromkeys(("input_ids", "loss_mask", "versions"), ((1, length), "torch.int32")),
        "logprobs": ((1, length), "torch.float32"),
        "attention_mask": ((1, length), "torch.bool"),
        "rewards": ((1,), "torch.float32"),
    }
    mask, versions = row["loss_mask"][0].tolist(), row["versions"][0].tolist()
    assert [value >= 0 for value in versions] == [bool(value) for value in mask]
    ends = [i for i, trained in enumerate(mask) if trained and not [*mask, 0][i + 1]]
    assert [versions[end] for end in ends] == [4] * len(ends)
    assert versions.count(3) == sum(mask) - len(ends)
    assert row["rewards"].item() == 1.0 and recorded["rollout/reward"] == [1.0]
    assert recorded["rollout/left_out_tokens"] == [0]
    assert recorded["rollout/num_turns"] == [len(ends)]
    assert len({sent.rid for sent in engine.seen}) == 1, "the prefix cache would be lost"
    assert all(sent.gconfig.n_samples == 1 for sent in engine.seen)


def lose_a_logprob(engine: Any, episode: int) -> None:
    """Let `engine` leave out a logprob in the answers to this episode, which is aborted for it."""
    answers, rids = engine.agenerate, list[str]()

    async def sometimes(req: Any) -> Any:
        rids.extend([req.rid] if req.rid not in rids else [])
        answer = await answers(req)
        if rids.index(req.rid) == episode:
            answer.output_logprobs.pop()
        return answer

    engine.agenerate = sometimes


async def test_an_aborted_episode_does_not_shift_the_groups(recorded: Statistics) -> None:
    """AReaL finds groups by counting rows. The first of three groups has an aborted episode."""
    async with workflow(concurrency=1) as (own, engine):
        lose_a_logprob(engine, episode=2)
        tasks = [{"index": index} for index in (0, 1, 0)]
        batch = await rollout_batch(engine, tasks, own, group_size=4)
    assert sorted(group["rewards"].tolist() for group in batch) == [[0.0] * 4, [1.0] * 4]
    assert recorded["rollout/rejected"] == [1] and recorded["rollout/accepted"] == [1, 1]
    norm = areal.real("areal.api.cli_args").NormConfig("group", std_level="group", group_size=4)
    for group in areal.actor(reward_norm=norm).compute_advantages(batch):
        assert not group["advantages"].any()


async def test_a_group_leaves_out_only_its_aborted_episode(recorded: Statistics) -> None:
    """The actor turns `rewards` into advantages, which are 0: all rewards are equal here."""
    async with workflow(group_size=3, **ACTOR) as (own, engine):
        lose_a_logprob(engine, episode=1)
        (rows,) = await rollout_batch(engine, [{"index": 0}], own)
    assert rows["input_ids"].shape[0] == len(rows["rewards"]) == 2
    assert rows["rewards"].tolist() == [0.5, 0.5] and recorded["rollout/reward"] == [1.0, 1.0]
    assert recorded["rollout/delivered_share"] == [1.0, 1.0]
    (advantages,) = areal.actor(**ACTOR).compute_advantages([rows])
    assert not advantages["advantages"].any()


async def test_what_cannot_be_done_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"group_size": 8, "n_samples": 4}, "n_samples=4 and group_size=8 are both set"),
        ({"reward_bias": -0.5}, "reward_bias need group_size"),
        ({"group_size": 8, "reward_scaling": 0.0}, "reward_scaling is 0"),
    ]
    for given, words in refused:
        with pytest.raises(UsageError, match=words):
            await workflow(**given).__aenter__()
    for name, value in {"use_beam_search": True, "min_new_tokens": 8}.items():
        with pytest.raises(UsageError, match=f"{name} is not supported"):
            ToolrollWorkflow(areal.gconfig(**{name: value}), load_embedded_tokenizer(), SETTINGS)
    async with workflow(SETTINGS.model_copy(update={"context_length": 16})) as (own, engine):
        with pytest.raises(UsageError, match="no key 'index'"):
            await own.arun_episode(engine, {"messages": []})
        with pytest.raises(RolloutError, match=r"task 0 cannot be trained on, .* no trained token"):
            await own.arun_episode(engine, {"index": 0})
        assert engine.seen == []


# --- what the actor makes of them -----------------------------------------------------------------


def rows_of(results: list[InteractionResult], **actor: Any) -> dict[str, Any]:
    """The rows of a group."""
    tokenizer, size = load_embedded_tokenizer(), len(results)
    own = ToolrollWorkflow(areal.gconfig(), tokenizer, SETTINGS, group_size=size, **actor)
    return _tensors(own._rows(results))


def advantages_of(results: list[InteractionResult], **actor: Any) -> list[list[float]]:
    """The actor's advantages of the trained tokens of each row."""
    (data,) = areal.actor(**actor).compute_advantages([rows_of(results, **actor)])
    rows = zip(data["advantages"], data["loss_mask"] == 1, strict=True)
    return [row[mask].tolist() for row, mask in rows]


def test_the_gradient_of_its_loss(world: World) -> None:
    """With `group_size`, and the engine's logprobs as the old ones (no recomputation)."""
    policy = world.policy()
    rows = [rows_of(world.group(task), **ACTOR) for task in PLAYED]
    areal.update(partial(padded_logps, policy), rows, **ACTOR)
    losses = terms(world.played, per_token(world.trained), eps=0.0, ddof=0)
    world.check(gradient(policy), losses)


def test_a_last_turn_that_is_not_trained_is_cut_off() -> None:
    """As after an invalid call with `CallPolicy(mask_invalid=True)`. AReaL puts the reward at the
    last token, and drops it if that is not trained.
    """
    excluded = sequence((4, 8, None), (10, 16, "invalid call"), length=16)
    assert advantages_of([result_of(1.0, excluded), episode(0.0)])[0] == [1.0] * 4
    played = versioned(sequence((2, 4, None), (5, 8, "invalid"), length=8), "7", "8")
    [selected] = select_sequences(result_of(1.0, played), several=False)
    rows = _tensors([(selected, 1.0)])
    assert rows.pop("rewards").tolist() == [1.0]
    assert {tuple(values.shape) for values in rows.values()} == {(1, 4)}
    assert rows["versions"].tolist() == [[-1, -1, 7, 7]]


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


# --- its classes ----------------------------------------------------------------------------------

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
    engine = ArealEngine(inference, gconfig, Vocabulary(9, special={5}), context_length=None)
    prompt = np.array([1, 2], dtype=np.int32)
    await engine.generate(GenerateRequest(prompt, {"max_new_tokens": 4}, "s"))
    payload = backend.build_generation_request(requests[0], with_lora=True, version=3).payload
    assert (payload["lora_path"], payload["input_ids"]) == ("agent-v3", [1, 2])
