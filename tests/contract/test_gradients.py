"""One step of each trainer's own loss, on the CPU: its gradient is the one that is computed by hand
from the episode file.

The trainers' own code pads, groups, normalizes and computes the loss. `tests/support/gradients.py`
has the other side.
"""

import asyncio
import dataclasses
import math
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from openai import InternalServerError
from support.atropos_server import atropos_server
from support.bare import borrowed, theirs
from support.gradients import (
    ABORTED,
    CLIP,
    PLAYED,
    SAMPLES,
    Script,
    World,
    clipped,
    engine_of,
    gradient,
    per_token,
    policy_of,
    step,
    talk,
    terms,
    weighted,
)
from support.tinker_mirror import TrainingClient
from support.trl_toy import grpo_trainer
from support.verl_mirror import Keys
from support.vllm_mirror import LlmEngine, asked_params

from toolroll.endpoint.in_process import ManagedServer
from toolroll.trainers import openrlhf
from toolroll.trainers.advantages import group_advantages
from toolroll.trainers.tinker import to_datums
from toolroll.trainers.trl import to_output
from toolroll.trainers.verl import to_fields
from toolroll.trainers.verl.agent_loop import counts_once

torch = pytest.importorskip("torch", reason="the trainers' losses need torch for the CPU")


def test_the_file_has_what_the_steps_must_tell_apart(world: World) -> None:
    first, second = world.played
    assert [one.reward for one in first] == [1.0, 0.0, 1.0]
    assert [one.reward for one in second] == [1.0, 0.0, None]
    forked = [(one.task, one.sample) for one in [*first, *second] if len(one.rows) > 1]
    assert forked == [(0, 2), (1, 0)]
    assert second[2].tokens == 0 and len(second[2].rows[0].ids) > 0
    changed: list[bool] = []

    def note(logps: Any, rollout: Any) -> Any:
        changed.extend(((logps - rollout).exp() - 1).abs().gt(CLIP).tolist())
        return logps.sum()

    step(policy_of(world.folder), [(row, note) for one in [*first, *second] for row in one.rows])
    assert 0.2 < sum(changed) / len(changed) < 0.8  # clipped


# --- TRL ------------------------------------------------------------------------------------------


def test_trl(world: World, tmp_path: Path) -> None:
    """With truncated importance sampling, which reads the engine's logprobs."""
    results = [result for task in PLAYED for result in world.group(task)]
    training = grpo_trainer(
        tmp_path, lambda prompts, training: to_output(results), ["0", "1"],
        model=world.policy(), tokenizer=world.tokenizer, max_completion_length=4096,
        num_generations=SAMPLES, per_device_train_batch_size=len(results),
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.1,
    )  # fmt: skip
    training.use_vllm, training._last_loaded_step = True, training.state.global_step
    rows = [{"prompt": str(task)} for task in PLAYED for _ in range(SAMPLES)]
    training.current_gradient_accumulation_steps = 1
    training.training_step(training.model, rows, None)
    found = gradient(training.model)

    tokens = sum(len(one.most.trained) for group in world.played for one in group)
    losses = terms(world.played, weighted(tokens, 1.1), most=True, eps=1e-4)
    world.check(found, losses)


# --- verl -----------------------------------------------------------------------------------------


