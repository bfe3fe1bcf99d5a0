"""Routing replay: slime, miles, verl and SkyRL get a row of experts for each token but the last,
from the first forward pass over it, although later passes have others.
"""

import base64
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import miles_mirror, verl_mirror
from support.experts import first_experts
from support.forked_episodes import result_of, sequence
from support.framework_engines import GeneratorConfig, SkyrlClient, TrajectoryID
from support.slime_trainer import SAMPLING, play, real_slime, says, serving
from support.vocabulary import Vocabulary

from toolroll.rollout.errors import CompletionError, RolloutError, TokenError, UsageError
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import EmbeddedEngine, Fault, LoggedRequest, load_embedded_tokenizer
from toolroll.trainers import miles
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.sequences import routed_experts, training_sequences
from toolroll.trainers.skyrl import ToolrollGenerator
from toolroll.trainers.slime import to_samples
from toolroll.trainers.verl import ServerEngine, to_fields

REPLAY = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}
SHAPE = (2, 2)


def evicting(_: Any) -> Fault:
    """The prefix cache is emptied before each request: each turn processes its prompt again."""
    return Fault(evict=True)


def expected(log: Sequence[LoggedRequest], ids: Sequence[int]) -> Any:
    return first_experts(log, np.array(ids, dtype=np.int32)).reshape(-1, *SHAPE)


async def by_slime(args: Namespace, sample_type: Any) -> Any:
    return await play(args, sample_type(index=0, prompt=0))


async def by_miles(args: Namespace, _: Any) -> Any:
    state, given = miles_mirror.GenerateState(args), miles_mirror.Sample(index=0, prompt=0)
    call = miles_mirror.GenerateFnInput(state, given, dict(SAMPLING), False)
    return (await miles.generate(call)).samples


@pytest.mark.parametrize("generate", [by_slime, by_miles])
async def test_rows_are_of_the_first_passes(generate: Any, sample_type: Any, mirrors: None) -> None:
    async with serving(faults=evicting) as (engine, args):
        vars(args).update(REPLAY)
        [sample] = await generate(args, sample_type)
    assert len(engine.log) > 2 and sample.reward == 1.0
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1  # miles' `validate`
    assert sample.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(sample.rollout_routed_experts, expected(engine.log, sample.tokens))


@pytest.mark.peers
async def test_slimes_own_bookkeeping_has_the_same_rows() -> None:
    """slime's `append_response_tokens` stitches the same answers, and its trainer takes ours."""
    sample_type = real_slime("slime.utils.types").Sample
    checks = real_slime("slime.observability.rollout_data_utils")
    torch = pytest.importorskip("torch")
    answers: list[dict[str, Any]] = []

    def kept(answer: dict[str, Any]) -> dict[str, Any]:
        answers.append(answer)
        return answer

    async with serving(faults=lambda _: Fault(evict=True, garble=kept)) as (engine, args):
        vars(args).update(REPLAY)
        [ours] = await play(args, sample_type(index=0, prompt=0))
    theirs = sample_type(tokens=engine.log[0].input_ids.tolist())
    for entry, answer in zip(engine.log, answers, strict=True):
        observed = entry.input_ids.tolist()[len(theirs.tokens) :]
        if observed:
            theirs.append_response_tokens(args, tokens=observed, trainable=False)
        rows = len(base64.b64decode(answer["meta_info"]["routed_experts"])) // 16
        total = len(entry.input_ids) + len(entry.output_ids)
        theirs.append_response_tokens(
            args,
            tokens=entry.output_ids,
            log_probs=entry.logprobs,
            meta_info={**answer["meta_info"], "routed_experts_start_len": total - 1 - rows},
        )
    assert ours.tokens == theirs.tokens and ours.loss_mask == theirs.loss_mask
    mine = torch.as_tensor(ours.rollout_routed_experts)
    assert mine.dtype == theirs.rollout_routed_experts.dtype
    assert torch.equal(mine, theirs.rollout_routed_experts)
    checks.validate_rollout_routed_experts_for_replay([mine], args)


async def test_a_sample_that_is_not_trained_has_rows_too(sample_type: Any) -> None:
    """The trainers make one tensor of all samples, and slime refuses rows of zeros only."""

    def failing(seen: Any) -> Fault | None:
        return Fault(status=400, body=b"{}") if seen.index == 0 else None

    async with serving(faults=failing) as (_, args):
        vars(args).update(REPLAY, toolroll_reruns=0)
        [sample] = await play(args, sample_type(index=0, prompt=0))
    assert sample.remove_sample and not any(sample.loss_mask)
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, *SHAPE)
    assert np.count_nonzero(sample.rollout_routed_experts, axis=(0, 2)).all()


