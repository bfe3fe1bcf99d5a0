"""As `test_gradients.py`, for the trainers that are only on GitHub: slime, miles and prime-rl."""

import asyncio
import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from support.bare import borrowed, theirs
from support.gradients import (
    ABORTED,
    PLAYED,
    SAMPLES,
    Script,
    World,
    clipped,
    engine_of,
    gradient,
    normalized,
    talk,
)

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.trainers.slime import keep_group, normalize_rewards, to_samples
from toolroll.trainers.slime.samples import EpisodeSamples
from toolroll.trainers.verifiers import EndpointClient

torch = pytest.importorskip("torch", reason="the trainers' losses need torch for the CPU")
pytestmark = pytest.mark.peers

ARGS = Namespace(
    advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True,
    reward_key=None, rollout_top_p=1.0, rollout_temperature=1.0, micro_batch_size=2,
    use_dynamic_batch_size=False, balance_data=False, balance_by_flops=False, global_batch_size=3,
    use_rollout_logprobs=True, kl_coef=0.0, custom_advantage_function_path=None, use_opd=False,
    normalize_advantages=False, loss_type="policy_loss", recompute_loss_function=False,
    allgather_cp=False, calculate_per_token_loss=False, log_probs_chunk_size=-1, entropy_coef=0.0,
    use_opsm=False, eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None, get_mismatch_metrics=False,
    use_tis=False, use_kl_loss=False, custom_pg_loss_reducer_function_path=None,
    data_pad_size_multiplier=16, rollout_batch_size=1, n_samples_per_prompt=3,
    use_dynamic_global_batch_size=False, qkv_format="thd", true_on_policy_mode=False,
    skip_actor_forward_only=False, observe_training_entropy=False, dump_details=None,
    enable_witness=False, delay_split_train_data_by_dp=False, compress_ratios=None,
    multi_lora=False, multi_lora_n_adapters=0,
)  # fmt: skip
"""slime's and miles' arguments: GRPO with the engine's logprobs as the old ones."""
PARALLEL = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
KEYS = (
    "tokens total_lengths response_lengths loss_masks advantages returns rollout_log_probs "
    "rollout_mask_sums"
).split()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    with torch.compiler.set_stance("force_eager"):  # without a compiler for C++
        yield


