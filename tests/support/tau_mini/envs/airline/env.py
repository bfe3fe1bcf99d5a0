"""airline: one split."""

from support.tau_mini.envs.shop import maker, tasks

make = maker({"test": tasks(6, 6)})
