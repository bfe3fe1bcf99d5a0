"""`Sequence`: one request to the language model, with its tokens and their logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from toolroll.rollout.testing.language_model.model import KVCache
from toolroll.rollout.testing.language_model.sampling import Sampling, TopLogprobs


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float
    top: TopLogprobs


class Sequence:
    """The prompt and the sampled tokens of one request.

    Args:
        limit: The maximum number of sampled tokens.
        sampled: Called in the event loop after each sampled token. It returns True if this token is
            the last.
        top: The number of top logprobs at each position.
        first_input: The first prompt position whose logprob is wanted, or None if no logprobs are
            wanted.

    Attributes:
        computed: The number of tokens whose keys and values are in `cache`.
        reused: The number of prompt tokens that were taken from the cache instead of computed. None
            before the prompt is computed.
        ended: True if no more tokens are sampled.
        error: The exception that ended the sequence, or None.
    """

    def __init__(
        self,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        limit: int,
        sampled: Callable[[], bool],
        top: int = 0,
        first_input: int | None = None,
    ) -> None:
        self.sampling = sampling
        self.top = top
        self.prompt_length = self.length = len(prompt)
        self.computed = 0
        self.cache: KVCache | None = None
        self.reused: int | None = None
        self.ended = False
        self.error: Exception | None = None
        self.tokens: list[Token] = []
        self.input_logprobs: list[tuple[float, TopLogprobs]] = []
        self._ids = np.empty(len(prompt) + limit, np.int32)
        self._ids[: len(prompt)] = prompt
        self._limit = limit
        self._sampled = sampled
        self._first_input = len(prompt) - 1 if first_input is None else first_input

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The prompt and the sampled tokens, as a view."""
        return self._ids[: self.length]

    @property
    def computed_ids(self) -> npt.NDArray[np.int32]:
        """The tokens whose keys and values are computed, as a view."""
        return self._ids[: self.computed]

    @property
    def missing(self) -> int:
        """The number of tokens that are not computed yet."""
        return self.length - self.computed

    @property
    def room(self) -> int:
        """The number of tokens that may still be sampled."""
        return self._limit - len(self.tokens)

    @property
    def next_input(self) -> int:
        """The prompt position from whose logits the next wanted prompt logprob is computed."""
        return self._first_input + len(self.input_logprobs)

    @property
    def reusable(self) -> int:
        """The maximum number of leading tokens that need not be computed, because their logits are
        not wanted.
        """
        return min(self.length - 1, self.next_input)

    def append(self, token: Token) -> None:
        """Add a sampled token."""
        if len(self.tokens) < self._limit:
            self.tokens.append(token)
            self._ids[self.length] = token.id
            self.length += 1
        self.ended = self._sampled()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.ended = error, True
        self._sampled()
