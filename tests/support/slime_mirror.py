"""slime's types as its rollouts see them, copied from slime at commit
624b824a898ab0ec1fcb4d373004c7f3852bf515 (see `support.standins`), and the checks of samples by
slime's rules.
"""

import asyncio
import copy
import itertools
from collections.abc import Sequence
from enum import Enum
from typing import Any

import pytest
from support.standins import recorded_class, stand_in, stands_for

COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"

FLAGS = frozenset(
    """
    --actor-num-gpus-per-node --actor-num-nodes --advantage-estimator --balance-data --colocate
    --custom-config-path --custom-generate-function-path --custom-reward-post-process-path
    --dynamic-sampling-filter-path --entropy-coef --eps-clip --eps-clip-high
    --eval-function-path --eval-input-key --eval-interval --eval-max-response-len
    --eval-prompt-data --eval-temperature --global-batch-size --hf-checkpoint --input-key
    --kl-loss-coef --kl-loss-type --load --lr --max-tokens-per-gpu --metadata-key
    --n-samples-per-eval-prompt --n-samples-per-prompt --num-rollout --over-sampling-batch-size
    --prompt-data --ref-load --rollout-batch-size --rollout-function-path
    --rollout-max-context-len --rollout-max-response-len --rollout-num-gpus
    --rollout-num-gpus-per-engine --rollout-shuffle --rollout-temperature
    --router-assignment-mode --router-policy --save --save-interval --sglang-mem-fraction-static
    --use-dynamic-batch-size --use-kl-loss --use-tis
    """.split()
)
"""Of slime's command line, what the example uses."""

ARGUMENTS = frozenset(
    """
    advantage_estimator apply_chat_template_kwargs custom_reward_post_process_path
    dynamic_sampling_filter_path eval_datasets eval_reward_key group_rm grpo_std_normalization
    hf_checkpoint mask_offpolicy_in_partial_rollout over_sampling_batch_size partial_rollout
    reward_key rewards_normalization rollout_all_samples_process_path rollout_batch_size
    rollout_function_path rollout_max_context_len rollout_max_response_len rollout_num_gpus
    rollout_num_gpus_per_engine
    rollout_sample_filter_path rollout_sample_hook_path rollout_seed rollout_stop
    rollout_stop_token_ids rollout_temperature rollout_top_k rollout_top_p
    sglang_enable_deterministic_inference sglang_router_ip sglang_router_port
    sglang_server_concurrency use_rollout_routing_replay
    """.split()
)
"""The attributes of slime's `args` that the adapter reads."""
MODEL_ARGUMENTS = frozenset({"moe_router_topk", "num_layers"})
"""The same, of Megatron's own arguments, which slime's routing replay reads too."""


@stands_for("slime.utils.types:Sample")
class Sample(recorded_class("slime.utils.types:Sample")):  # type: ignore[misc]
    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward


RolloutFnTrainOutput = recorded_class("slime.rollout.base_types:RolloutFnTrainOutput")
RolloutFnEvalOutput = recorded_class("slime.rollout.base_types:RolloutFnEvalOutput")
EvalDatasetConfig = recorded_class("slime.utils.eval_config:EvalDatasetConfig")


def eval_dataset(name: str, path: str, **given: Any) -> Any:
    """A dataset, with what slime fills in from its arguments."""
    arguments = {
        "input_key": "index", "metadata_key": "metadata", "n_samples_per_eval_prompt": 1,
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_response_len": 256,
    }  # fmt: skip
    return EvalDatasetConfig(name, path, **{**arguments, **given})


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mirror importable as slime, whether or not slime is installed."""
    modules: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
    }
    stand_in(monkeypatch, modules)


def install_loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make slime's own loop importable. Return its state: `aborted` stops it."""

    class GenerateState:
        aborted = False

        def __new__(cls, args: Any) -> Any:  # slime's is a singleton too
            return cls

        def __init__(self, args: Any) -> None:
            raise AssertionError("not called")

    stand_in(monkeypatch, {"slime.rollout.sglang_rollout": {"GenerateState": GenerateState}})
    return GenerateState


def install_hooks(monkeypatch: pytest.MonkeyPatch, apply: Any) -> None:
    """Make `apply` importable as the function that calls slime's hooks for samples."""
    module, name = "slime.rollout.sample_hooks", "apply_rollout_sample_hooks"
    marked = stands_for(f"{module}:{name}", own="evaluation")(apply)
    stand_in(monkeypatch, {module: {name: marked}})


@stands_for("slime.rollout.data_source:RolloutDataSourceWithBuffer", own="__init__")
class DataSource:
    """Groups of `n` samples of each prompt, in order and from the beginning again; what is added
    comes first.
    """

    def __init__(self, make: Any, prompts: Sequence[Any], n: int) -> None:
        self.buffer: list[list[Any]] = []
        self._make = make
        self._prompts = prompts
        self._n = n
        self._groups = self._index = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples:
            prompt = self._make(**copy.deepcopy(self._prompts[self._groups % len(self._prompts)]))
            group = []
            for at in range(self._n):
                sample = copy.deepcopy(prompt)
                sample.group_index, sample.index = self._groups, self._index
                sample.session_id = f"{self._groups}/{at}"
                group.append(sample)
                self._index += 1
            self._groups += 1
            groups.append(group)
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        self.buffer += samples


def train_data(samples: Sequence[Any]) -> None:
    """Do to a rollout's samples what slime does before it trains, with the conditions that it
    asserts or silently relies on.
    """
    for sample in samples:
        assert isinstance(sample.status, Enum) and type(sample.status).__name__ == "Status"
        assert sample.reward is not None and sample.response_length >= 1
        assert (
            len(sample.loss_mask)
            == len(sample.rollout_log_probs)
            == sample.response_length
            < len(sample.tokens)
        )
        assert all(type(value) is int for value in [*sample.tokens, *sample.loss_mask])
        assert all(type(value) is float and value == value for value in sample.rollout_log_probs)
        if sample.remove_sample:
            sample.loss_mask = [0] * sample.response_length


# --- slime's own rollout loop (slime/rollout/sglang_rollout.py, slime/ray/rollout.py); miles' has
# --- the same statements, with `routing_key` for `session_id`


async def play_group(
    args: Any, group: list[Any], generate: Any, *, mask: bool = False
) -> list[Any]:
    """slime's `generate_and_rm_group`. `mask`: --mask-offpolicy-in-partial-rollout."""
    for sample in group:
        if sample.session_id is None:
            sample.session_id = f"s{sample.index}"

    async def one(sample: Any) -> Any:
        if mask and sample.response_length > 0:
            sample.loss_mask = [0] * sample.response_length
        if sample.status.name in ("COMPLETED", "TRUNCATED"):
            assert sample.response is not None and sample.reward is not None
            return sample
        return await generate(args, sample)

    return list(await asyncio.gather(*map(one, group)))


def put_back(source: DataSource, groups: Sequence[list[Any]], rollout_id: int) -> None:
    """The end of slime's `abort` with --partial-rollout."""
    for group in groups:
        for sample in group:
            if sample.response and "start_rollout_id" not in sample.metadata:
                sample.metadata["start_rollout_id"] = rollout_id
    source.add_samples(list(groups))


def flattened(groups: Sequence[Any]) -> list[Any]:
    """The samples of a rollout, as slime's `RolloutManager` finds them before training."""
    data = list(groups)
    while isinstance(data[0], list):
        data = list(itertools.chain.from_iterable(data))
    return data
