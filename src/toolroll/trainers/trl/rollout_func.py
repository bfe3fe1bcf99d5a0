"""`RolloutFunc`: the function that `GRPOTrainer(rollout_func=...)` calls for a batch of prompts.
`reward` is a function for `reward_funcs` that reads its result.

Invariants: all lists of the result have one entry per prompt, in the order of the prompts. In an
entry, `completion_ids`, `logprobs` and `env_mask` have the same length, at least one token. The
episodes of one call run concurrently, in an event loop in another thread. Before an error or an
interrupt (Ctrl-C) is raised, the episodes that are still running are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.rollout.engine import Engine, EngineClient
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import RolloutError, UsageError, error_in
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Status
from toolroll.trainers.background import Background
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings, gather, task_index
from toolroll.trainers.sequences import delivered_share, select_sequences


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
        UsageError: for an unknown setting, environment, agent or parser.

    Example:
        >>> rollout = make_rollout_func(
        ...     EpisodeSettings(env="desk", max_turns=12), engine="http://127.0.0.1:30000"
        ... )
    """
    return RolloutFunc(EpisodeSettings.checked(settings), engine, sync_weights)


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

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play one episode per prompt. Return TRL's `prompt_ids`, `completion_ids`, `logprobs` and
        `env_mask`, and the fields `toolroll_*` for reward functions. All have one entry per prompt.

        Raises:
            UsageError: options of TRL that cannot be combined with this `rollout_func`.
            RolloutError: all episodes were aborted, as without an engine.
        """
        _check_supported(trainer)
        if self._sync_weights is not None and self._synced != trainer.state.global_step:
            self._sync_weights(trainer)
            self._synced = trainer.state.global_step
        if self._player is None:
            self._player = self._opened(trainer)
        params = sampling_params(trainer.args)
        tasks = [read_prompt(prompt) for prompt in prompts]
        results = self._background.run(self._play(self._player, tasks, params, trainer))
        if results and all(result.status is Status.ABORTED for result in results):
            error = error_in(results[0].info)
            raise RolloutError(
                f"all {len(results)} episodes of the batch were aborted; the first one "
                f"({results[0].stop_reason}): {error.get('message', '')}"
            )
        return to_output(
            results,
            filler=self._player.filler,
            max_completion=trainer.args.max_completion_length,
        )

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._player is not None:
            self._background.run(self._player.aclose())
            self._player = None
        self._background.close()

    def _opened(self, trainer: Any) -> EpisodePlayer:
        processor = trainer.processing_class
        settings = self.settings.filled(
            chat_template_kwargs=trainer.args.chat_template_kwargs, seed=trainer.args.seed
        )
        engine = self._engine
        model = Model.from_args(
            settings.rollout_args(engine=engine if isinstance(engine, str) else None),
            tokenizer=getattr(processor, "tokenizer", processor),  # of a processor
            engine=Engine if isinstance(engine, str) else lambda config: engine(trainer),
        )
        return EpisodePlayer(model, settings)

    async def _play(
        self,
        player: EpisodePlayer,
        tasks: Sequence[tuple[int, Mapping[str, Any]]],
        params: Mapping[str, Any],
        trainer: Any,
    ) -> list[InteractionResult]:
        limit = asyncio.Semaphore(self.settings.concurrency)

        async def play(index: int, metadata: Mapping[str, Any], number: int) -> InteractionResult:
            async with limit:
                return await player.play(index, params, metadata=metadata, number=number)

        processes, process = trainer.accelerator.num_processes, trainer.accelerator.process_index
        episodes = []
        for index, metadata in tasks:
            number = player.next_number(index, metadata) * processes + process
            episodes.append(play(index, metadata, number))
        return await gather(episodes)


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


def read_prompt(prompt: Any) -> tuple[int, Mapping[str, Any]]:
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


def to_output(
    results: Sequence[InteractionResult], *, filler: int = 0, max_completion: int | None = None
) -> dict[str, list[Any]]:
    """Return `results` in the form that a `rollout_func` returns, with the extra fields
    `toolroll_*`.

    `filler` is the token id that stands for an episode that ended before its first prompt.
    """
    sequences = [
        select_sequences(result, several=False, filler=filler, max_response=max_completion)[0]
        for result in results
    ]
    return {
        "prompt_ids": [sequence.prompt_ids for sequence in sequences],
        "completion_ids": [sequence.response_ids for sequence in sequences],
        "logprobs": [sequence.logprobs for sequence in sequences],
        "env_mask": [sequence.loss_mask for sequence in sequences],
        "toolroll_reward": [result.reward for result in results],
        "toolroll_status": [result.status.value for result in results],
        "toolroll_stop_reason": [str(result.stop_reason) for result in results],
        "toolroll_metrics": [dict(result.metrics) for result in results],
        "toolroll_left_out_tokens": [sequence.left_out_tokens for sequence in sequences],
        "toolroll_delivered_share": [delivered_share([sequence]) for sequence in sequences],
        "toolroll_weight_versions": [sequence.weight_versions for sequence in sequences],
    }


def reward(
    completions: Sequence[Any],
    toolroll_reward: Sequence[float | None],
    toolroll_status: Sequence[str],
    toolroll_metrics: Sequence[dict[str, float]],
    toolroll_left_out_tokens: Sequence[int],
    toolroll_delivered_share: Sequence[float],
    log_metric: Callable[[str, float], None] | None = None,
    **others: Any,
) -> list[float | None]:
    """Return the episodes' rewards, with None for an aborted episode. This function is for
    `reward_funcs`.

    It also passes the share of aborted episodes, and the means per episode of the turns, the
    left-out tokens and the delivered share, to TRL's `log_metric`.
    """
    if log_metric is not None:
        count = len(toolroll_status)
        aborted = sum(status == Status.ABORTED.value for status in toolroll_status)
        log_metric("toolroll/aborted_share", aborted / count)
        log_metric("toolroll/left_out_tokens", sum(toolroll_left_out_tokens) / count)
        log_metric("toolroll/delivered_share", sum(toolroll_delivered_share) / count)
        turns = sum(metrics.get("turns", 0.0) for metrics in toolroll_metrics)
        log_metric("toolroll/turns", turns / count)
    return list(toolroll_reward)


def sampling_params(args: Any) -> dict[str, Any]:
    """Return the sampling parameters of `args`, a `GRPOConfig`, under SGLang's names.

    `generation_kwargs` must use SGLang's names.
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
