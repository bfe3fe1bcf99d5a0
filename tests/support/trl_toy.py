"""Small parts for TRL's trainer on a CPU: a model for the embedded tokenizer, and an engine that
samples from the trainer's own model, and a server that is given weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from support.http import http_server, in_thread

from toolroll.rollout.engine import EngineClient, ModelInfo, Progress
from toolroll.rollout.types import Completion, GenerateRequest, WeightVersion
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.trl import reward

ON_A_CPU: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False, "seed": 7,
}  # fmt: skip
"""The configuration of TRL's trainers in tests."""
ARMS = """
from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task


class Arms(Environment):
    tasks = [{}]

    def reset(self, task, seed):
        return Observation([{"role": "user", "content": "Left or right?"}])

    def step(self, action):
        right = action.content[:1].lower() > "m"
        return StepResult(reward=float(right), done=True)
"""
"""A two-armed task: the first letter of the reply is in one half of the alphabet or the other."""


def small_model(vocab_size: int) -> Any:
    """Return a random model of one layer, with a fixed seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        initializer_range=0.75,  # some tens of tokens are likely: each is sampled often enough
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


class InProcess(EngineClient):
    """Samples one token at a time from `trainer.model`, at temperature 1."""

    def __init__(self, trainer: Any, context_length: int = 16_384) -> None:
        self._trainer = trainer
        self._info = ModelInfo(
            context_length=context_length, vocab_size=len(trainer.processing_class)
        )

    @property
    def url(self) -> str:
        return "in-process"

    async def model_info(self) -> ModelInfo:
        return self._info

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        import torch

        assert request.sampling_params.get("temperature", 1.0) == 1.0
        stops = set(request.sampling_params.get("stop_token_ids") or ())
        ids: list[int] = []
        logprobs: list[float] = []
        reason, matched = "length", None
        for _ in range(int(request.sampling_params["max_new_tokens"])):
            prompt = torch.tensor([[*request.input_ids.tolist(), *ids]])
            with torch.no_grad():
                scores = self._trainer.model(prompt).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1)))
            logprobs.append(float(scores[ids[-1]]))
            if ids[-1] in stops:
                reason, matched = "stop", ids[-1]
                break
        if progress is not None:
            progress(list(ids))
        version = WeightVersion(str(self._trainer.state.global_step), 0, len(ids))
        return Completion(
            np.array(ids, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            reason,
            matched,
            weight_versions=(version,),
            prompt_tokens=len(request.input_ids),
        )

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError(f"nothing is posted to {url}")

    async def aclose(self) -> None:
        pass


def save_arms(folder: Path) -> str:
    """Write the two-armed environment, and return its name."""
    (folder / "arms.py").write_text(ARMS)
    return f"{folder / 'arms.py'}:Arms"


def grpo_trainer(
    folder: Path,
    rollout: Callable[..., Any],
    prompts: list[Any],
    *,
    model: Any = None,
    tokenizer: Any = None,
    **config: Any,
) -> Any:
    """TRL's trainer of a small model, with `rollout` as its rollout function."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = load_embedded_tokenizer() if tokenizer is None else tokenizer
    settings: dict[str, Any] = {**ON_A_CPU, "output_dir": str(folder), "logging_steps": 1, **config}
    return GRPOTrainer(
        small_model(len(tokenizer)) if model is None else model,
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


@contextmanager
def weight_server(
    status: Mapping[str, int], *, success: bool = True
) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers as SGLang, with these statuses by path (default: 200)."""
    requests: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.path, await request.json()))
        body = {"success": success, "message": "too large"}
        return web.json_response(body, status=status.get(request.path, 200))

    with in_thread(http_server({"/{path:.*}": answer})) as url:
        yield url, requests
