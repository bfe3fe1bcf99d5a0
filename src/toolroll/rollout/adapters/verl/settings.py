"""`VerlSettings`: the keys of `settings` in the agent loop's configuration entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints


class VerlSettings(EpisodeSettings):
    """The settings of the episodes. Sampling parameters and lengths are verl's own keys."""

    on_aborted: Literal["zero", "raise"] = Field(
        default="zero",
        description="what happens to an aborted episode: zero returns a sample with the reward 0.0 "
        "and a zero mask; raise ends verl's step with an error",
    )


def read_settings(value: Mapping[str, Any] | None) -> VerlSettings:
    """Return `value` as `VerlSettings`. Raise `UsageError` if a key is unknown or has a wrong
    value.
    """
    try:
        return VerlSettings.model_validate(dict(value or {}))
    except ValidationError as error:
        found = "; ".join(f"{name}: {words}" for name, words in complaints(error))
        raise UsageError(f"settings of the agent loop: {found}") from error
