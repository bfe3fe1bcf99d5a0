"""tau2-bench (airline, retail, telecom), with the data and tools from the inspect-evals wheel."""

from toolroll.agents.environments.tau2.environment import Tau2Environment
from toolroll.agents.environments.tau2.factory import AIRLINE, RETAIL, TELECOM, Tau2Factory
from toolroll.agents.environments.tau2.package import INSTALL
from toolroll.agents.environments.tau2.reference import ReferenceUser

__all__ = [
    "AIRLINE",
    "INSTALL",
    "RETAIL",
    "TELECOM",
    "ReferenceUser",
    "Tau2Environment",
    "Tau2Factory",
]
