"""`AnswerRecord`: what the engine was sent and what it answered in one session, for `Verifier`.

Each answer is recorded when it arrives, before its tokens are stored. Only digests are kept. So the
ids, loss masks and logprobs that a session returns are compared with the engine's own answers. This
module shares no code with the session.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np

from toolroll.rollout.types import Completion, IdArray, LogprobArray, Trajectory

_BYTES = 16
_Key = tuple[bytes, bytes]
"""The digests of a prompt and of the ids that were sampled after it."""


_Answers = tuple[bool | None, tuple[bytes | None, ...]]
"""The answers with the same prompt and the same ids: whether they ended with a stop token (None if
that is not known), and the digest of each one's logprobs (None if not requested). Plain tuples,
because the garbage collector does not visit those of atoms.
"""


class AnswerRecord:
    """The answers of one session. Answers without ids are not recorded.

    Example::

        record = AnswerRecord()
        record.add(prompt_ids, completion)
        record.check(session.trajectories())  # None, or for example "turns: logprobs"
    """

    __slots__ = ("_answers",)

    def __init__(self) -> None:
        self._answers: dict[_Key, _Answers] = {}

    def add(self, prompt_ids: IdArray, completion: Completion) -> None:
        """Record that the engine answered the prompt `prompt_ids` with `completion`."""
        if len(completion.output_ids):
            key = (_digest(prompt_ids, np.int32), _digest(completion.output_ids, np.int32))
            stopped = _stopped(completion)
            before, logprobs = self._answers.get(key, (stopped, ()))
            digests = (*logprobs, _logprob_digest(completion.logprobs))
            self._answers[key] = (stopped if before == stopped else None, digests)

    def copy(self) -> AnswerRecord:
        """Return a copy to which later answers are not added."""
        record = AnswerRecord()
        record._answers = dict(self._answers)
        return record

    def part(self, ids: IdArray, spans: Sequence[tuple[int, int]]) -> AnswerRecord:
        """Return a record of the answers that `check_turns` needs for these arguments."""
        record = AnswerRecord()
        for key in _keys(ids, spans):
            if key in self._answers:
                record._answers[key] = self._answers[key]
        return record

    def check_turns(
        self,
        ids: IdArray,
        spans: Sequence[tuple[int, int]],
        stopped: Sequence[bool],
        stops: Container[int],
    ) -> str | None:
        """Return None if each span [start, stop) of `ids` is exactly one answer to the ids before
        it, and ended as `stopped` says. Otherwise return the kind of the difference. The spans are
        in order. `stops`: the ids that may end a turn if the engine did not name its stop token.
        """
        for span, key, ended in zip(spans, _keys(ids, spans), stopped, strict=True):
            if span[0] == span[1] and not ended:  # the engine aborted the request in its queue
                continue
            if key not in self._answers:
                return "turns"
            recorded, _ = self._answers[key]
            may_stop = ids[span[1] - 1] in stops
            if ended != recorded and (recorded is not None or ended > may_stop):
                return "turns: stop"
        return None

    def check(self, trajectories: Sequence[Trajectory]) -> str | None:
        """Return None if `trajectories` contain each answer of the session, once as a turn of its
        own and else as context, with the loss mask and the logprobs that belong to it. Otherwise
        return the kind of the first difference.
        """
        unseen = {key: list(logprobs) for key, (_, logprobs) in self._answers.items()}
        for trajectory in trajectories:
            spans = [(turn.start, turn.stop) for turn in trajectory.turns]
            if not in_order(spans, len(trajectory)):
                return "turns: order"
            loss_mask = np.zeros(len(trajectory), dtype=bool)
            outside = np.array(trajectory.logprobs)
            keys = _keys(trajectory.input_ids, spans)
            for key, turn in zip(keys, trajectory.turns, strict=True):
                part = slice(turn.start, turn.stop)
                logprobs = trajectory.logprobs[part]
                outside[part] = np.nan
                loss_mask[part] = turn.excluded is None
                if key not in self._answers:
                    return "turns"
                digest = None if np.isnan(logprobs).all() else _logprob_digest(logprobs)
                if digest not in self._answers[key][1]:
                    return "turns: logprobs"
                if turn.excluded != "context":
                    if digest not in unseen[key]:
                        return "turns: trained twice"
                    unseen[key].remove(digest)
            if not np.array_equal(trajectory.loss_mask, loss_mask):
                return "turns: loss mask"
            if not np.isnan(outside).all():
                return "turns: logprobs"
        return "turns: missing" if any(unseen.values()) else None


def in_order(spans: Sequence[tuple[int, int]], length: int) -> bool:
    """Return True if the spans are in order, do not overlap, and are inside `length` tokens."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return all(edge <= following for edge, following in pairwise(edges))


def _keys(ids: IdArray, spans: Sequence[tuple[int, int]]) -> Iterator[_Key]:
    """Yield the key of each span, with the ids before it as its prompt."""
    prompt, end = sha256(), 0
    for start, stop in spans:
        prompt.update(ids[end:start].astype(np.int32).tobytes())
        yield prompt.digest()[:_BYTES], _digest(ids[start:stop], np.int32)
        end = start


def _digest(values: Any, dtype: type[np.generic]) -> bytes:
    return sha256(np.asarray(values, dtype=dtype).tobytes()).digest()[:_BYTES]


def _logprob_digest(logprobs: LogprobArray | None) -> bytes | None:
    return None if logprobs is None else _digest(logprobs, np.float32)


def _stopped(completion: Completion) -> bool | None:
    """Return whether the turn ended with a stop token, or None if that is not known: a stop string
    may end with a stop token, and the engine need not name the stop token.
    """
    if completion.finish_reason != "stop":
        return False
    return True if isinstance(completion.matched, int) else None
