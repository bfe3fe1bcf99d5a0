#!/usr/bin/env bash
# GRPO on the desk benchmark with verl 0.9.1: Qwen3-0.6B on one GPU. ARGUMENTS_ONLY=1 prints verl's arguments, one a line.
set -euo pipefail

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
MODEL="${MODEL:-Qwen/Qwen3-0.6B}"
DATA="${DATA:-$PWD/data/desk.parquet}"

ARGUMENTS=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA"
    data.val_files="$DATA"
    data.train_batch_size=16
    data.max_prompt_length=4096
    data.max_response_length=4096
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.calculate_log_probs=true # the engine's logprobs go into the batch
    actor_rollout_ref.rollout.agent.default_agent_loop=toolroll
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$HERE/agent_loop.yaml"
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
    trainer.total_epochs=20
    "$@"
)
if [ -n "${ARGUMENTS_ONLY:-}" ]; then
    printf '%s\n' "${ARGUMENTS[@]}"
    exit
fi

mkdir -p "$(dirname "$DATA")"
[ -f "$DATA" ] || python3 "$HERE/make_data.py" "$DATA"
python3 -m verl.trainer.main_ppo "${ARGUMENTS[@]}"
