"""tau2-bench (airline, retail, telecom), with the tools of the inspect-evals wheel. The data are
those of the wheel, or of a checkout of tau2-bench.
"""

from toolroll.environments.tau2.environment import Tau2Environment
from toolroll.environments.tau2.factory import (
    Tau2Factory,
    airline,
    retail,
    telecom,
)
from toolroll.environments.tau2.package import INSTALL

__all__ = [
    "INSTALL",
    "Tau2Environment",
    "Tau2Factory",
    "airline",
    "retail",
    "telecom",
]
