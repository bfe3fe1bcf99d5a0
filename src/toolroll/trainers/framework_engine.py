"""`FrameworkEngine`: an `EngineClient` that calls the engine object of a training framework.
`LoopPlayers`: the `EpisodePlayer`s that use such engines.

Invariants: the engine object is called only in the caller's event loop, without HTTP. An answer is
refused if the engine cannot have sampled its ids, or if an id has no finite logprob, as
`parse_completion` does for SGLang.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from toolroll.rollout.engine import EngineClient, ModelInfo, Progress
from toolroll.rollout.engine.response import check_cached, check_ids, check_logprobs
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runtime.routed_experts import new_rows
from toolroll.rollout.types import (
    Completion,
    ExpertArray,
    GenerateRequest,
    LogprobArray,
    WeightVersion,
)
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings, PerLoop

VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
            "stop stop_token_ids ignore_eos "
        ).split()
    },
}
"""Maps SGLang's name of a sampling parameter to vLLM's."""

TEXT_ONLY = frozenset(
    "no_stop_trim skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
    "detokenize".split()
)
"""Sampling parameters that change only the text that an engine returns, which is not used here."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One turn as a framework's engine returns it. `finish_reason`: "stop", "length" or "abort".
    `matched`: the stop token or stop string that ended the turn, if the engine reports it.
    `routed_experts`: those of the prompt and the answer without the last token, [tokens - 1,
    layers, top_k]. The other fields are the same as in `Completion`.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: str
    weight_versions: tuple[WeightVersion, ...] = ()
    matched: int | str | None = None
    text: str = ""
    cached_tokens: int = 0
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] | None = None
    routed_experts: npt.ArrayLike | None = None


