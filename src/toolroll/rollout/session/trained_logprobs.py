"""`check_trained_logprobs`: makes sure that no trainer gets a token with loss and an unknown
logprob.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.errors import TokenError


def check_trained_logprobs(logprobs: npt.NDArray[np.floating[Any]], mask: npt.NDArray[Any]) -> None:
    """Raise `TokenError` if a token with mask 1 has no logprob (NaN).

    `logprobs` and `mask` cover the same tokens, both [n]. A filler in place of the logprob would
    give the token a wrong importance ratio, and nobody would notice.
    """
    missing = np.flatnonzero(np.isnan(logprobs) & (mask != 0))
    if len(missing):
        raise TokenError(
            f"{len(missing)} trained tokens have no logprob, the first at position {missing[0]}: "
            "the engine must return the logprob of each token that it samples"
        )
