"""Derive the text that a template appends after an assistant turn, by comparing renders.

The template is a black box. There are two cases:

1. The whole render starts with the text that was served and sampled, apart from white space within
   the turn. Then the rest of the render is the text to append.
2. In all other cases, the turn was truncated, its message renders differently, or history is
   rewritten. A sentinel (a random word) is then added to the end of the assistant turn (its last
   call's arguments, its content or its reasoning), and the conversation is rendered again with the
   new messages. The text to append is the text after the sentinel, without the part of the turn's
   end that the model sampled itself. Two more comparisons show whether the template rewrites
   history: the whole conversation must still start with the prompt that was served, and the
   assistant turn must be the same with and without the new messages.

Invariants (I3 and I5: docs/guarantees.md):

- Sampled text is never encoded again (I3), and a rewrite is never ignored (I5).
- If the model wrote a turn differently from how its message renders (different JSON spacing, for
  example), this alone does not count as a rewrite. The turn must also render differently with and
  without the new messages, without a part of the sampled text (`dropped.py`), or with another token
  at its end.
- With history="scaffold", the render may lack the scaffold of earlier turns (`scaffold`). Nothing
  else may differ: the same comparisons are made with the served text without its scaffolds.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.runtime.jsonable import common_prefix
from toolroll.rollout.template.dropped import dropped_part, shows_all, squashed
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import Head, Renderer
from toolroll.rollout.template.snapshot import texts_of
from toolroll.rollout.types import Message

SENTINEL = f"Nq{secrets.token_hex(4)}zN"
"""Random ASCII letters and digits: no template strips, escapes or splits them, and no conversation
contains them.
"""

EMPTY_ELEMENT = re.compile(r"\s*<(\w+)>\s*</\1>\s*")
_LAST_ARGUMENT = "zzzzzz"  # for templates that sort the names: nearly always the last one
_PROMPT_REWRITTEN = "the prompt that was served is no longer rendered as it was"


@dataclass(frozen=True, slots=True)
class SampledText:
    """The text of a sampled assistant turn, including its stop token.

    `stop` is the stop token's text, or None for a truncated turn. `stops` are the texts of tokens
    that may end a turn in addition to the template's. `last_id` is the last sampled id, or None if
    nothing was sampled.
    """

    text: str
    stop: str | None
    stops: tuple[str, ...] = ()
    last_id: int | None = None

    @property
    def body(self) -> str:
        """The text without the stop token."""
        return self.text[: -len(self.stop)] if self.stop else self.text


class Continuation(NamedTuple):
    """A conversation that continues after a sampled turn.

    `before`: its messages from `Renderer.prepare`, up to that turn. `new`: those after the turn.
    `head`: its `Renderer.head`. `whole`: its render, with the generation prompt.
    """

    before: Sequence[Message]
    new: Sequence[Message]
    head: Head
    whole: str

    @property
    def turn(self) -> Message:
        """The message of the sampled turn."""
        return self.before[-1]


class ServedPrompt(NamedTuple):
    """The text of a prompt that was served. `turns`: where earlier sampled turns start in it, if
    later renders may lack their scaffolds. Otherwise None.
    """

    text: str
    turns: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class RenderedDelta:
    """The render of the conversation with the new messages and the generation prompt.

    The text from `cut` on is appended. `rewritten` describes what the template rewrites in the
    prompt or the sampled turn. It is None if the template rewrites nothing. `bare`: the render
    lacks the scaffolds of the turns so far. `unshown`: nothing is rewritten, but the render lacks
    sampled text, or shows it at another place.
    """

    whole: str
    cut: int
    rewritten: str | None
    bare: bool = False
    unshown: bool = False

    @property
    def text(self) -> str:
        """The text to append."""
        return self.whole[self.cut :]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The text after the sentinel (S), if the new messages follow and if they do not::

        prompt | turn | S | </arguments> | <|im_end|> | \\n<|im_start|>user ...
                            with_new --------------------------------------->
                            without_new ------------> (perhaps and a newline)
                                          close_at     resume_at

    `close_at` is where the turn close starts in both. `resume_at` is where the text to append
    starts in `with_new` if the model sampled the stop token. S is the only difference between the
    render with it and `whole`, so both end alike, and a position is taken from one to the other by
    its distance from the end.
    """

    with_new: str
    without_new: str
    close_at: int
    resume_at: int


