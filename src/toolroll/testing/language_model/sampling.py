"""Sample token ids from logits, with SGLang's parameters.

A token's logprob is log-softmax of logits / temperature, before top-k and top-p. If sampling is
greedy (temperature 0 or top_k 1), the temperature is 1. Source: SGLang 0.5.23,
`srt/layers/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.testing.language_model.weights import Tensor
from toolroll.testing.wire import refused

TopLogprobs = list[tuple[float, int]]
"""Pairs of logprob and id, the most likely first."""

_GREEDY_BELOW = 1e-6  # SGLang's smallest temperature
_HASH_BYTES = 6
_IMPLEMENTED = frozenset(
    (
        "max_new_tokens stop stop_token_ids temperature top_p top_k n ignore_eos "
        "skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval "
        "sampling_seed"
    ).split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop_regex": ("", []),
    "logit_bias": ({},),
    "custom_params": ({},),
    "beam_width": (1,),
    "watermark": (False,),
}
"""Values, beside None, with which a parameter that is not implemented has no effect."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request. `top_k`: 0 for all ids. The `seed` and a token's
    position determine the token's random number.
    """

    seed: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False

    @classmethod
    def read(cls, params: Mapping[str, Any], default_seed: str) -> Sampling:
        """Read `sampling_params` that `check_sampling` accepts."""
        temperature = _number(params, "temperature", 1.0)
        top_k, seed = int(_number(params, "top_k", -1)), params.get("sampling_seed")
        greedy = temperature < _GREEDY_BELOW or top_k == 1
        return cls(
            seed=default_seed if seed is None else str(seed),
            temperature=1.0 if greedy else temperature,
            top_k=max(top_k, 0),
            top_p=_number(params, "top_p", 1.0),
            greedy=greedy,
        )

    @property
    def filters(self) -> bool:
        """True if top-k or top-p can exclude ids."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) for the token at `position`."""
        digest = blake2b(f"{self.seed}/{position}".encode(), digest_size=_HASH_BYTES).digest()
        return int.from_bytes(digest, "big") / (1 << 8 * _HASH_BYTES)


def check_sampling(params: Mapping[str, Any]) -> None:
    """Raise `RefusedError` if a parameter is not implemented and its value is not neutral."""
    for name, value in params.items():
        if name not in _IMPLEMENTED and value is not None and value not in _NEUTRAL.get(name, ()):
            raise refused(
                f"the embedded engine's language model does not support {name}="
                f"{value!r} in sampling_params"
            )


def sample(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[npt.NDArray[np.int64], Tensor]:
    """Return one id for each row of `logits` (rows, vocabulary), and the logprobs of all ids.

    Raise `FloatingPointError` if a logprob is NaN, for example because the weights diverged in
    training.
    """
    temperatures = np.array([each.temperature for each in samplings], np.float32)
    logprobs = log_softmax(logits / temperatures[:, None])
    if np.isnan(logprobs).any():
        raise FloatingPointError("the logits of the language model are not finite")
    greedy = [row for row, each in enumerate(samplings) if each.greedy]
    random = [row for row, each in enumerate(samplings) if not each.greedy]
    ids = np.empty(len(samplings), np.int64)
    ids[greedy] = logits[greedy].argmax(axis=-1)
    weights = np.exp(logprobs[random] if greedy else logprobs)
    for row, chances in zip(random, weights, strict=True):
        sampling = samplings[row]
        if sampling.filters:
            _filter(chances, sampling)
        sums = chances.cumsum(dtype=np.float64)
        # the first id whose sum is above the target, so never one with the weight 0
        ids[row] = sums.searchsorted(sampling.uniform(positions[row]) * sums[-1], side="right")
    return ids, logprobs


def log_softmax(logits: Tensor) -> Tensor:
    """Return the logprobs for logits of the shape (rows, vocabulary)."""
    shifted: Tensor = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def top_logprobs(logprobs: Tensor, most: int) -> TopLogprobs:
    """Return the `most` largest logprobs of one row, with their ids."""
    most = min(most, len(logprobs))
    best = np.argpartition(-logprobs, most - 1)[:most] if most else np.arange(0)
    return sorted(((float(logprobs[index]), int(index)) for index in best), reverse=True)


def _filter(weights: Tensor, sampling: Sampling) -> None:
    """Set the weights (probabilities) of ids outside top-k and top-p to 0. An id is inside top-p if
    the weights of all more likely ids add up to at most `top_p`.
    """
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    outside = ranked.cumsum(dtype=np.float64) - ranked > sampling.top_p
    if sampling.top_k:
        outside[sampling.top_k :] = True
    weights[order[outside]] = 0


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    return default if value is None else float(value)
