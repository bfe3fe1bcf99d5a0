#!/usr/bin/env bash
# GRPO on tau-bench retail with slime (commit 624b824a): Qwen3-4B-Instruct-2507, two GPUs, with toolroll for the whole rollout.
#
# Set the variables below, in the environment or here, and run this file on the machine that holds the GPUs. ARGUMENTS_ONLY=1
# prints the arguments of train.py, one per line, and starts nothing.
set -euo pipefail

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
SLIME="${SLIME:?the folder of the slime checkout}"
MEGATRON="${MEGATRON:?the folder of the Megatron-LM checkout that slime is used with}"
CHECKPOINTS="${CHECKPOINTS:?the folder with Qwen3-4B-Instruct-2507 and, converted by slime, Qwen3-4B-Instruct-2507_torch_dist}"
DATA="${DATA:-$PWD/data}"
NUM_GPUS="${NUM_GPUS:-2}"
MODEL="$CHECKPOINTS/Qwen3-4B-Instruct-2507"

# Defines MODEL_ARGS: the sizes of the model, for Megatron.
source "$SLIME/scripts/models/qwen3-4B-Instruct-2507.sh"

TOOLROLL_ARGS=(
    --rollout-function-path toolroll.trainers.slime.generate_rollout
    --eval-function-path toolroll.trainers.slime.generate_rollout
    --custom-generate-function-path toolroll.trainers.slime.generate # used only by slime's own loop
    --dynamic-sampling-filter-path toolroll.trainers.slime.keep_group
    --custom-reward-post-process-path toolroll.trainers.slime.normalize_rewards # a forked episode counts once
    --custom-config-path "$HERE/toolroll.yaml"
    --prompt-data "$DATA/retail_train.jsonl"
    --input-key index # no --apply-chat-template: a prompt is a task's number
    --metadata-key metadata
)
ROLLOUT_ARGS=(
    --rollout-shuffle
    --num-rollout 500
    --rollout-batch-size 32
    --over-sampling-batch-size 48
    --n-samples-per-prompt 8
    --global-batch-size 256
    --rollout-max-response-len 1024 # of one turn
    --rollout-max-context-len 32768 # of the whole conversation
    --rollout-temperature 1
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data retail-dev "$DATA/retail_dev.jsonl"
    --eval-input-key index
    --n-samples-per-eval-prompt 4
    --eval-max-response-len 1024
    --eval-temperature 0
)
TRAIN_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
    --use-tis # corrects for numeric differences between the engine and the trainer, with the engine's logprobs
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
CHECKPOINT_ARGS=(
    --hf-checkpoint "$MODEL"
    --ref-load "${MODEL}_torch_dist"
    --load "${MODEL}_slime"
    --save "${MODEL}_slime"
    --save-interval 20
)
MEGATRON_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)
SERVING_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$NUM_GPUS"
    --rollout-num-gpus "$NUM_GPUS"
    --rollout-num-gpus-per-engine 1
    --colocate
    --sglang-mem-fraction-static 0.7
    --router-policy manual # an episode stays at the worker that has its prefix cached
    --router-assignment-mode min_group
)
ARGUMENTS=(
    "${MODEL_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${TOOLROLL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${TRAIN_ARGS[@]}"
    "${MEGATRON_ARGS[@]}" "${SERVING_ARGS[@]}" "$@"
)
if [ -n "${ARGUMENTS_ONLY:-}" ]; then
    printf '%s\n' "${ARGUMENTS[@]}"
    exit
fi

mkdir -p "$DATA"
for split in train dev; do
    [ -f "$DATA/retail_$split.jsonl" ] || toolroll tasks tau-bench/retail --split "$split" --out "$DATA/retail_$split.jsonl"
done

MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
ray start --head --node-ip-address "$MASTER_ADDR" --num-gpus "$NUM_GPUS" --disable-usage-stats
ray job submit --address http://127.0.0.1:8265 \
    --runtime-env-json "$(python3 - "$MEGATRON" <<'PYTHON'
import json, os, sys
names = ["USER_API_KEY"]  # api_key_env of toolroll.yaml: the simulated user's
found = {name: os.environ[name] for name in names if name in os.environ}
print(json.dumps({"env_vars": {"PYTHONPATH": sys.argv[1], "CUDA_DEVICE_MAX_CONNECTIONS": "1", **found}}))
PYTHON
)" \
    -- python3 "$SLIME/train.py" "${ARGUMENTS[@]}"
