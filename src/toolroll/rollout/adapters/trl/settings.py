"""`TrlSettings`: the settings of the episodes. `sampling_params` reads the sampling parameters from
TRL's `GRPOConfig`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from toolroll.rollout.adapters.episodes import EpisodeSettings


class TrlSettings(EpisodeSettings):
    """The settings of the episodes. Set sampling parameters in `GRPOConfig`, not here."""

    concurrency: int = Field(
        default=64, ge=1, description="number of concurrent episodes in one process"
    )


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
