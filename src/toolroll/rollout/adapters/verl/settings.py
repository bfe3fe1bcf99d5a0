"""`VerlSettings`: the keys of `settings` in the agent loop's configuration entry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolroll.rollout.adapters.episodes import EpisodeSettings


class VerlSettings(EpisodeSettings):
    """The settings of the episodes. Set sampling parameters and lengths in verl's own keys."""

    on_aborted: Literal["zero", "raise"] = Field(
        default="zero",
        description="what to do with an aborted episode: return a sample with the reward 0.0 and a "
        "zero mask (zero), or end verl's step with an error (raise)",
    )
