"""retail: three splits."""

from support.tau_mini.envs.shop import maker, tasks

make = maker({"test": tasks(0, 12), "train": tasks(12, 18), "dev": tasks(30, 6)})