class Queue:
    """verl's TransferQueue, in this process."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    async def async_kv_batch_put(self, **given: Any) -> None:
        self.kv_batch_put(**given)

    def kv_batch_put(self, keys: Any, fields: Any, partition_id: str, tags: Any = None) -> None:
        for at, key in enumerate(keys):
            row = self.rows.setdefault(key, {})
            for name, column in fields.items():
                row[name] = column[at]

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        rows = [self.rows[key] for key in keys]
        return list_of_dict_to_tensordict(
            [{name: row[name] for name in select_fields if name in row} for row in rows]
        )


async def store_in(queue: Queue, world: World, *, several: bool) -> None:
    """Store the graded episodes as verl's worker does. An aborted one is the agent loop's error."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    agent_loop_tq: Any = import_module("verl.trainer.ppo.v1.agent_loop_tq")
    agent_loop_tq.tq = queue

    async def nothing(*given: Any, **named: Any) -> None:
        pass

    worker = SimpleNamespace(
        _compute_score=nothing, _compute_teacher_logprobs=nothing,
        _compute_multi_modal_inputs=lambda *given: {},
        _compute_position_ids=lambda ids, mask, inputs: torch.arange(ids.shape[1])[None],
    )  # fmt: skip
    store = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess
    graded = (
        (task, sample, result)
        for task in PLAYED
        for sample, result in enumerate(world.group(task))
        if result.reward is not None
    )
    for task, sample, result in graded:
        outputs, size = [], 4096
        for fields in to_fields(result, prompt_length=size, response_length=size, several=several):
            fields["metrics"] = AgentLoopMetrics(**fields["metrics"])
            outputs.append(AgentLoopOutput(**fields))
        row = {"uid": f"task{task}", "session_id": sample, "global_steps": 0}
        await store(worker, outputs, validate=False, **row)


VERL_CONSTANT = 16


def test_verl(world: World) -> None:
    """In the bypass mode, where the engine's logprobs are the old ones. A forked episode counts
    once: all its sequences, or, where each weighs as much as an episode, one of them.
    """
    graded = [each for group in world.played for each in group if each.reward is not None]
    rows = sum(len(each.rows) for each in graded)
    tokens = {
        "token-mean": world.trained,
        "seq-mean-token-sum": rows,
        "seq-mean-token-sum-norm": rows * VERL_CONSTANT,
    }
    losses = {mode: terms(world.played, per_token(tokens[mode]), eps=1e-6) for mode in tokens}
    mean = lambda value: lambda logps, old: clipped(logps, old, value).mean() / len(graded)
    losses["seq-mean-token-mean"] = terms(world.played, mean, most=True, eps=1e-6)
    with borrowed("verl.trainer.ppo.v1", without="transfer_queue peft"):
        found = {mode: asyncio.run(verl_gradient(world, mode)) for mode in losses}
    for mode, expected in losses.items():
        world.check(found[mode], expected)


async def verl_gradient(world: World, mode: str) -> dict[str, Any]:
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    algorithm = {
        "use_kl_in_reward": False, "rollout_correction": {"bypass_mode": True},
        "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True,
    }  # fmt: skip
    actor, rollout = SimpleNamespace(loss_agg_mode=mode), SimpleNamespace(n=SAMPLES)
    config: Any = SimpleNamespace(
        algorithm=Keys(algorithm), actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout)
    )
    queue = Queue()
    await store_in(queue, world, several=counts_once(config))

    class Batch(list[str]):
        keys: ClassVar[list[str]] = list(queue.rows)
        partition_id = "train"

    trainer = SimpleNamespace(config=config)
    trainer_base: Any = import_module("verl.trainer.ppo.v1.trainer_base")
    trainer_base.tq = queue
    base = trainer_base.PPOTrainer
    base._compute_old_log_prob(trainer, Batch(queue.rows), {})
    base._compute_advantage(trainer, Batch(queue.rows), {})
    names = ["prompts", "responses", "response_mask", "old_log_probs", "advantages"]
    data: Any = queue.kv_batch_get(Batch.keys, "train", names)
    policy = world.policy()
    logps = []
    for stored in queue.rows.values():
        scores = policy(stored["input_ids"][None]).logits[0].log_softmax(-1)
        logps.append(scores.gather(-1, stored["input_ids"].roll(-1)[:, None])[:, 0])
    nested = torch.nested.as_nested_tensor(logps, layout=torch.jagged)
    tensordict_utils.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=int(data["response_mask"].values().sum()),
        global_batch_size=len(data),
    )  # fmt: skip
    settings = ActorConfig(
        strategy="fsdp", rollout_n=SAMPLES, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode,
        loss_scale_factor=VERL_CONSTANT,
    )  # fmt: skip
    loss, _ = ppo_loss(settings, {"log_probs": nested}, data)
    loss.backward()
    return gradient(policy)


# --- OpenRLHF -------------------------------------------------------------------------------------


