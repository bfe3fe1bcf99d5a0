"""A trainer like slime for tests: its arguments, an engine that plays the desk, and the checks of
its samples.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import slime_mirror
from support.qwen import tokenizer_for, trl_template

from toolroll.rollout.runs.registry import load_environment
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply, load_embedded_tokenizer
from toolroll.testing.reference_policy import write_action
from toolroll.trainers import slime

DESK = load_environment("desk")
TASKS = DESK.tasks("test")
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 256,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def real_slime(module: str) -> Any:
    """A module of slime, or a skip that says where it is."""
    return pytest.importorskip(
        module,
        reason=f"slime is on GitHub only: github.com/THUDM/slime at {slime_mirror.COMMIT[:8]}",
    )


def reference_lines(index: int) -> list[str]:
    actions = DESK.reference(TASKS[index])
    assert actions is not None
    return [write_action(action) for action in actions]


def says(
    lines: Mapping[str, list[str]] | None = None, task: Callable[[str], int] = lambda session: 0
) -> Any:
    """A policy that plays the reference of the session's task; `lines[session]` in its place."""

    def policy(request: PolicyRequest) -> str | Reply:
        said = (lines or {}).get(request.routing_key) or reference_lines(task(request.routing_key))
        return said[request.call] if request.call < len(said) else "Goodbye."

    return policy


@asynccontextmanager
async def serving(
    policy: Any = None, **engine: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Namespace]]:
    """An engine, and the arguments of a trainer that uses it."""
    async with EmbeddedEngine(load_embedded_tokenizer(), policy or says(), **engine) as embedded:
        ip, port = embedded.url.removeprefix("http://").split(":")
        yield embedded, arguments(sglang_router_ip=ip, sglang_router_port=int(port))
        await slime.aclose()


@asynccontextmanager
async def forking(
    folder: Path, **engine_args: Any
) -> AsyncIterator[tuple[EmbeddedEngine, Namespace]]:
    """A trainer whose chat template removes thoughts, so that an episode with them forks. The
    second sample of each group has none.
    """
    tokenizer: Any = tokenizer_for(trl_template("qwen3"))
    tokenizer.save_pretrained(folder)

    def policy(request: PolicyRequest) -> str:
        said = reference_lines(0)
        turn = request.text.count("<|im_start|>assistant") - 1
        line = said[turn] if turn < len(said) else "Goodbye."
        return line if request.routing_key.endswith("/1") else f"<think>\nHm.\n</think>\n\n{line}"

    async with EmbeddedEngine(tokenizer, policy, **engine_args) as engine:
        ip, port = engine.url.removeprefix("http://").split(":")
        place = {"sglang_router_ip": ip, "sglang_router_port": int(port)}
        yield engine, arguments(**place, hf_checkpoint=str(folder))
        await slime.aclose()


def arguments(**given: Any) -> Namespace:
    """slime's arguments, as far as a rollout reads them, under slime's names."""
    values: dict[str, Any] = {
        "hf_checkpoint": "embedded",
        "partial_rollout": False,
        "use_rollout_routing_replay": False,
        "rollout_seed": 42,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 256,
        "rollout_max_context_len": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 8,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "reward_key": None,
        "eval_reward_key": None,
        "group_rm": False,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "rollout_sample_hook_path": None,
        "apply_chat_template_kwargs": None,
        "toolroll_env": "desk",
        "toolroll_parser": "hermes",
        "toolroll_verify": "always",
    }
    return Namespace(**{**values, **given})


def every_sampled_token_is_as_served(outputs: list[Any], engine: EmbeddedEngine) -> None:
    served = {}
    for entry in engine.log:
        for at, (index, logprob) in enumerate(zip(entry.output_ids, entry.logprobs, strict=True)):
            served[entry.routing_key, len(entry.input_ids) + at] = (index, np.float32(logprob))
    for sample in (sample for output in outputs for group in output.samples for sample in group):
        cut = len(sample.tokens) - sample.response_length
        for at, (mask, logprob) in enumerate(
            zip(sample.loss_mask, sample.rollout_log_probs, strict=True)
        ):
            if mask:
                assert served[sample.session_id, cut + at] == (
                    sample.tokens[cut + at],
                    np.float32(logprob),
                )
            else:
                assert logprob == 0.0