async def test_replay_is_a_setting_and_needs_the_model_s_shape(sample_type: Any) -> None:
    async with serving() as (engine, args):
        for missing in ("num_layers", "moe_router_topk"):
            vars(args).update({**REPLAY, missing: None})
            with pytest.raises(UsageError, match="num_layers and moe_router_topk"):
                await play(args, sample_type(prompt=0))
        assert engine.log == []
        args.use_rollout_routing_replay = False
        given = sample_type(index=0, prompt=0, rollout_routed_experts=np.zeros((1, 2, 2)))
        [sample] = await play(args, given)
    assert sample.rollout_routed_experts is None and engine.log


def result(rows: int | None, width: int = 4, reward: float | None = 1.0) -> Any:
    """An episode with a prompt of three tokens and two sampled ones."""
    experts = None if rows is None else np.arange(rows * width, dtype=np.uint8).reshape(rows, width)
    return result_of(reward, sequence((3, 5, None), length=5, routed_experts=experts))


def test_trained_tokens_need_rows_of_their_model() -> None:
    (sequence,) = training_sequences(result(4))
    assert routed_experts(sequence, SHAPE).ravel().tolist() == list(range(16))
    with pytest.raises(UsageError, match="2 layers with 3 experts"):
        routed_experts(sequence, (2, 3))
    (sequence,) = training_sequences(result(None))
    with pytest.raises(TokenError, match="no routed experts"):
        routed_experts(sequence, SHAPE)
    (sequence,) = training_sequences(result(None, reward=None))
    assert routed_experts(sequence, SHAPE)[:, 1].tolist() == [[0, 1]] * 4
    for rows in (0, 3, 5):
        with pytest.raises(ValueError, match=f"routed_experts one shorter: {rows}"):
            result(rows)
    forked = result(4)
    forked.trajectories *= 2
    for sibling in to_samples(miles_mirror.Sample(index=0), forked, experts_shape=SHAPE):
        assert sibling.rollout_routed_experts.shape == (4, *SHAPE)


def test_verl_gets_the_rows_of_the_tokens_that_are_left() -> None:
    """tests/contract/test_verl.py has the rows in verl's own batch."""
    [cut] = to_fields(result(4), prompt_length=2, response_length=2, experts_shape=SHAPE)
    assert (cut["prompt_ids"], cut["response_ids"]) == ([0, 1], [2, 3])
    assert cut["routed_experts"].ravel().tolist() == list(range(12))
    assert cut["routed_experts"].dtype == np.int16


async def skyrl_output(client: SkyrlClient, **limits: Any) -> Any:
    """The output for one prompt."""
    replay = SimpleNamespace(enable_return_routed_experts=True)
    config = GeneratorConfig(inference_engine=replay)
    settings = EpisodeSettings(env="desk", parser="hermes", max_turns=12, reruns=0, **limits)
    generator = ToolrollGenerator(config, load_embedded_tokenizer(), client, settings)
    try:
        return await generator.generate(
            {
                "prompts": [[{"role": "user", "content": "A task."}]],
                "env_extras": [{"index": 0}],
                "sampling_params": {"max_tokens": 256, "logprobs": 1},
                "trajectory_ids": [TrajectoryID("0", 0)],
            }
        )
    finally:
        await generator.aclose()


async def test_skyrl_gets_the_rows_as_lists() -> None:
    """SkyRL joins the outputs of several calls. Its configuration does not have the shape."""
    async with EmbeddedEngine(load_embedded_tokenizer(), says(), faults=evicting) as engine:
        client = SkyrlClient(engine.url, experts=True)
        with pytest.raises(RolloutError, match="answered no request yet"):
            await skyrl_output(client, context_length=16)
        output = await skyrl_output(client)
    ids = output["prompt_token_ids"][0] + output["response_ids"][0]
    assert output["rollout_expert_indices"] == [expected(engine.log, ids).tolist()]


async def test_rows_of_another_count_are_refused() -> None:
    async def generate(*_: Any, **__: Any) -> Any:
        rows = np.zeros((7, 2, 2), dtype=np.int32)
        return verl_mirror.TokenOutput([9], [-1.0], rows, "stop")

    manager: Any = SimpleNamespace(generate=generate)
    engine = ServerEngine(manager, Vocabulary(64, special={9}), backend="sglang", context_length=64)
    request = GenerateRequest(np.array([1, 2], dtype=np.int32), {"max_new_tokens": 8}, "s")
    with pytest.raises(CompletionError, match=r"shape \(7, 2, 2\)"):
        await engine.generate(request)
