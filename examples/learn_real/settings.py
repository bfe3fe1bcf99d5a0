"""How a run is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`minutes` is the time for one call of the command. `layers` is the number of the model's
    layers that are kept: with 2, a run rehearses all parts, and learns nothing.

    `held_out` is the number of tasks in an evaluation, and `references` that of the warm start. A
    step of the policy gradient plays `groups` tasks, each `group` times. The rates are the maximum
    learning rates. A state is saved every `save_every` seconds.
    """

    minutes: float = 10.0
    device: str = "cuda"
    layers: int = 30
    held_out: int = 200
    references: int = 3000
    warm_steps: int = 100_000
    rl_steps: int = 100_000
    batch: int = 16
    groups: int = 32
    group: int = 8
    rate: float = 5e-4
    rl_rate: float = 2e-5
    save_every: float = 60.0
