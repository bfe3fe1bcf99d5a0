"""`ScriptedSource`: a policy's answers, with logprobs that tests can compute again.

Invariants: each logprob is `reference_logprob(prefix, id)`, which is computed from a hash of all
ids up to and including its token. So a test detects a logprob that was recorded for the wrong
token, and a recorded prompt that differs in a single id from the prompt that the engine received.
All tokens of an answer are known before it is played, so that tests can stop it at any token. The
routed experts of a token depend on the number of the forward pass that computed it: the prefill is
one pass, and so is each sampled token. Experts of cached tokens are those of the pass that computed
them.
"""

from __future__ import annotations

import base64
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from toolroll.testing.generation import GenerationAborted
from toolroll.testing.language_model import ModelFolderError
from toolroll.testing.policy import Policy, PolicyRequest, Reply
from toolroll.testing.prefix_cache import PrefixCache
from toolroll.testing.sampler import SampledReply, Sampler
from toolroll.testing.token_source import ABORTED, Answer, Report, TokenSource, Turn

_SPREAD = 8.0
Latency = float | Callable[[PolicyRequest], float]


class Host(Protocol):
    """The parts of an `EngineCore` that its `ScriptedSource` changes."""

    held: int

    def notify(self) -> None:
        """See `EngineCore.notify`."""

    def set_weight_version(self, version: str) -> None:
        """See `EngineCore.set_weight_version`."""


@dataclass(slots=True)
class Script:
    """For the fields, see the parameters of `EmbeddedEngine` with the same names."""

    policy: Policy
    latency: Latency = 0.0
    token_latency: float = 0.0
    pool: float = inf
    seed: int = 0


class ScriptedSource(TokenSource):
    """Plays the replies of a script's policy. If a prompt continues an aborted answer, the reply is
    the rest of that answer, and the policy is not called. All sampling parameters are accepted.
    Those for the length, stops and text are applied. The others have no effect unless the policy
    reads them.
    """

    def __init__(self, script: Script, sampler: Sampler, host: Host) -> None:
        self._script = script
        self._sampler = sampler
        self._host = host
        self.cache = PrefixCache(script.pool)
        self._passes = 0
        self._rests: dict[str, tuple[bytes, list[int]]] = {}

    async def update_weights(self, folder: str, updated: Callable[[], None]) -> None:
        """Raise `ModelFolderError`, because a script has no weights."""
        raise ModelFolderError("this engine sends scripted replies, and has no weights to update")

    async def sample(self, turn: Turn, report: Report | None) -> Answer:
        entry, generation = turn.entry, turn.generation
        if turn.fault.evict:
            self.cache.evict(0)
        cached = self.cache.match(entry.input_ids)[: _most_cached(turn)]
        entry.cached_tokens = len(cached)
        self.cache.computed += len(entry.input_ids) - len(cached)
        sampled = SampledReply([], [], {}, "")
        try:
            reply = await self._reply(turn)
            sampled = self._plan(reply, turn)
            if report is not None:
                await self._play_in_parts(turn, sampled, reply, report)
            await self._play(reply, sampled, turn)
            answer = _answer(turn, sampled.ids, sampled.finish, sampled.text)
        except GenerationAborted:
            ids = sampled.ids[: generation.sampled()]
            answer = _answer(turn, ids, ABORTED, self._sampler.text(ids, turn.request.params))
            self._remember_rest(turn, ids, sampled.reply_ids)
        # the last token has no KV yet
        computed = np.concatenate([entry.input_ids, np.array(answer.ids[:-1], dtype=np.int32)])
        sampled_before = np.arange(1, len(computed) + 1, dtype=np.int32) - len(entry.input_ids)
        passes = self._passes + 1 + np.maximum(sampled_before, 0)
        passes[: len(cached)] = cached
        self._passes += max(1, len(answer.ids))
        self.cache.insert(computed, passes)
        if not turn.request.return_routed_experts:
            return answer
        start = turn.request.routed_experts_start_len
        return replace(answer, routed_experts=_experts(computed[start:], passes[start:]))

    async def _reply(self, turn: Turn) -> Reply:
        sequence, remaining = self._rests.pop(turn.entry.routing_key, (b"", []))
        if remaining and sequence == turn.entry.input_ids.tobytes():
            return Reply(output_ids=remaining)
        turn.count_call()
        reply_or_awaitable = self._script.policy(turn.seen)
        reply = (
            await turn.generation.race(reply_or_awaitable)
            if inspect.isawaitable(reply_or_awaitable)
            else reply_or_awaitable
        )
        return reply if isinstance(reply, Reply) else Reply(reply)

    def _remember_rest(self, turn: Turn, ids: list[int], reply_ids: list[int]) -> None:
        if reply_ids[len(ids) :]:
            sequence = turn.entry.input_ids.tobytes() + np.array(ids, dtype=np.int32).tobytes()
            self._rests[turn.entry.routing_key] = (sequence, reply_ids[len(ids) :])

    def _plan(self, reply: Reply, turn: Turn) -> SampledReply:
        """Return all tokens of the answer, and start its clock."""
        script, seen = self._script, turn.seen
        rng = random.Random(f"{script.seed}/{seen.routing_key}/{seen.call}")
        sampled = self._sampler.stop_at(
            self._sampler.reply_ids(reply, rng), turn.request.params, turn.limit
        )
        latency = script.latency(seen) if callable(script.latency) else script.latency
        turn.generation.begin(len(sampled.ids), latency, script.token_latency)
        return sampled

    async def _play(self, reply: Reply, sampled: SampledReply, turn: Turn) -> None:
        """Wait while the tokens are sampled. Raise `GenerationAborted` on an abort."""
        length, fault, generation = len(sampled.ids), turn.fault, turn.generation
        if fault.weight_version is not None:
            await generation.hold_at(min(fault.switch_after, length))
            self._host.set_weight_version(fault.weight_version)
            generation.release()
        if reply.hold is not None:
            await generation.hold_at(min(reply.hold_after, length))
            self._host.held += 1
            self._host.notify()
            try:
                await generation.race(reply.hold.wait())
            finally:
                self._host.held -= 1
            generation.release()
        if fault.abort_after is not None:
            await generation.hold_at(min(fault.abort_after, length))
            generation.abort()
        await generation.advance(length)

    async def _play_in_parts(
        self, turn: Turn, sampled: SampledReply, reply: Reply, report: Report
    ) -> None:
        """Report parts of the answer as they are sampled, up to the token at which a fault aborts
        the request or the reply is held.
        """
        stops = [turn.fault.abort_after, reply.hold_after if reply.hold is not None else None]
        end = min([len(sampled.ids), *(length for length in stops if length is not None)])
        for length in range(turn.stream_interval, end, turn.stream_interval):
            await turn.generation.advance(length)
            ids = sampled.ids[:length]
            text = self._sampler.text(ids, turn.request.params)
            text = text if sampled.text.startswith(text) else sampled.text
            await report(_answer(turn, ids, None, text))


