"""The embedded engine's request log, which tests use as the oracle for prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class LoggedRequest:
    """One request and its answer as it was sampled, before a fault's `garble` changes it.

    Attributes:
        input_ids: The received ids, int32.
        output_ids: The sampled ids, including the stop token. `logprobs` has one value per id.
        status: The HTTP status, or 0 if there is no answer (yet).
        arrival: The position in the order of arrival, from 0.
        finished: The position in the order of completion, from 0. None while the request runs.
        matched: The stop string or the stop token id that ended the answer, or None.
        weight_versions: SGLang's `weight_versions`: a dict with `version`, `start` and `end` for
            each run of output ids with the same version.
        headers: The request's headers, with names in lower case.
        aborted: True if the request was aborted, also by `Fault.abort_after`, or if the client
            disconnected.
        faulted: True if a fault was injected.
        call: The request's `PolicyRequest.call`, or None if the policy (or language model) was
            not called.
    """

    rid: str
    routing_key: str
    input_ids: npt.NDArray[np.int32]
    sampling_params: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    arrival: int = 0
    call: int | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    matched: int | str | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int = 0
    status: int = 0
    aborted: bool = False
    faulted: bool = False
    finished: int | None = None