class FrameworkEngine(EngineClient):
    """The base class of the adapters' engines. A subclass implements `sample`.

    `name` is the framework's name, for error messages. A turn must end with a requested stop token
    or a special token of `tokenizer`, if the engine says that it stopped.
    """

    requires_logprobs = True
    """False if `sample` may return turns without logprobs. They are NaN in the trajectory, and
    `training_sequences` refuses it.
    """

    def __init__(self, name: str, tokenizer: Any, *, context_length: int | None) -> None:
        self._name = name
        self._model_info = ModelInfo(context_length=context_length, vocab_size=len(tokenizer))
        added = tokenizer.added_tokens_decoder.items()
        self._special = frozenset(index for index, token in added if token.special)
        self.experts_shape: tuple[int, int] | None = None
        """(layers, top_k) of the routed experts that the engine returned, or None."""

    @abstractmethod
    async def sample(self, request: GenerateRequest) -> Sampled:
        """Sample one turn."""

    @property
    def url(self) -> str:
        """The engine's name, for messages. The engine has no address."""
        return self._name

    async def model_info(self) -> ModelInfo:
        """Return the context length and the vocabulary size that the constructor got."""
        return self._model_info

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        """Sample one turn and check it. Raise `CompletionError` if its ids, logprobs or finish
        reason are not valid.
        """
        start = perf_counter()
        turn = await self.sample(request)
        ids = check_ids(turn.ids, request, vocab_size=self._model_info.sampled_limit)
        logprobs = self._logprobs(turn, len(ids))
        if turn.finish_reason not in ("stop", "length", "abort"):
            raise CompletionError(
                f"{self._name}'s engine gave the stop reason {turn.finish_reason!r}, which is "
                "unknown: it must be stop, length or abort"
            )
        if turn.finish_reason == "stop" and not len(ids):
            raise CompletionError(
                f"{self._name}'s engine stopped without a token: the sampled ids must include the "
                "stop token"
            )
        if progress is not None:
            progress(ids.tolist())
        return Completion(
            output_ids=ids,
            logprobs=logprobs,
            finish_reason=turn.finish_reason,
            matched=self._matched(turn, request.sampling_params),
            text=turn.text,
            weight_versions=turn.weight_versions,
            prompt_tokens=len(request.input_ids),
            cached_tokens=check_cached(turn.cached_tokens),
            latency=perf_counter() - start,
            top_logprobs=turn.top_logprobs,
            routed_experts=self._routed_experts(turn, request) if len(ids) else None,
        )

    def _matched(self, turn: Sampled, params: Mapping[str, Any]) -> int | str | None:
        """Return the stop token or stop string that ended the turn, or None.

        If the engine reports neither, it is the last token. If stop strings were requested, the
        last token may be part of one: the result is None, unless it is a requested stop token.
        Otherwise, raise `CompletionError` if the ids lack the stop token.
        """
        if turn.finish_reason != "stop" or isinstance(turn.matched, str):
            return turn.matched if turn.finish_reason == "stop" else None
        last, requested = int(turn.ids[-1]), params.get("stop_token_ids") or ()
        if turn.matched is None and params.get("stop"):
            return last if last in requested else None
        ended = last in requested or last in self._special
        if not (ended if turn.matched is None else last == turn.matched):
            raise CompletionError(
                f"{self._name}'s engine stopped after the id {last}, which ends no turn: the "
                "sampled ids must include the stop token"
            )
        return last

    def _routed_experts(self, turn: Sampled, request: GenerateRequest) -> ExpertArray | None:
        if turn.routed_experts is None:
            return None
        rows = np.asarray(turn.routed_experts)
        try:
            _, layers, top_k = rows.shape
            self.experts_shape = layers, top_k
            return new_rows(
                rows.ravel(),
                start=request.routed_experts_start,
                tokens=len(request.input_ids) + len(turn.ids),
                width=layers * top_k,
            )
        except ValueError as error:
            raise CompletionError(
                f"{self._name}'s engine gave routed experts of the shape {rows.shape}: {error}"
            ) from error

    def _logprobs(self, turn: Sampled, count: int) -> LogprobArray | None:
        if turn.logprobs is None and not self.requires_logprobs:
            return None
        values = np.array(() if turn.logprobs is None else turn.logprobs, dtype=np.float64)
        if len(values) != count or np.isnan(values).any():
            given = int((~np.isnan(values)).sum())
            raise CompletionError(
                f"{self._name}'s engine gave {given} logprobs for {count} sampled ids: "
                f"{'each needs one' if given else 'logprobs must be on'}"
            )
        return check_logprobs(values)

    async def post(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Raise `UsageError`, because there is no HTTP."""
        raise UsageError(f"{self._name}'s engine has no HTTP address: call generate, not post")

    async def aclose(self) -> None:
        """Do nothing, because the engine belongs to the trainer."""


class LoopPlayers:
    """One `EpisodePlayer` per event loop and engine object, because a connection can be used only
    in one event loop. `make` returns the engine client for an engine object. Raise `UsageError` if
    `settings` are wrong, before the first episode.
    """

    def __init__(
        self,
        make: Callable[[Any], EngineClient],
        tokenizer: Any,
        settings: EpisodeSettings,
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._settings = EpisodeSettings.checked(settings)
        self._args = settings.rollout_args(model=str(vars(tokenizer).get("name_or_path") or ""))
        self._players: PerLoop[EpisodePlayer] = PerLoop()

    def get(self, engine: Any) -> EpisodePlayer:
        """Return the player for `engine` in the running loop."""
        # The player keeps a reference to the engine, so its id is not reused.
        return self._players.get(id(engine), lambda: self._player(engine))

    def _player(self, engine: Any) -> EpisodePlayer:
        model = Model.from_args(
            self._args, tokenizer=self._tokenizer, engine=lambda _: self._make(engine)
        )
        return EpisodePlayer(model, self._settings, name=lambda field: f"EpisodeSettings's {field}")

    async def aclose(self) -> None:
        """Close the players of the running loop, with their models and user simulators."""
        for player in self._players.pop():
            await player.aclose()


def renamed(params: Mapping[str, Any], names: Mapping[str, str], *, engine: str) -> dict[str, Any]:
    """Return sampling parameters under the names that `names` maps them to, without those that
    affect only the text. Raise `UsageError` for a parameter that is not in `names`. `engine` is the
    engine's name, for the error message.
    """
    params = {name: value for name, value in params.items() if name not in TEXT_ONLY}
    for name in params:
        if name not in names:
            raise UsageError(f"{engine} has no sampling parameter {name!r}: leave it out")
    return {names[name]: value for name, value in params.items()}
