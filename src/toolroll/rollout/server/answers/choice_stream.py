"""The stream of one choice of an answer. Sampled ids are decoded to text, and the parser converts
the text to the deltas of the reply.

Invariants: sent text is never taken back. Incomplete characters, possible stop strings and possible
stop tokens are held back until they are certain. The parser holds back text that may begin a marker
of its format. The joined deltas are the message of the finished answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from toolroll.parsers.base import ReplyStream
from toolroll.parsers.types import Delta, Span
from toolroll.rollout.model.turn import ParsedTurn, call_id, with_call_ids
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.template.encode import Encoder, TextDecoder
from toolroll.rollout.types import Completion

Piece = tuple[str, list[Span]]
"""New text, and the spans of the tokens that start in it. A span is a start and a stop position in
the text.
"""


class TextStream:
    """Decodes a growing list of ids to pieces of text. Later ids never change an earlier piece.

    The last token is held back if it may be a stop token. It may be one if it is in
    `stop_token_ids`, or if it is any special token, because the engine may have further stop
    tokens.
    """

    def __init__(
        self, encoder: Encoder, stop_token_ids: Collection[int], stop_strings: Sequence[str]
    ) -> None:
        self._encoder = encoder
        self._stop_token_ids = stop_token_ids
        self._stop_strings = tuple(stop_strings)
        self._decoder = TextDecoder(encoder)
        self._read = 0  # number of ids read
        self._sent: list[str] = []
        self._held = ""
        self._size = 0  # length of the text that was returned
        self._spans: list[Span] = []  # of the tokens that start after that text

    def feed(self, ids: Sequence[int]) -> Piece:
        """Return the new text that later ids cannot change. `ids` are all ids sampled so far."""
        holds_last = bool(ids) and self._may_stop(ids[-1])
        self._read_ids(ids[self._read : len(ids) - holds_last])
        return self._take(self._certain())

    def finish(self, ids: Sequence[int], text: str) -> Piece:
        """Return the part of the finished `text` that was not returned yet. `ids` are all sampled
        ids. A caller that uses the returned spans must leave out the id of the stop token.

        Raise `ApiError` if `text` does not start with the text that was returned before.
        """
        self._read_ids(ids[self._read :], last=True)
        sent = "".join(self._sent)
        if not text.startswith(sent):
            raise stream_error("its text")
        self._held = text[len(sent) :]
        return self._take(len(self._held))

    def _read_ids(self, ids: Sequence[int], *, last: bool = False) -> None:
        text, spans = self._decoder.feed(ids, last=last)
        self._read += len(ids)
        self._held += text
        self._spans += spans

    def _may_stop(self, token_id: int) -> bool:
        return (
            token_id in self._stop_token_ids
            or self._encoder.text_of(token_id) in self._encoder.special
        )

    def _certain(self) -> int:
        """Return how many characters of the held text can be returned: those before the first stop
        string, or before a last part that may be the start of a stop string.
        """
        starts = [start for stop in self._stop_strings if (start := self._held.find(stop)) >= 0]
        if starts:
            return min(starts)
        begun = (
            length
            for stop in self._stop_strings
            for length in range(1, len(stop))
            if self._held.endswith(stop[:length])
        )
        return len(self._held) - max(begun, default=0)

    def _take(self, length: int) -> Piece:
        """Return the first `length` characters of the held text, with the spans of their tokens."""
        text, self._held = self._held[:length], self._held[length:]
        begin = self._size
        self._size += length
        count = sum(start < self._size for start, _ in self._spans)
        spans, self._spans = self._spans[:count], self._spans[count:]
        self._sent.append(text)
        return text, [(start - begin, stop - begin) for start, stop in spans]


class ChoiceStream:
    """The deltas of one choice. `seed` determines the ids of its calls (`call_id`), as in the
    finished answer. `reply` is None for a text completion.

    A call is one delta, with its id. It is returned as soon as the parser is certain of it.
    """

    def __init__(self, text: TextStream, reply: ReplyStream | None = None, seed: str = "") -> None:
        self._text = text
        self._reply = reply
        self._seed = seed
        self._calls = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Return the new deltas that later ids cannot change. `ids` are all ids sampled so far."""
        text, spans = self._text.feed(ids)
        if not text:
            return []
        if self._reply is None:
            return [Delta("content", text)]
        return [self._with_id(step) for step in self._reply.feed(text, offsets=spans)]

    def finish(self, completion: Completion, text: str, turn: ParsedTurn | None) -> list[Delta]:
        """Return the remaining deltas of the finished `text`, which was parsed as `turn`. For a
        text completion, return none, because its last chunk has the rest of the text.

        Raise `ApiError` if the answer contradicts the deltas that were returned before.
        """
        ids = completion.output_ids.tolist()
        if turn is None or self._reply is None:
            self._text.finish(ids, text)
            return []
        rest, spans = self._text.finish(ids[: len(ids) - bool(turn.sampled.stop)], text)
        steps = self._reply.finish(rest, offsets=spans)
        if with_call_ids(self._reply.reply, self._seed) != turn.parsed:
            raise stream_error("its message")
        return [self._with_id(step) for step in steps]

    def _with_id(self, step: Delta) -> Delta:
        if step.call is None:
            return step
        index = self._calls
        self._calls += 1
        named = step.call if step.call.id else step.call.with_id(call_id(self._seed, index))
        return replace(step, call=named)


def stream_error(what: str) -> ApiError:
    """Return the error for a stream that contradicts the finished answer. `what` is the part that
    differs.
    """
    return ApiError(
        500,
        "stream_mismatch",
        f"the stream is wrong: {what} differs from the finished answer. Send the request again "
        "without `stream`, and report this with the model and its tool-call parser",
    )