class _Renders(NamedTuple):
    """The renders that are compared. `served_text`: the prompt that was served. `prompt`: the same,
    perhaps without its scaffolds. `whole`: the whole conversation. `history`: `whole` without the
    text to append.
    """

    served_text: str
    prompt: str
    whole: str
    history: str


class DeltaRenderer:
    """Derives the text to append after a sampled turn. `stops` are the texts of the tokens that end
    a turn.

    Example: the served prompt ends with `<|im_start|>assistant\\n`, and the model sampled
    `1 + 1<|im_end|>`. For a new user message, the text to append is the newline after the stop
    token, the rendered message, and the next generation prompt::

        deltas = DeltaRenderer(renderer, encoder, ["<|im_end|>"])
        then = Continuation(messages, new, head, whole)
        found = deltas.derive(then, sampled, ServedPrompt(prompt))
        prompt + sampled.text + found.text  # the next prompt
        found.text  # "\\n<|im_start|>user\\nMore.<|im_end|>\\n<|im_start|>assistant\\n"
    """

    def __init__(self, renderer: Renderer, encoder: Encoder, stops: Sequence[str]) -> None:
        self.renderer = renderer
        self.encoder = encoder
        self.stops = tuple(stops)

    def derive(
        self,
        then: Continuation,
        sampled: SampledText,
        served: ServedPrompt,
        *,
        fork: bool = False,
    ) -> RenderedDelta:
        """Return the text to append for the new messages of `then`.

        The turn was sampled after the prompt `served`. `fork`: True if a template that rewrites
        earlier text must start a new sequence.

        Raises:
            HistoryRewrittenError: the text to append cannot be determined, or `fork` is True and
                the whole render does not start with the prompt, with or without its scaffolds.
            TemplateError: the template refuses the conversation.
        """
        turn, whole = then.turn, then.whole
        if turn.get("role") != "assistant":
            raise TemplateError(
                "the message before the new messages must be an assistant turn, not a message of "
                f"role {turn.get('role')!r}"
            )
        prompt = served.text
        if served.turns is not None and not whole.startswith(prompt):
            prompt = self._without_scaffolds(prompt, served.turns)
        if fork and not whole.startswith(prompt):
            raise HistoryRewrittenError(_PROMPT_REWRITTEN)
        bare = prompt != served.text
        cut = self._end_of_turn(turn, sampled, prompt, whole)
        if cut is not None:
            return RenderedDelta(whole, cut, None, bare)
        tail = self._tail(then, sampled)
        # The sentinel is part of the turn. If it changes the text after the turn, that text is not
        # the one that the template renders for the turn that was sampled.
        if not whole.endswith(tail.with_new[tail.close_at :]):
            raise HistoryRewrittenError(
                "the text of the new messages depends on the text of the assistant turn"
            )
        resume_at = (
            tail.resume_at
            if sampled.stop
            else _resume_after_cut(tail, whole, prompt, sampled.text, turn)
        )
        cut = len(whole) - len(tail.with_new) + resume_at
        renders = _Renders(served_text=served.text, prompt=prompt, whole=whole, history=whole[:cut])
        rewritten = self._rewritten(then, sampled, renders, tail)
        shown, control = renders.history[len(prompt) :], self.encoder.pattern
        shows = rewritten or shows_all(turn, sampled.body, shown, control)
        return RenderedDelta(whole, cut, rewritten, bare, unshown=not shows)

    @cached_property
    def scaffold(self) -> str:
        """The empty element, such as an empty `<think>` block, that the generation prompt writes at
        the start of a turn, and that the template does not show there in history. It is empty if
        there is none.
        """
        user: Message = {"role": "user", "content": "x"}
        turn: Message = {"role": "assistant", "content": SENTINEL}
        try:
            prompt = self.renderer.render([user], None, generate=True)
            history = self.renderer.render([user, turn, user], None, generate=False)
        except TemplateError:
            return ""
        opening = history.partition(SENTINEL)[0]
        scaffold = prompt[len(opening) :] if prompt.startswith(opening) else ""
        return scaffold if EMPTY_ELEMENT.fullmatch(scaffold) else ""

    def _without_scaffolds(self, prompt: str, turns: Sequence[int]) -> str:
        """Return `prompt` without the scaffolds before `turns` and at its end. Return it unchanged
        if one of them is missing.
        """
        pieces, begin = [], 0
        for start in (*turns, len(prompt)):
            if not prompt.endswith(self.scaffold, begin, start):
                return prompt
            pieces.append(prompt[begin : start - len(self.scaffold)])
            begin = start
        return "".join(pieces)

    def _end_of_turn(
        self, turn: Message, sampled: SampledText, prompt: str, whole: str
    ) -> int | None:
        """Return where the sampled turn ends in `whole`. Return None if the sentinel is needed to
        find the end.

        The end is known if `whole` starts with the served text and the turn. White space within the
        turn may differ if the stop token is the same.
        """
        if sampled.stop is None or not whole.startswith(prompt):
            return None
        begin, end = len(prompt), len(prompt) + len(sampled.text)
        if not whole.startswith(sampled.text, begin):
            # The same stop token after the same characters: only the spacing within the turn
            # differs, and the text after the stop token does not depend on it.
            close_at, close = self._first_stop(whole, begin, sampled)
            if close != sampled.stop or squashed(whole[begin:close_at]) != squashed(sampled.body):
                return None
            end = close_at + len(sampled.stop)
        return None if _shown_again(turn, whole[end:]) else end

    def _all_stops(self, sampled: SampledText) -> set[str]:
        return {*self.stops, *sampled.stops, *([sampled.stop] if sampled.stop else ())}

    def _first_stop(self, text: str, begin: int, sampled: SampledText) -> tuple[int, str | None]:
        """Return the position and the text of the first stop token in `text` from `begin` on. If
        there is none, return the end of `text` and None.
        """
        # The longest stop wins, because one stop may be the start of another.
        hits = [
            (pos, -len(stop), stop)
            for stop in self._all_stops(sampled)
            if (pos := text.find(stop, begin)) >= 0
        ]
        pos, _, first = min(hits, default=(len(text), 0, None))
        return pos, first

    # --- the tail ---------------------------------------------------------------------------------

    def _tail(self, then: Continuation, sampled: SampledText) -> _Tail:
        """Render with the sentinel, and find where the assistant turn ends."""
        if any(stop in text for stop in self._all_stops(sampled) for text in texts_of(then.turn)):
            raise HistoryRewrittenError(
                "the turn contains the text of a stop token, and the template does not render the "
                "turn as it was sampled"
            )
        with_new, without_new = self._after_sentinel(then)
        close_at, rendered_close = self._first_stop(without_new, 0, sampled)
        if rendered_close is not None:
            if not with_new.startswith(without_new[:close_at]):
                raise HistoryRewrittenError(
                    "the template moves or changes the end of the assistant turn"
                )
            if _shown_again(then.turn, without_new[close_at + len(rendered_close) :]):
                # DeepSeek-R1-Distill
                raise HistoryRewrittenError("the template repeats the turn's text after its calls")
            # the model sampled the close, and continued up to the next role's marker
            beyond = rendered_close + (sampled.stop or "")
            if (
                sampled.stop != rendered_close
                and sampled.text.endswith(beyond)
                and with_new.startswith(beyond, close_at)
            ):
                return _Tail(with_new, without_new, close_at, close_at + len(beyond))
            close = self._close_in_history(with_new, close_at, rendered_close, sampled.stop)
            if sampled.stop and sampled.stop != rendered_close:
                raise HistoryRewrittenError(
                    f"the model stopped with {sampled.stop!r}, but the template closes with "
                    f"{rendered_close!r}"
                )
            return _Tail(with_new, without_new, close_at, close_at + len(close))
        # No stop token in the render: the turn's stop is the next role's marker (GLM).
        closing = without_new if with_new.startswith(without_new) else without_new.rstrip("\n")
        if not with_new.startswith(closing):
            raise HistoryRewrittenError(
                "the template moves or changes the end of the assistant turn"
            )
        close_at = len(closing)
        if sampled.stop and not with_new.startswith(sampled.stop, close_at):
            raise HistoryRewrittenError(
                f"the model stopped with {sampled.stop!r}, but the template does not render this "
                "token after the turn"
            )
        return _Tail(with_new, without_new, close_at, close_at + len(sampled.stop or ""))

    def _after_sentinel(self, then: Continuation) -> tuple[str, str]:
        """Return the text after the sentinel in the render with the new messages, and in the render
        without them.
        """
        turn, head = then.turn, then.head
        candidates = [{**turn, "content": (turn.get("content") or "") + SENTINEL}]
        if turn.get("tool_calls"):
            candidates.insert(0, _probe_arguments(turn, text=self.renderer.argument_form == "text"))
        elif turn.get("reasoning_content") and not turn.get("content"):
            # truncated in its reasoning: Seed-OSS does not close a turn without content
            fields = [name for name in ("reasoning_content", "thinking") if turn.get(name)]
            candidates.insert(0, {**turn, **{name: turn[name] + SENTINEL for name in fields}})
        # A template may drop one of the fields once messages follow, so try them in turn. Both
        # renders need the sentinel: `without_new` shows where the turn ends, `with_new` what
        # follows it.
        for candidate in candidates:
            probed = (*then.before[:-1], candidate)
            with_new = self.renderer.render_prepared([*probed, *then.new], head, generate=True)
            without_new = self.renderer.render_prepared(probed, head, generate=False)
            if SENTINEL in with_new and SENTINEL in without_new:
                return (
                    with_new[with_new.rfind(SENTINEL) + len(SENTINEL) :],
                    without_new[without_new.rfind(SENTINEL) + len(SENTINEL) :],
                )
        raise HistoryRewrittenError(
            "the template does not show this assistant turn once messages follow it"
        )

    def _close_in_history(
        self, with_new: str, close_at: int, rendered_close: str, sampled: str | None
    ) -> str:
        """Return the turn close that the template renders if messages follow. It is a rewrite if
        another one was sampled: gpt-oss samples `<|return|>`, and history shows `<|end|>`.
        """
        candidates: list[str] = [
            rendered_close,
            *([sampled] if sampled else ()),
            *self._other_closes,
        ]
        for close in candidates:
            if with_new.startswith(close, close_at):
                return close
        raise HistoryRewrittenError("the template does not close the turn once messages follow")

    @cached_property
    def _other_closes(self) -> tuple[str, ...]:
        """The control token that closes a turn without calls in history, if there is one.

        Turns with calls are not used: Gemma puts tool results into the turn, so the next token may
        start a result.
        """
        user: Message = {"role": "user", "content": "x"}
        markers = []
        for following in (user, {"role": "system", "content": "x"}):
            try:
                text = self.renderer.render(
                    [user, {"role": "assistant", "content": SENTINEL}, following],
                    None,
                    generate=True,
                )
            except TemplateError:
                continue
            marker = self.encoder.pattern.search(text, text.rfind(SENTINEL))
            markers.append(marker.group() if marker is not None else "")
        # A marker that depends on the next role is not a close: it starts the next message.
        return (markers[0],) if markers and markers[0] and markers == markers[:1] * 2 else ()

    # --- rewritten history ------------------------------------------------------------------------

    def _rewritten(
        self, then: Continuation, sampled: SampledText, renders: _Renders, tail: _Tail
    ) -> str | None:
        """Describe what the template rewrites in the served and sampled text. Return None if it
        rewrites nothing.
        """
        served_text, prompt, whole, history = renders
        if not history.startswith(prompt):
            return _PROMPT_REWRITTEN
        if history[len(prompt) :] == sampled.text:
            return None
        without_new = self.renderer.render_prepared(then.before, then.head, generate=False)
        opening = served_text if without_new.startswith(served_text) else prompt
        if not without_new.startswith(opening):
            return (
                "the render of the last assistant turn does not start with the generation prompt "
                "that was served"
            )
        turn_last = without_new[
            len(opening) : len(without_new) - len(tail.without_new) + tail.close_at
        ]
        turn_then = whole[len(prompt) : len(whole) - len(tail.with_new) + tail.close_at]
        # A turn that renders alike in both cases is not rewritten, even if it was sampled with
        # other spacing.
        if turn_last != turn_then and not _reads_like_history(
            squashed(sampled.body), squashed(turn_last), squashed(turn_then)
        ):
            return "the last assistant turn is rendered differently once messages follow it"
        turns = sum(message.get("role") == "assistant" for message in then.before)
        part = dropped_part(then.turn, sampled.body, history[len(prompt) :])
        if part is not None:
            return f"the template does not show the {part} of turn {turns}"
        if sampled.stop and not history.endswith(sampled.stop):
            return f"the template does not close turn {turns} with {sampled.stop!r} in history"
        return None