def test_openrlhf(world: World) -> None:
    """With `group_norm` and truncated importance sampling. An abort is the agent's exception, and
    ends the rollout.
    """
    inside = (
        "openrlhf openrlhf.models openrlhf.trainer openrlhf.trainer.ppo_utils openrlhf.trainer.ray "
        "openrlhf.utils"
    )
    without = (
        "deepspeed peft vllm openrlhf.models.ring_attn_utils openrlhf.trainer.ray.launcher "
        "openrlhf.trainer.ray.vllm_engine"
    )
    responses = asyncio.run(openrlhf_responses(world))
    with borrowed(inside, without=without):
        found = openrlhf_gradient(world, responses)
    group = world.played[0]
    tokens = sum(len(one.most.trained) for one in group)
    losses = terms([group], weighted(tokens, 1.1, 0.9), most=True, eps=1e-9)
    world.check(found, losses)


class Talker(openrlhf.AgentExecutor):
    async def run_agent(self, prompt: Any, label: Any, session_id: str) -> float:
        return await talk(int(prompt), self.client.chat.completions.create, model=self.model_name)


async def openrlhf_responses(world: World) -> list[Any]:
    script, executor, made = Script(), Talker(), []
    async with engine_of(world.folder, script) as (engine, _):

        async def play(task: int, sample: int) -> Any:
            script.playing = (task, sample)
            return await executor.execute(
                prompt=str(task), label="", sampling_params=asked_params(), max_length=8192,
                hf_tokenizer=world.tokenizer, llm_engine=LlmEngine(engine.url),
            )  # fmt: skip

        made = [await play(0, sample) for sample in range(SAMPLES)]
        with pytest.raises(InternalServerError):
            await play(*ABORTED)
    return made


def openrlhf_gradient(world: World, responses: list[Any]) -> dict[str, Any]:
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss
    from openrlhf.trainer.ppo_utils import experience, experience_maker, samples_generator
    from openrlhf.utils.loss_utils import get_loss_batch_info

    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=SAMPLES, micro_batch_size=2),
        train=SimpleNamespace(dynamic_batch_enable=False),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator="group_norm", gamma=1.0),
            kl=SimpleNamespace(use_loss=False),
        ),
        reward=SimpleNamespace(
            clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=None
        ),
        actor=SimpleNamespace(entropy_coef=None, aux_loss_coef=0.0),
    )
    actor = Actor(world.policy())
    actor.packing_samples = False
    read_response = samples_generator.SamplesGenerator._process_response_into_experience
    generator: Any = None  # it is not used
    samples = [read_response(generator, response, max_len=8192) for response in responses]
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.strategy, maker.args = SimpleNamespace(args=args), args
    maker.advantage_estimator, maker.kl_ctl = "group_norm", SimpleNamespace(value=0.0)
    maker.tokenizer = world.tokenizer
    batches = maker.split_rollout_samples(samples)
    for batch in batches:  # the answers of the actor, without a reference model
        with torch.no_grad():
            batch.action_log_probs = actor(batch.sequences, batch.action_mask, batch.attention_mask)
        batch.kl = torch.zeros_like(batch.action_log_probs)
    items = []
    for batch in maker.compute_advantages_and_returns(batches):
        items += experience.remove_padding_in_sequences(experience.split_experience_batch(batch))
    whole = experience.make_experience_batch(items)
    train = theirs(
        "openrlhf/trainer/ray/ppo_actor.py", "ActorPPOTrainer.training_step",
        get_loss_batch_info=get_loss_batch_info, fields=dataclasses.fields,
        Experience=experience.Experience, torch=torch,
    )  # fmt: skip
    trainer = SimpleNamespace(
        actor=actor, args=args, aux_loss=False, replay_buffer=None, actor_optim=None,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]), ema_model=None,
        actor_loss_fn=PolicyLoss(
            is_correction_level="token", is_correction_mode="clip",
            is_correction_threshold=[0.9, 1.1],
        ),
        strategy=SimpleNamespace(
            ring_attn_group=None, backward=lambda loss, *given: loss.backward(),
            optimizer_step=lambda *given, **named: None, get_grad_norm=lambda actor: 0.0,
        ),
    )  # fmt: skip
    train(trainer, whole, 0.0, 0)
    return gradient(actor.model)


