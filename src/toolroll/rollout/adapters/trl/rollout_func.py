"""`RolloutFunc`: the function that `GRPOTrainer(rollout_func=...)` calls for a batch of prompts.

Invariants: the result has one entry per prompt, in the order of the prompts. The episodes of one
call run concurrently, in an event loop in another thread. Before an error or an interrupt (Ctrl-C)
is raised, the episodes that are still running are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.rollout.adapters.background import Background
from toolroll.rollout.adapters.episodes import (
    EpisodePlayer,
    EpisodeSettings,
    gather,
    task_index,
)
from toolroll.rollout.adapters.trl.samples import to_output
from toolroll.rollout.engine import Engine, EngineClient
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import InteractionResult


def make_rollout_func(
    settings: EpisodeSettings | Mapping[str, Any],
    *,
    engine: str | Callable[[Any], EngineClient],
    sync_weights: Callable[[Any], None] | None = None,
) -> RolloutFunc:
    """Return a `rollout_func` for `GRPOTrainer`.

    Args:
        settings: the settings of the episodes.
        engine: the address of an SGLang server or router, or a function that takes the trainer
            and returns the engine client. It is called once.
        sync_weights: a function that is called with the trainer before the first rollout of each
            step, so that the engine samples from the current weights; see `weights_from_disk`.

    Raises:
        UsageError: for an unknown setting.

    Example:
        >>> rollout = make_rollout_func(
        ...     EpisodeSettings(env="desk", max_turns=12), engine="http://127.0.0.1:30000"
        ... )
    """
    if not isinstance(settings, EpisodeSettings):
        settings = EpisodeSettings.read(settings, where="EpisodeSettings")
    return RolloutFunc(settings, engine, sync_weights)


class RolloutFunc:
    """A `rollout_func` that plays one episode per prompt. Call `close` if the process continues
    after the training.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        engine: str | Callable[[Any], EngineClient],
        sync_weights: Callable[[Any], None] | None,
    ) -> None:
        self.settings = settings
        self._engine = engine
        self._sync_weights = sync_weights
        self._synced: int | None = None
        self._background = Background("toolroll-trl")
        self._player: EpisodePlayer | None = None
        self._played: Counter[tuple[int, str]] = Counter()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play one episode per prompt. Return TRL's `prompt_ids`, `completion_ids`, `logprobs` and
        `env_mask`, and the fields `toolroll_*` for reward functions. All have one entry per prompt.
        Raise `UsageError` for options of TRL that cannot be combined with this `rollout_func`.
        """
        _check_supported(trainer)
        if self._sync_weights is not None and self._synced != trainer.state.global_step:
            self._sync_weights(trainer)
            self._synced = trainer.state.global_step
        if self._player is None:
            self._player = self._opened(trainer)
        params = sampling_params(trainer.args)
        asked = [_read_prompt(prompt) for prompt in prompts]
        results = self._background.run(self._play(self._player, asked, params, trainer))
        return to_output(
            results,
            filler=next(iter(self._player.model.template.stop_token_ids), 0),
            max_completion=trainer.args.max_completion_length,
        )

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._player is not None:
            self._background.run(self._player.aclose())
            self._player = None
        self._background.close()

    def _opened(self, trainer: Any) -> EpisodePlayer:
        given = trainer.processing_class
        settings = self.settings.filled(
            chat_template_kwargs=trainer.args.chat_template_kwargs, seed=trainer.args.seed
        )
        engine = self._engine
        model = Model.from_args(
            settings.rollout_args(engine=engine if isinstance(engine, str) else None),
            tokenizer=getattr(given, "tokenizer", given),  # of a processor
            engine=Engine if isinstance(engine, str) else lambda config: engine(trainer),
        )
        return EpisodePlayer(model, settings)

    async def _play(
        self,
        player: EpisodePlayer,
        asked: Sequence[tuple[int, Mapping[str, Any]]],
        params: Mapping[str, Any],
        trainer: Any,
    ) -> list[InteractionResult]:
        limit = asyncio.Semaphore(self.settings.concurrency)

        async def one(index: int, metadata: Mapping[str, Any], number: int) -> InteractionResult:
            async with limit:
                return await player.play(index, params, metadata=metadata, number=number)

        processes, process = trainer.accelerator.num_processes, trainer.accelerator.process_index
        wanted = []
        for index, metadata in asked:
            key = (index, f"{metadata.get('env')}/{metadata.get('split')}")
            number = self._played[key] * processes + process
            self._played[key] += 1
            wanted.append(one(index, metadata, number))
        return await gather(wanted)


def _check_supported(trainer: Any) -> None:
    """Raise `UsageError` for options of TRL that would change the tokens or have no effect."""
    if getattr(trainer, "tools", None):
        raise UsageError(
            "GRPOTrainer has tools (tools= or environment_factory=), so TRL would continue after "
            "each episode and drop env_mask: leave them out, the environment has its own tools"
        )
    if getattr(trainer.args, "vllm_structured_outputs_regex", None):
        raise UsageError(
            "vllm_structured_outputs_regex has no effect on an SGLang server: set "
            'generation_kwargs={"regex": ...} instead'
        )


def _read_prompt(prompt: Any) -> tuple[int, Mapping[str, Any]]:
    """Return the task's index and metadata from a prompt: an index, or a row with these keys."""
    if isinstance(prompt, Mapping) and "index" in prompt:
        return task_index(prompt["index"]), prompt.get("metadata") or {}
    try:
        return task_index(prompt), {}
    except UsageError:
        raise UsageError(
            f"a prompt must be a task's index, or a line of `toolroll tasks ENV`, not "
            f"{str(prompt)[:60]!r}"
        ) from None


def sampling_params(args: Any) -> dict[str, Any]:
    """Return the sampling parameters of `args`, a `GRPOConfig`, under SGLang's names.

    `generation_kwargs` must use SGLang's names. The engine client refuses other names.
    """
    params = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,  # TRL: 0 for all tokens
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        **(args.generation_kwargs or {}),
    }
    return {name: value for name, value in params.items() if value is not None}
