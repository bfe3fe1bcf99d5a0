"""BFCL v4 multi-turn, from the `bfcl-eval` wheel."""

from toolroll.environments.bfcl.environment import (
    MULTI_TURN_BASE,
    MULTI_TURN_LONG_CONTEXT,
    MULTI_TURN_MISS_FUNC,
    MULTI_TURN_MISS_PARAM,
    BfclEnvironment,
    BfclFactory,
)

__all__ = [
    "MULTI_TURN_BASE",
    "MULTI_TURN_LONG_CONTEXT",
    "MULTI_TURN_MISS_FUNC",
    "MULTI_TURN_MISS_PARAM",
    "BfclEnvironment",
    "BfclFactory",
]
