"""airline: one split."""

from __future__ import annotations

from support.tau_mini.envs.shop import maker, tasks

make = maker({"test": tasks(6, 6)})