def _most_cached(turn: Turn) -> int:
    """Return the maximum of `cached_tokens`. The last prompt token, and prompt tokens whose logprob
    is requested, are always computed, so they do not count.
    """
    prompt = turn.entry.input_ids
    most = len(prompt) - 1
    if turn.request.return_logprob and turn.request.logprob_start_len >= 0:
        most = min(most, turn.request.logprob_start_len)
    return max(0, most)


def _answer(turn: Turn, ids: list[int], finish: dict[str, Any] | None, text: str) -> Answer:
    """Return an answer with its logprobs."""
    prompt, top, start = turn.entry.input_ids, turn.request.top_logprobs_num, turn.first_input
    inputs: list[int] = [] if start is None else prompt[start + 1 :].tolist()
    return Answer(
        ids,
        text,
        finish,
        reference_logprobs(prompt, ids),
        top_logprobs(prompt, ids, top) if turn.request.return_logprob and top else (),
        reference_logprobs(prompt[: len(prompt) - len(inputs)], inputs),
        top_input_logprobs(prompt, start, top) if start is not None and top else (),
    )


def _experts(ids: npt.NDArray[np.int32], passes: npt.NDArray[np.int32]) -> str:
    """Return fake experts for tokens that were computed in `passes`, as the base64 of int32
    [tokens, 2, 2]: two experts in each of two layers.
    """
    experts = np.stack([ids % 8, passes % 256, passes // 256, ids % 5], axis=1)
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


# --- logprobs -------------------------------------------------------------------------------------


def reference_logprob(prefix_ids: Sequence[int] | npt.NDArray[Any], token_id: int) -> float:
    """Return the logprob (in nats) of `token_id` after `prefix_ids`: a float32 in (-8.01, 0)."""
    return reference_logprobs(prefix_ids, (token_id,))[0]


def reference_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int]
) -> list[float]:
    """Return the logprob of each of `ids`, given `prefix_ids` and the earlier `ids`. This takes
    O(prefix + ids), because the hash is incremental.
    """
    state = _state(prefix_ids)
    values = []
    for token_id in ids:
        state.update(_bytes(token_id))
        values.append(_value(state))
    return values


def top_logprobs(
    prefix_ids: Sequence[int] | npt.NDArray[Any], ids: Iterable[int], most: int
) -> list[list[tuple[float, int]]]:
    """Return the top logprobs at the position of each of `ids`: up to `most` pairs (logprob, id),
    the most likely first. The candidates are the id itself and the `most` next lower ids, each with
    its `reference_logprob`.
    """
    state = _state(prefix_ids)
    tops = []
    for token_id in ids:
        ranked = []
        for candidate in range(int(token_id), max(-1, int(token_id) - most - 1), -1):
            with_other = state.copy()
            with_other.update(_bytes(candidate))
            ranked.append((_value(with_other), candidate))
        tops.append(sorted(ranked, reverse=True)[:most])
        state.update(_bytes(token_id))
    return tops


def top_input_logprobs(
    prompt: npt.NDArray[np.int32], start: int, most: int
) -> list[list[tuple[float, int]]]:
    """Return the top logprobs at each prompt position after `start`: `most` pairs (logprob, id),
    the most likely first. The candidates are the prompt's own id and the next higher ids.
    """
    tops = []
    for position in range(start + 1, len(prompt)):
        ids = range(int(prompt[position]), int(prompt[position]) + most)
        ranked = [(reference_logprob(prompt[:position], index), index) for index in ids]
        tops.append(sorted(ranked, key=lambda pair: -pair[0]))
    return tops


def _state(prefix_ids: Sequence[int] | npt.NDArray[Any]) -> blake2b:
    return blake2b(np.asarray(prefix_ids, dtype="<i4").tobytes(), digest_size=8)


def _bytes(token_id: int) -> bytes:
    return int(token_id).to_bytes(4, "little", signed=True)


def _value(state: blake2b) -> float:
    share = int.from_bytes(state.copy().digest(), "big") / 2**64
    return float(np.float32(-_SPREAD * share - 2.0**-20))
