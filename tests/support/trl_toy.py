"""Small parts for TRL's trainers on a CPU: tasks, a model for the embedded tokenizer, an engine
that samples from the trainer's own model, and a server that is given weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web
from support.http import http_server, in_thread

from toolroll.rollout.environment import Action, Environment, Observation, StepResult, Task
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.framework_engine import FrameworkEngine, Sampled
from toolroll.trainers.trl import reward

ON_A_CPU: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False, "seed": 7,
}  # fmt: skip
"""The configuration of TRL's trainers in tests."""


class Arms(Environment):
    """Two arms: the first letter of the reply is in one half of the alphabet or the other."""

    tasks: ClassVar[list[dict[str, Any]]] = [{}]

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "Left or right?"}])

    def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(action.content[:1].lower() > "m"), done=True)


class Length(Environment):
    """Two tasks in which rewards differ, so that each step changes the weights. Its episodes begin
    while the file `gate` exists.
    """

    tasks: ClassVar[list[dict[str, Any]]] = [{}, {}]

    def __init__(self, gate: str) -> None:
        self.gate, self.turns = Path(gate), 0

    def reset(self, task: Task, seed: int) -> Observation:
        while not self.gate.exists():
            time.sleep(0.005)
        return Observation([{"role": "user", "content": f"Begin with {task.index}."}])

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        done, more = self.turns == 3, {"role": "user", "content": "Go on."}
        return StepResult([] if done else [more], reward=len(action.content) % 97 / 97, done=done)


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


class InProcess(FrameworkEngine):
    """Samples one token a turn from `trainer.model`, at temperature 1."""

    def __init__(self, trainer: Any) -> None:
        super().__init__("in-process", trainer.processing_class, context_length=16_384)
        self._trainer = trainer

    async def sample(self, request: GenerateRequest) -> Sampled:
        import torch

        params = request.sampling_params
        assert (params["max_new_tokens"], params.get("temperature", 1.0)) == (1, 1.0)
        with torch.no_grad():
            logits = self._trainer.model(torch.tensor([request.input_ids.tolist()])).logits
        scores = logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1))
        reason = "stop" if token in (params.get("stop_token_ids") or ()) else "length"
        return Sampled([token], [float(scores[token])], reason)


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
