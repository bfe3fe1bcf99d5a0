"""`VerlSettings`: the keys of `settings` in the agent loop's configuration entry."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolroll.trainers.episodes import EpisodeSettings


class VerlSettings(EpisodeSettings):
    """The settings of the episodes. Set sampling parameters and lengths in verl's own keys."""

    on_aborted: Literal["zero", "raise"] = Field(
        default="raise",
        description="What to do with an aborted episode: raise an error, so that verl's trainer "
        "normalizes its group without it (raise), or return a sample with a zero mask and the "
        "reward 0.0, which shifts the advantages of its group (zero).",
    )