# --- Atropos --------------------------------------------------------------------------------------


def test_atropos(world: World) -> None:
    """With the loss of its example trainer, whose baseline and mean are over sequences."""
    item = asyncio.run(atropos_group(world))
    with borrowed("example_trainer"):
        found = atropos_gradient(world, item)
    rows = [(row, one.reward) for one in world.played[0] for row in one.rows]
    scores = np.array([reward for _, reward in rows])
    values = (scores - scores.mean()) / scores.std()

    def loss_of(advantage: float) -> Any:
        def loss(logps: Any, old: Any) -> Any:
            # for a negative advantage, its clip bounds the loss from below
            bound = clipped(logps, old, abs(advantage)) * math.copysign(1, advantage)
            return bound.mean() / len(rows)

        return loss

    losses = [(row, loss_of(value)) for (row, _), value in zip(rows, values, strict=True)]
    world.check(found, losses)


async def atropos_group(world: World) -> dict[str, Any]:
    """The first task as an environment sends it: a `ScoredDataGroup` with all nodes."""
    script = Script()
    item: dict[str, Any] = {"overrides": None}
    names = ("tokens", "masks", "scores", "inference_logprobs")
    item.update({name: [] for name in names})
    async with engine_of(world.folder, script) as (engine, _):
        server: Any = atropos_server(engine.url)
        for sample in range(SAMPLES):
            script.playing = (0, sample)
            managed = ManagedServer(server, world.tokenizer, tool_parser="hermes", history="fork")
            async with managed:
                reward = await talk(0, managed.chat_completion)
                for node in managed.get_state()["nodes"]:
                    values = (node.tokens, node.masked_tokens, reward, node.logprobs)
                    for name, value in zip(names, values, strict=True):
                        item[name].append(value)
    return item


def atropos_gradient(world: World, item: dict[str, Any]) -> dict[str, Any]:
    from example_trainer.data import pad_data_to_good_offset
    from example_trainer.training import compute_grpo_loss

    batches: Any = pad_data_to_good_offset({"batch": [item]}, len(item["tokens"]))
    tokens, labels, advantages, temperatures, logprobs = (one[0] for one in batches)
    policy = world.policy()
    loss, _ = compute_grpo_loss(policy, tokens, labels, advantages, temperatures, 1, logprobs)
    loss.backward()
    return gradient(policy)


# --- Tinker ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", ["", "target_tokens", "logprobs", "advantages"])
def test_tinker(world: World, shifted: str) -> None:
    """tinker-cookbook's step, with the loss of Tinker's documentation. If one of the inputs is off
    by one, the gradient is another one.
    """
    pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
    data = []
    for task in PLAYED:
        results = world.group(task)
        advantages = group_advantages(results, normalize=True)
        for result, advantage in zip(results, advantages, strict=True):
            data += to_datums(result, advantage)
    if shifted:
        data = [moved(datum, shifted) for datum in data]
    client = TrainingClient(world.policy())
    train_step = import_module("tinker_cookbook.rl.train").train_step
    asyncio.run(
        train_step(data, client, learning_rate=0.1, num_substeps=2, loss_fn="importance_sampling")
    )
    assert len(client.trained) == sum(len(one.rows) for group in world.played for one in group) - 1
    assert client.steps == 2

    def loss_of(advantage: float) -> Any:
        return lambda logps, old: -((logps - old).exp() * advantage).sum()

    losses = terms(world.played, loss_of, eps=0, ddof=0)
    differs = pytest.raises(AssertionError, match="of the largest gradient")
    with differs if shifted else nullcontext():
        world.check(gradient(client.policy), losses)


def moved(datum: Any, name: str) -> Any:
    tinker = import_module("tinker")
    inputs = {key: one.to_torch() for key, one in datum.loss_fn_inputs.items()}
    inputs[name] = inputs[name].roll(1)
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