def needs(package: str, url: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is on GitHub only: {url}")


def kept_samples(world: World, make: Any) -> list[Any]:
    """The samples that are trained: `keep_group` drops the group with an aborted episode."""
    kept = []
    for task in PLAYED:
        group = []
        for number, result in enumerate(world.group(task)):
            sample = make(prompt=task, index=3 * task + number, group_index=task)
            group.append(EpisodeSamples(to_samples(sample, result)))
        if keep_group(ARGS, group):
            kept += list(itertools.chain.from_iterable(group))
    return kept


def by_hand(world: World) -> list[Any]:
    """An episode is a mean over its tokens, and a step a mean over episodes."""
    group = world.played[0]
    terms = []
    for one, advantage in zip(group, normalized(group, eps=1e-6), strict=True):
        weight = one.tokens * len(group)
        terms += [
            (row, lambda logps, old, a=advantage, n=weight: clipped(logps, old, a).sum() / n)
            for row in one.rows
        ]
    return terms


def packed_logits(policy: Any, tokens: Any, starts: Any) -> Any:
    """The logits of packed sequences [1, n], in float32, as Megatron's model gives them."""
    ends = starts.tolist()
    parts = [policy(tokens[:, a:b]).logits for a, b in itertools.pairwise(ends)]
    return torch.cat(parts, 1).float()


# --- slime ----------------------------------------------------------------------------------------


def test_slime(world: World) -> None:
    needs("slime", "github.com/THUDM/slime")
    inside = "slime slime.utils slime.backends slime.backends.megatron_utils slime.observability"
    with borrowed(inside, without="megatron"):
        found = slime_gradient(world)
    world.check(found, by_hand(world))


def slime_gradient(world: World) -> dict[str, Any]:
    from slime.backends.megatron_utils import cp_utils, data, loss
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.utils.data import get_source, process_rollout_data
    from slime.utils.dp_schedule import build_dp_schedule
    from slime.utils.types import Sample

    mpu = SimpleNamespace(
        get_context_parallel_world_size=lambda: 1, get_context_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1, is_pipeline_last_stage=lambda: True,
        get_tensor_model_parallel_group=lambda: None,
        get_data_parallel_world_size=lambda with_context_parallel: 1,
        get_data_parallel_rank=lambda with_context_parallel: 0,
    )  # fmt: skip
    cpu = SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu")
    data.mpu = loss.mpu = cp_utils.mpu = mpu
    data.accelerator, data.PackedSeqParams = cpu, SimpleNamespace
    store = SimpleNamespace(put=lambda value: value, get=lambda value: value)
    convert, split, rewards = theirs(
        "slime/ray/rollout.py", "RolloutManager._convert_samples_to_train_data",
        "RolloutManager._split_train_data_by_dp", "RolloutManager._post_process_rewards",
        Sample=Sample, build_dp_schedule=build_dp_schedule, get_source=get_source, ray=store,
        tensorize_rollout_data_for_training=tensorize_rollout_data_for_training,
        Box=lambda value: SimpleNamespace(inner=value),
    )  # fmt: skip
    manager = SimpleNamespace(
        args=ARGS, custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=normalize_rewards, train_parallel_config=PARALLEL,
    )  # fmt: skip
    manager._post_process_rewards = lambda samples: rewards(manager, samples)
    refs = split(manager, convert(manager, kept_samples(world, Sample)))
    process_rollout_data.__globals__["ray"] = store
    get = theirs(
        "slime/backends/megatron_utils/actor.py", "MegatronTrainRayActor._get_rollout_data",
        process_rollout_data=process_rollout_data, mpu=mpu, accelerator=cpu, torch=torch,
        slice_log_prob_with_cp=cp_utils.slice_log_prob_with_cp,
    )  # fmt: skip
    rollout = get(SimpleNamespace(args=ARGS), refs)
    loss.compute_advantages_and_returns(ARGS, rollout)
    batches = data.DataIterator(rollout, rollout["micro_batch_indices"])
    (count,), (size,) = rollout["num_microbatches"], rollout["global_batch_sizes"]
    policy = world.policy()
    for _ in range(count):
        batch = data.get_batch(batches, KEYS, ARGS.data_pad_size_multiplier)
        logits = packed_logits(policy, batch["tokens"], batch["packed_seq_params"].cu_seqlens_q)
        value, *_ = loss.loss_function(ARGS, batch, count, size, logits)
        (value / count).backward()  # Megatron divides by the number of micro-batches
    return gradient(policy)


MILES_WITHOUT = (
    "miles.utils.object_store miles.utils.audit_utils miles.utils.chat_template_utils "
    "miles.utils.processing_utils miles.utils.ray_utils megatron"
)
"""What the modules of its loss import for the rollout, and Megatron's kernel for logprobs."""


# --- miles ----------------------------------------------------------------------------------------


def test_miles(world: World) -> None:
    needs("miles", "github.com/radixark/miles")
    inside = (
        "miles miles.utils miles.ray miles.ray.rollout miles.backends "
        "miles.backends.training_utils miles.backends.training_utils.loss_hub"
    )
    with borrowed(inside, without=MILES_WITHOUT):
        found = miles_gradient(world)
    world.check(found, by_hand(world))


def miles_gradient(world: World) -> dict[str, Any]:
    import megatron.core.fusions.fused_cross_entropy as kernels
    from miles.backends.training_utils import data, loss, parallel
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.types import Sample

    def cross_entropy(logits: Any, tokens: Any, group: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits[:, 0], tokens[:, 0], reduction="none")

    kernels.fused_vocab_parallel_cross_entropy = cross_entropy
    one = SimpleNamespace(rank=0, size=1, group=None)
    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp", "effective_dp")
    state = SimpleNamespace(is_pp_last_stage=True, is_ulysses_cp=False, **dict.fromkeys(names, one))
    parallel.set_parallel_state(state)
    train = conversion.convert_samples_to_train_data(
        ARGS, kept_samples(world, Sample), {}, None, None
    )
    (shard,) = conversion.split_train_data_by_dp_scheduled_raw(
        ARGS, train, train_parallel_config=PARALLEL
    )
    data.process_rollout_data = lambda *given, **named: (
        conversion.process_rollout_data_shard(ARGS, shard), None
    )  # fmt: skip
    rollout, _ = data.get_rollout_data(ARGS, None)
    loss.compute_advantages_and_returns(ARGS, rollout)
    batches = data.DataIterator(rollout, micro_batch_indices=rollout["micro_batch_indices"])
    (count,), (size,) = rollout["num_microbatches"], rollout["num_rollouts"]
    policy = world.policy()
    for _ in range(count):
        batch = data.get_batch(batches, KEYS, ARGS.data_pad_size_multiplier)
        logits = packed_logits(policy, batch["tokens"], batch["cu_seqlens"])
        value, *_ = loss.loss_function(
            ARGS, batch, count, logits, apply_megatron_loss_scaling=True, num_rollouts=size
        )
        (value / count).backward()
    return gradient(policy)


# --- verifiers and prime-rl -----------------------------------------------------------------------

PRIME_RL = (
    "verifiers verifiers.v1 prime_rl prime_rl.orchestrator prime_rl.orchestrator.algo "
    "prime_rl.trainer prime_rl.trainer.rl prime_rl.utils prime_rl.transports"
)
BOUND = 1e-5
"""Of the default loss: probabilities may change by so much."""


def test_verifiers_and_prime_rl(world: World) -> None:
    """verifiers' traces, by prime-rl's default loss. An aborted episode is a trace with an error,
    which prime-rl drops.
    """
    needs("prime_rl", "github.com/PrimeIntellect-ai/prime-rl")
    without = "prime_sandboxes beartype jaxtyping prime_rl.configs"
    with borrowed(PRIME_RL, without=without):
        found = asyncio.run(prime_rl_gradient(world))
    group = world.played[0]
    tokens = sum(one.tokens for one in group)
    mean = sum(one.reward or 0.0 for one in group) / len(group)

    def loss_of(advantage: float) -> Any:
        def loss(logps: Any, rollout: Any) -> Any:
            change = (logps.exp() - rollout.exp()) * math.copysign(1, advantage)
            kept = (change.detach() <= BOUND) * (logps - rollout).exp() * advantage
            return (1e-3 * (logps - rollout) ** 2 - kept).sum() / tokens

        return loss

    terms = [(row, loss_of((one.reward or 0.0) - mean)) for one in group for row in one.rows]
    world.check(found, terms)


async def prime_rl_gradient(world: World) -> dict[str, Any]:
    from prime_rl.orchestrator.algo.routing import assign_advantages
    from prime_rl.orchestrator.trajectories import trace_to_samples
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.trainer.rl.loss import compute_loss, default_loss_fn, shift_tensor_right

    traces = await played_traces(world)
    sys.modules["verifiers.v1.trace"].Branch.multi_modal_data = None  # until verifiers 0.4
    score = theirs(
        "prime_rl/orchestrator/algo/grpo.py", "GRPOAlgorithm.score_group", torch=torch,
        iter_trainable_traces=enumerate, assign_advantages=assign_advantages,
    )  # fmt: skip
    await score(SimpleNamespace(length_penalty=None), traces)
    samples = [sample for trace in traces for sample in trace_to_samples(trace)]
    for sample in samples:
        sample.temperatures = [1.0] * len(sample.token_ids)
    (batches,) = prepare_batch(samples, 128, 1, build_bin_cost(None))
    policy = world.policy()
    scale = sum(sum(batch.loss_mask) for batch in batches)
    config = SimpleNamespace(dppo_mask_high=BOUND, dppo_mask_low=BOUND, adv_tau=1.0, kl_tau=1e-3)
    for batch in batches:
        ids, lengths = torch.tensor([batch.input_ids]), batch.sequence_lengths
        starts = torch.tensor([0, *lengths]).cumsum(0)
        scores = packed_logits(policy, ids, starts).log_softmax(-1)
        logps = shift_tensor_right(scores.gather(-1, ids.roll(-1)[..., None])[..., 0])
        streams = [batch.inference_logprobs, batch.advantages, batch.loss_mask]
        rollout, advantages, mask = (torch.tensor(one).split(lengths) for one in streams)
        loss, _ = compute_loss(
            logps[0].split(lengths), rollout, None, advantages, mask, None, None, None,
            lambda inputs: default_loss_fn(inputs, config), scale, 1, 1,
        )  # fmt: skip
        loss.backward()
    return gradient(policy)


async def played_traces(world: World) -> list[Any]:
    """The first task's episodes as verifiers' traces, with their rewards."""
    from verifiers.v1 import graph
    from verifiers.v1.clients import TrainClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.trace import Reward, Trace
    from verifiers.v1.types import SamplingConfig

    script, traces, dialect = Script(), [], ChatDialect()
    async with (
        engine_of(world.folder, script) as (_, model),
        EndpointServer(Endpoint(model, EndpointSettings(port=0))) as server,
    ):
        make_config: Any = TrainClientConfig  # its fields differ between versions
        client: Any = EndpointClient(make_config(base_url=f"{server.url}/v1"))

        async def play(task: int, sample: int) -> Any:
            script.playing = (task, sample)
            trace = Trace.model_construct(
                id=f"{task}-{sample}", nodes=[], calls=[], tools=[], rewards={}
            )

            async def create(**asked: Any) -> Any:
                body = {"model": "default", **asked}
                request = dialect.parse_request(body)
                turn = graph.prepare_turn(trace, request.messages, request.tools)
                made = await client.get_response(
                    dialect, body, SamplingConfig(max_tokens=None), trace.id, turn
                )
                turn.commit(made)
                return ChatCompletion.model_validate(made.raw)

            trace.rewards["environment"] = Reward(score=await talk(task, create))
            return trace

        traces = [await play(0, sample) for sample in range(SAMPLES)]
        with pytest.raises(Exception, match="400") as raised:
            await play(*ABORTED)
        assert "ProviderError" in {kind.__name__ for kind in type(raised.value).__mro__}
        await client.close()
    return traces
