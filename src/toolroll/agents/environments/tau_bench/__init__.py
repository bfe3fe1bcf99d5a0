"""tau-bench (retail, airline) from its own package, which is available only on GitHub."""

from toolroll.agents.environments.tau_bench.environment import (
    AIRLINE,
    RETAIL,
    TauBenchEnvironment,
    TauBenchFactory,
)
from toolroll.agents.environments.tau_bench.package import INSTALL
from toolroll.agents.environments.tau_bench.users import (
    TauBenchUser,
    TauBenchUsers,
    tau_bench_users,
)

__all__ = [
    "AIRLINE",
    "INSTALL",
    "RETAIL",
    "TauBenchEnvironment",
    "TauBenchFactory",
    "TauBenchUser",
    "TauBenchUsers",
    "tau_bench_users",
]
