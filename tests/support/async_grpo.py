"""TRL's own `AsyncGRPOTrainer` on a CPU, with two stand-ins: one for the GPU's speed, and one for
the attention over a tree, which needs a kernel from the hub (FA3).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import HOST, Server, serving
from support.standins import stands_for
from support.trl_toy import ON_A_CPU

from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import async_rollouts

DESK = EpisodeSettings(
    env="desk", env_args={"policy": "brief"}, split="held-out", max_turns=16, verify="off"
)
"""What the desk model was trained for: a mean reward of about 0.9."""
PROMPTS = [str(index) for index in range(8)]
PACKAGE = "trl.experimental.async_grpo"


@stands_for("trl.trainer.utils:get_peak_flops_per_device")
def get_peak_flops_per_device(accelerator: Any, dtype: Any) -> None:
    """No speed is known, so TRL logs no utilization."""


@stands_for(f"{PACKAGE}.packing:tree_attention")
def tree_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    tree_max_seqlen_q: Any,
    tree_max_seqlen_k: Any,
    scaling: Any = None,
    sliding_window: Any = None,
    softcap: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Each segment attends to its path from the root; the last query sees the whole path."""
    import torch

    assert sliding_window is None and softcap is None
    parts, starts = [], tree_cu_seqlens_q.tolist()
    paths = tree_cu_seqlens_k.tolist()
    for at in range(len(starts) - 1):
        path = tree_kv_index[paths[at] : paths[at + 1]]
        queries = query[:, :, starts[at] : starts[at + 1]]
        seen = torch.ones(queries.shape[2], len(path), dtype=torch.bool)
        seen = seen.tril(len(path) - queries.shape[2])
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries, key[:, :, path], value[:, :, path], attn_mask=seen, scale=scaling,
                enable_gqa=True,
            )
        )  # fmt: skip
    return torch.cat(parts, 2).transpose(1, 2), None


@contextmanager
def on_a_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        trainer = f"{PACKAGE}.async_grpo_trainer.get_peak_flops_per_device"
        patch.setattr(trainer, get_peak_flops_per_device)
        patch.setattr(f"{PACKAGE}.packing.tree_attention", tree_attention)
        yield


@contextmanager
def desk_engine(folder: Path, *, model: Path | None = None) -> Iterator[Server]:
    """`toolroll engine` as a process, because training and sampling in one would take turns."""
    path = str(desk_model_path() if model is None else model)

    def command(port: int) -> list[str]:
        engine = [sys.executable, "-m", "toolroll", "engine", "--host", HOST, "--model", path]
        return [*engine, "--port", str(port)]

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    log = folder / "engine.log"
    with serving(
        command, ready="/health", environment=environment, log=log, name="engine"
    ) as server:
        yield server


def config_of(folder: Path, url: str, **changes: Any) -> Any:
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    settings: dict[str, Any] = {
        **ON_A_CPU,
        "output_dir": str(folder / "out"),
        "vllm_server_base_url": url,
        "token_budget": -1,
        "max_completion_length": 160,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-4,
        "temperature": 1.5,  # at 1.0, most groups have equal rewards
        "max_steps": 3,
        **changes,
    }
    return AsyncGRPOConfig(**settings)


def trainer_of(
    folder: Path,
    config: Any,
    prompts: Sequence[str],
    *,
    model: Path | None = None,
    settings: EpisodeSettings | None = None,
) -> Any:
    """The trainer of the desk model, with our parts. Use it within `on_a_cpu`."""
    from datasets import Dataset
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    path = str(desk_model_path() if model is None else model)
    parts = async_rollouts(
        config,
        DESK if settings is None else settings,
        model=path,
        prompts=list(prompts),
        weights=folder / "weights",
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return AsyncGRPOTrainer(path, args=config, train_dataset=dataset, **parts)


def by_length(folder: Path) -> tuple[EpisodeSettings, Path]:
    """The settings of `Length`, and its gate, which is open."""
    gate = folder / "gate"
    gate.touch()
    settings = EpisodeSettings(
        env="support.trl_toy:Length",
        env_args={"gate": str(gate)},
        parser="hermes",
        on_length="continue",
        verify="off",
    )
    return settings, gate


def main(folder: Path, url: str) -> None:
    """Train until killed, with a checkpoint after each step."""
    config = config_of(folder, url, max_steps=1000, save_strategy="steps", save_steps=1)
    with on_a_cpu():
        trainer_of(folder, config, PROMPTS).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
