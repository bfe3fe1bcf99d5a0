"""The embedded engine's request log: the tests' oracle of what was asked and what was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class LoggedRequest:
    """One request and its answer, as sampled (before a fault's `garble`).

    `input_ids`: int32, as they came. `output_ids` and `logprobs`: one to one, the stop token
    included. `status`: the HTTP status; 0 while there is no answer, and if there was none (a
    dropped connection, a client that left). `arrival` and `finished`: places in the order of
    arrival and of the ends, from 0; `finished` is None while it runs. `matched`: the stop string or
    stop id. `weight_versions`: SGLang's spans. `headers`: names in lower case. `aborted`: by an
    abort, a pause, a fault or as the client left. `faulted`: a fault was injected. `call`: the
    policy's number of it, None if the policy was not called.
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
