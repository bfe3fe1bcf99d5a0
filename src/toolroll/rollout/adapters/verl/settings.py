"""`VerlSettings`: the keys of `settings` in the agent loop's configuration entry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolroll.rollout.adapters.episodes import EpisodeSettings


class VerlSettings(EpisodeSettings):
    """The settings of the episodes. Sampling parameters and lengths are verl's own keys."""

    on_aborted: Literal["zero", "raise"] = Field(
        default="zero",
        description="what happens to an aborted episode: zero returns a sample with the reward 0.0 "
        "and a zero mask; raise ends verl's step with an error",
    )