def _probe_arguments(turn: Message, *, text: bool) -> Message:
    calls = [dict(call) for call in turn["tool_calls"]]
    function = dict(calls[-1]["function"])
    arguments = function["arguments"]  # in the template's form, because the turn is prepared
    if text:
        function["arguments"] = arguments + SENTINEL
    else:
        function["arguments"] = {**arguments, _LAST_ARGUMENT: SENTINEL}
    calls[-1]["function"] = function
    return {**turn, "tool_calls": calls}


def _resume_after_cut(tail: _Tail, whole: str, prompt: str, sampled: str, turn: Message) -> int:
    """Return where the text to append starts in `tail.after`, for a turn without a stop token.

    Such a turn was truncated by its length, a stop string or an abort. The text to append includes
    the turn close, except the part that the model already sampled.

    The result is negative if the turn was truncated before the position of the sentinel. This
    happens inside reasoning, because the template closes the reasoning before the content.
    """
    if whole.startswith(prompt + sampled):
        remaining = len(whole) - len(prompt) - len(sampled)
        # In a turn with calls, the text before the sentinel belongs to a call. A truncated call is
        # never completed with text that the model did not sample.
        if len(tail.with_new) - tail.close_at <= remaining and (
            remaining <= len(tail.with_new) or not turn.get("tool_calls")
        ):
            return len(tail.with_new) - remaining
    # Cohere closes the text with its own marker, before the marker that closes the turn
    calls, end = turn.get("tool_calls"), len(whole) - len(tail.with_new)
    for n in range(tail.close_at, 0, -1):
        # A quote at the end of a truncated call need not be the quote that ends its arguments.
        if sampled.endswith(tail.with_new[:n]) and (
            not calls or squashed(whole[len(prompt) : end + n]) == squashed(sampled)
        ):
            return n
    return tail.close_at if calls else 0


def _shown_again(turn: Message, following: str) -> bool:
    """Return True if `following`, which follows a turn with calls, repeats the turn's text."""
    content = str(turn.get("content") or "").strip()
    return bool(content and turn.get("tool_calls") and content in following)


def _reads_like_history(text: str, last: str, then: str) -> bool:
    """Return True if the sampled `text` agrees with the turn as it is rendered in history.

    `last` is the turn as rendered at the end of a conversation. `then` is the turn as rendered with
    messages after it. `text` must start like `then`, up to the last position where `last` and
    `then` differ.

    So an empty `<think>` that the template adds only to `last` does no harm: it was not sampled.
    After the last difference, `text` is not compared, because a malformed call may render
    differently from how it was sampled.
    """
    begin = common_prefix(last, then)
    same_end = common_prefix(last[begin:][::-1], then[begin:][::-1])
    # if `then` only omits something, the next character of `then` must agree
    differs = max(len(then) - same_end, begin + 1)
    return text.startswith(then[:differs])
