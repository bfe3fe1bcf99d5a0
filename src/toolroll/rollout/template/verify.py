"""`Verifier`: checks a finished sequence with `transformers` and the tokenizer alone.

This module shares no code with the code that made the sequence. `tokenizer.apply_chat_template`
renders the conversation, and the tokenizer itself encodes the render. A delta is the tokens between
two sampled turns. Four things are checked:

1. Each turn is exactly one of the engine's answers to the tokens before it (`AnswerRecord`).
2. The tokens of the first prompt are the tokens of its render.
3. The text of each delta follows its sampled turn in the render of the whole conversation.
4. The tokens of each delta are the tokens of its text.

One render of the whole conversation is enough if the template renders a turn as it was sampled. It
is also enough if only the text between the turn's control tokens differs, as with JSON spacing. All
other turns need two more renders: the prompts before and after the turn. The delta's tokens are
then compared with the tokens that follow the turn in the later prompt.

If a message contains the text of a control token, the conversation is rendered again, with other
text of the same length in its place. The control tokens of the sequence must be those of this
second render. The tokens between two of them must agree too; if text was replaced there, only their
text is compared. In a prompt, control-token text of an earlier assistant message may be ordinary
text or the token itself: the message does not say which was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any
from unicodedata import normalize

import numpy as np

from toolroll.rollout.template.image_check import with_single_tokens
from toolroll.rollout.template.record import in_order
from toolroll.rollout.template.reference import RENDER_ERRORS, ReferenceRender, TemplateText
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.template.shown import (
    NeutralTextError,
    Shown,
    ShownConversation,
    blanked,
    spelling,
)

_PROMPTS = 128
"""The number of encoded first prompts to cache. All samples of a task share one first prompt."""


class Verifier:
    """Checks sequences that were served with one chat template. Thread-safe.

    `now` is the time that was used to render the template. `head_hook` rewrites the head of each
    prompt: the leading system messages and the tools. `keep_scaffold`: a later render may lack the
    text that the generation prompt wrote before sampled turns (history="scaffold"). `images` has
    the `processor` of images and their `placeholder`. `options`: all arguments but the tokenizer
    and `images`.

    Example::

        verifier = Verifier(tokenizer, chat_template=None, kwargs={}, now=datetime.now())
        turn = TurnSpan(len(prompt_ids), len(prompt_ids) + len(output_ids), 1, True)
        sequence = ServedSequence(ids, (turn,), [question, answer], tools=[])
        verifier.check(sequence)  # None, or for example "prompt: tokens"
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: TemplateText,
        kwargs: Mapping[str, Any],
        now: datetime,
        head_hook: Callable[[str], str] | None = None,
        keep_scaffold: bool = False,
        images: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._images = images
        self.head_hook = head_hook
        self.options = {
            "chat_template": chat_template,
            "kwargs": kwargs,
            "now": now,
            "head_hook": head_hook,
            "keep_scaffold": keep_scaffold,
        }
        self._keep_scaffold = keep_scaffold
        self._reference = ReferenceRender(tokenizer, chat_template, kwargs)
        self._now = now
        self._prompt_ids = lru_cache(_PROMPTS)(lambda text: np.array(self._encode(text), np.int32))
        added = tokenizer.added_tokens_decoder
        self._eats_space = {i for i, token in added.items() if token.lstrip or token.rstrip}
        # An added token that the template does not know is a word, like those of the vocabulary.
        texts = {
            index: token.content
            for index, token in added.items()
            if token.content.strip() and (token.special or self._reference.names(token.content))
        }
        # In some vocabularies, unknown characters and single bytes have the ids of special tokens.
        text_too = {
            *self._encode("\U0010fffd"),
            *(index for index in texts if re.fullmatch("<0x..>", texts[index])),
        }
        self._control = {index: text for index, text in texts.items() if index not in text_too}
        ordered = sorted(self._control.values(), key=len, reverse=True)
        pattern = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._exact = re.compile(pattern)
        # a template may change a text's case
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def check(self, sequence: ServedSequence) -> str | None:
        """Return None if the sequence is correct. Otherwise return the kind of the first
        difference. The kinds are listed in docs/tokens.md, "Checking it".
        """
        if not sequence.turns:
            return None
        try:
            self._check_turns(sequence)
            messages = sequence.messages[: sequence.turns[-1].message]
            talk = ShownConversation(self._reference, self._pattern, messages, sequence.tools)
            if sequence.images:
                processor, placeholder = self._images.processor, self._images.placeholder
                single = with_single_tokens(sequence, processor, placeholder)
                if single is None:
                    raise _Mismatch("images")
                sequence = single
            for turn in sequence.turns:
                self._check_prefill(sequence, turn)
            if sequence.preserved:
                self._check_preserved(sequence, talk)
            elif self._keep_scaffold and self._reference.scaffold:
                self._check_scaffolds(sequence, talk)
            else:
                self._check_all(sequence, talk)
        except (_Mismatch, NeutralTextError) as mismatch:
            return str(mismatch)
        except RENDER_ERRORS as error:
            return f"render: {error}"
        return None

    # --- the turns --------------------------------------------------------------------------------

    def _check_turns(self, sequence: ServedSequence) -> None:
        """Check that each turn is one answer of the engine, and ended as the engine says."""
        cut, ids = sequence.dropped, sequence.input_ids
        spans = sequence.sampled_spans()
        messages = [turn.message for turn in sequence.turns]
        if not in_order(spans, len(ids) - cut) or messages != sorted(set(messages)):
            raise _Mismatch("turns: order")
        if any(sequence.messages[index]["role"] != "assistant" for index in messages):
            raise _Mismatch("turns: message")
        if sequence.record is not None:
            stopped = [turn.stopped for turn in sequence.turns]
            kind = sequence.record.check_turns(ids[cut:], spans, stopped, self._control)
            if kind is not None:
                raise _Mismatch(kind)

    # --- a sequence that the template only appends to ---------------------------------------------

    def _check_all(self, sequence: ServedSequence, talk: ShownConversation) -> None:
        first, last = sequence.turns[0].message, sequence.turns[-1].message
        begin = talk.prompt(first)
        self._check_prompt(sequence, talk)
        if first == last:
            return
        whole = talk.prompt(last)
        if not whole.text.startswith(begin.text):
            raise _Mismatch("rewritten")
        pos = len(begin.text)
        walk = _Walk(sequence, talk, whole)
        for turn, following in zip(sequence.turns, sequence.turns[1:], strict=False):
            pos = self._check_delta(walk, turn, following, pos)
        if pos != len(whole.text):
            raise _Mismatch("delta: text is missing")

    def _check_prompt(self, sequence: ServedSequence, talk: ShownConversation) -> None:
        if self._reference.uses_clock and self._now.date() != datetime.now().date():
            return
        first = sequence.turns[0].message
        render = self._hooked(talk.prompt(first), talk)
        prompt = sequence.input_ids[: sequence.turns[0].start]
        expected = self._prompt_ids(render.text)
        if np.array_equal(prompt, expected) and render.neutral == render.text:
            return
        ids = prompt.tolist()
        if self._decode(ids) != self._decode(expected.tolist()):
            raise _Mismatch("prompt")
        as_text = self._as_text(ids, render)
        if as_text is None:
            raise _Mismatch("prompt: control tokens")
        spelled = [m.group() for m in as_text if render.neutral.startswith(*spelling(m))]
        if spelled:
            # This must be text of the assistant, not the template's own control token.
            replaced = self._hooked(talk.prompt(first, assistant=frozenset(spelled)), talk).neutral
            if any(replaced.startswith(*spelling(match)) for match in as_text):
                raise _Mismatch("prompt: control tokens")
        if not sequence.forked:
            neutral = blanked(render.text, as_text)
            if not self._same(ids, self._encode(neutral), Shown(render.text, neutral)):
                raise _Mismatch("prompt: tokens")

    def _as_text(self, ids: list[int], render: Shown) -> list[re.Match[str]] | None:
        """Return the matches of control tokens in `shown.text` that are ordinary text in `ids`.

        Return None if `ids` have another text, or if a control token is at the position of text
        that comes from a message or a tool.
        """
        spelled: list[tuple[str, bool]] = []
        for piece, control in zip(self._pieces(ids), [*self._controls(ids), None], strict=True):
            spelled += [(text, False) for text in self._exact.findall(self._decode(piece))]
            if control is not None:
                spelled.append((self._control[control], True))
        matches = list(self._exact.finditer(render.text))
        if [match.group() for match in matches] != [text for text, _ in spelled]:
            return None
        as_text = []
        for match, (_, is_control) in zip(matches, spelled, strict=True):
            if not is_control:
                as_text.append(match)
            elif not render.neutral.startswith(*spelling(match)):
                return None
        return as_text

    def _check_prefill(self, sequence: ServedSequence, turn: TurnSpan) -> None:
        """Check the tokens that the model continued. They must decode to `turn.prefill`, and have
        exactly the control tokens of this text.
        """
        if not turn.prefill:
            return
        before = sequence.input_ids[: turn.start].tolist()
        prefilled = sequence.input_ids[turn.start : turn.sampled_from].tolist()
        if self._continuation(before, prefilled) != turn.prefill:
            raise _Mismatch("prefill")
        if self._controls(prefilled) != self._controls(self._encode(turn.prefill)):
            raise _Mismatch("prefill: control tokens")

    def _check_delta(self, walk: _Walk, turn: TurnSpan, following: TurnSpan, pos: int) -> int:
        """Check the delta after the turn that starts at `pos` in the render. Return where the next
        turn starts.
        """
        sequence, talk, whole = walk.sequence, walk.talk, walk.whole
        sampled = sequence.input_ids[turn.start : turn.stop].tolist()
        delta = sequence.input_ids[turn.stop : following.start].tolist()
        turn_text, text = self._decode(sampled), self._continuation(sampled, delta)
        unchanged = turn_text and whole.text.startswith(turn_text, pos)
        start = pos + len(turn_text) if unchanged else self._closed_at(walk, turn, sampled, pos)
        if start is not None and whole.text.startswith(text, start):
            stop = start + len(text)
            render = Shown(whole.text[start:stop], whole.neutral[start:stop])
            if self._is_encoded(sampled, delta, render):
                return stop
        before, after = talk.prompt(turn.message), talk.prompt(following.message)
        same = walk.bare or before.text == whole.text[:pos]
        if not same or not whole.text.startswith(after.text):
            raise _Mismatch("delta")
        alone = talk.without_prompt(turn.message + 1)
        turn_ids = (
            self._encode(alone[len(before.text) :]) if alone.startswith(before.text) else sampled
        )
        render = Shown(after.text[pos:], after.neutral[pos:])
        if turn.stopped and sampled[-1:] and sampled[-1] in self._control:
            self._check_after_stop(sampled, delta, render, turn_ids)
        else:
            self._check_after_cut(delta, render, turn_ids)
        return len(after.text)

    def _closed_at(self, walk: _Walk, turn: TurnSpan, sampled: list[int], pos: int) -> int | None:
        """Return where the turn that starts at `pos` ends in the render. Return None if the end is
        uncertain.

        The end is certain if three conditions hold:

        - The generation prompt ends at `pos`.
        - In history, the template closes turns with the stop token that the model sampled.
        - From `pos` to the next such stop token, the render has exactly the turn's control tokens.

        The text up to that stop token is then the turn and nothing else, because every other
        message comes after it.
        """
        stop = sampled[-1] if sampled else -1
        if not turn.stopped or stop not in self._closes or sampled.count(stop) != 1:
            return None
        opening = walk.talk.generation_prompt(walk.sequence.turns[0].message)
        if not self._exact.search(opening) or not walk.whole.neutral.endswith(opening, 0, pos):
            return None
        controls = []
        for match in self._exact.finditer(walk.whole.neutral, pos):
            controls.append(match.group())
            if controls[-1] == self._control[stop]:
                expected = [self._control[index] for index in self._controls(sampled)]
                return match.end() if controls == expected else None
        return None

    def _is_encoded(self, sampled: list[int], delta: list[int], render: Shown) -> bool:
        """Return True if `delta` contains exactly the ids of `render`, the text after the turn."""
        last = sampled[-1] if sampled else -1
        if last not in self._control:  # text follows text: the tokenizer may merge them
            return self._same(delta, self._encode(render.neutral), render, text_first=True)
        expected = self._encode(self._control[last] + render.neutral)
        return expected[:1] == [last] and self._same(delta, expected[1:], render)

    def _check_after_stop(
        self, sampled: list[int], delta: list[int], render: Shown, turn: list[int]
    ) -> None:
        """Compare the tokens of the delta with the render after the token that closes the turn.

        `render`: the render from the start of the turn to the end of the next prompt. `turn`: the
        ids of the turn as the template renders it at the end of a conversation. They show which
        token in `render` closes the turn.
        """
        expected = self._encode(render.neutral)
        closing = [position for position, index in enumerate(expected) if index == sampled[-1]]
        count = turn.count(sampled[-1]) or sampled.count(sampled[-1])
        if len(closing) < count:  # history shows another token: gpt-oss, <|end|> for <|return|>
            raise _Mismatch("delta: the turn does not end there")
        if not self._same(delta, expected[closing[count - 1] + 1 :], render):
            raise _Mismatch("delta: tokens")

    def _check_after_cut(self, delta: list[int], render: Shown, turn: list[int]) -> None:
        """Compare the delta's tokens with the end of the render. The turn was truncated, so the
        delta must include the token that closes it.
        """
        expected = self._encode(render.neutral)
        controls, added = self._controls(expected), self._controls(delta)
        within = self._controls(turn)
        closing = [position for position, index in enumerate(controls) if index in self._closes]
        count = sum(index in self._closes for index in within)
        begin = closing[count - 1] if 0 < count <= len(closing) else len(within)
        least = len(controls) - begin
        if not added or len(added) < least or controls[-len(added) :] != added:
            raise _Mismatch("delta: control tokens")
        pieces = self._pieces(expected)[-len(added) :]
        texts = render.pieces(self._exact)[-len(added) :]
        if not all(map(self._alike, self._pieces(delta)[1:], pieces, texts)):
            raise _Mismatch("delta: tokens")

    # --- a sequence whose history was preserved, or has scaffolds ---------------------------------

    def _check_scaffolds(self, sequence: ServedSequence, talk: ShownConversation) -> None:
        """Check each delta in the prompt after it. This prompt may lack the scaffolds of the turns
        so far, and nothing else of the prompt before the turn.
        """
        self._check_prompt(sequence, talk)
        places = talk.turn_places([turn.message for turn in sequence.turns])
        for turn, following, place in zip(sequence.turns, sequence.turns[1:], places, strict=False):
            if place is None:
                raise _Mismatch("rewritten")
            pos, bare = place
            after = talk.prompt(following.message)
            walk = _Walk(sequence, talk, after, bare)
            if self._check_delta(walk, turn, following, pos) != len(after.text):
                raise _Mismatch("delta: text is missing")

    def _check_preserved(self, sequence: ServedSequence, talk: ShownConversation) -> None:
        """Check three deltas of a sequence whose template rewrites history: the first, one in the
        middle and the last, because each check costs one render. Each delta must be the end of the
        prompt that was rendered when the delta was appended.
        """
        self._check_prompt(sequence, talk)
        gaps = list(zip(sequence.turns, sequence.turns[1:], strict=False))
        middle = len(gaps) // 2
        for turn, following in [*gaps[:1], *gaps[middle : middle + 1], *gaps[-1:]]:
            sampled = sequence.input_ids[turn.start : turn.stop].tolist()
            delta = sequence.input_ids[turn.stop : following.start].tolist()
            ended = turn.stopped and sampled[-1] in self._control
            self._check_tail(sampled, delta, talk.prompt(following.message), ended=ended)

    def _check_tail(
        self, sampled: list[int], delta: list[int], render: Shown, *, ended: bool
    ) -> None:
        """Check that the render `render` ends with the delta. `ended`: the model sampled the token
        that closes the turn. In `render`, this token must come directly before the delta.
        """
        expected = self._encode(render.neutral)
        added, controls = self._controls(delta), self._controls(expected)
        count = len(added)
        if len(controls) < count + ended or (count and controls[-count:] != added):
            raise _Mismatch("delta: control tokens")
        if ended and controls[-count - 1] not in (sampled[-1], *self._closes):
            raise _Mismatch("delta: the turn does not end there")
        pairs = zip(
            self._pieces(delta),
            self._pieces(expected)[-count - 1 :],
            render.pieces(self._exact)[-count - 1 :],
            strict=True,
        )
        if not delta or not all(self._alike(*parts) for parts in list(pairs)[not ended :]):
            raise _Mismatch("delta")

    @cached_property
    def _closes(self) -> tuple[int, ...]:
        """The id of the token that closes a turn without calls in history, if there is one."""
        return tuple(self._controls(self._encode(self._reference.around_answer[1]))[:1])

    # --- tokens -----------------------------------------------------------------------------------

    def _same(
        self, ids: list[int], expected: list[int], render: Shown, *, text_first: bool = False
    ) -> bool:
        """Return True if `ids` are the ids at the end of the render `render`.

        `expected`: the ids at the end of the neutral form of `render`. `text_first`: the ids before
        the first control token continue ordinary text, so only their text is compared.
        """
        if ids == expected:
            return True
        if render.text == render.neutral and not text_first:
            return False
        if self._controls(ids) != self._controls(expected):
            return False
        pieces, expected_pieces = self._pieces(ids), self._pieces(expected)
        texts = render.pieces(self._exact)[-len(pieces) :]
        if text_first and self._decode(pieces[0]) == self._decode(expected_pieces[0]):
            pieces, expected_pieces, texts = pieces[1:], expected_pieces[1:], texts[1:]
        return all(map(self._alike, pieces, expected_pieces, texts))

    def _alike(self, ids: list[int], expected: list[int], render: Shown) -> bool:
        """Return True if the `ids` between two control tokens equal the `expected` ids. If
        `render`, the text there, contains control-token text, compare only the text.
        """
        if render.text == render.neutral:
            return ids == expected
        text, decoded = (normalize("NFC", value) for value in (render.text, self._decode(ids)))
        if not self._eats_space.isdisjoint(ids):  # a word strips the white space next to it
            return "".join(decoded.split()) == "".join(text.split())
        if self._eats_space:
            return decoded.strip() == text.strip()
        # some vocabularies omit a leading space
        return decoded == text or decoded == text.removeprefix(" ")

    def _pieces(self, ids: list[int]) -> list[list[int]]:
        """Return the ids between control tokens, as lists."""
        pieces: list[list[int]] = [[]]
        for index in ids:
            if index in self._control:
                pieces.append([])
            else:
                pieces[-1].append(index)
        return pieces

    # --- transformers and the tokenizer -----------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        fast = self.tokenizer.backend_tokenizer
        if fast.truncation is None and fast.padding is None:
            return list(fast.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        fast = self.tokenizer.backend_tokenizer
        return str(fast.decode(list(ids), skip_special_tokens=False))

    def _continuation(self, before: list[int], ids: list[int]) -> str:
        """Return the text of `ids` if they follow the ids `before`."""
        last_text = self._decode(before[-1:])
        text = self._decode([*before[-1:], *ids])
        return text[len(last_text) :] if text.startswith(last_text) else self._decode(ids)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [index for index in ids if index in self._control]

    def _hooked(self, render: Shown, talk: ShownConversation) -> Shown:
        """Return the rendered prompt `render`, with its head rewritten by `head_hook`."""
        if self.head_hook is None:
            return render
        try:
            head = talk.head()
        except RENDER_ERRORS:  # the template requires a user message
            head = Shown("", "")
        return Shown(
            *map(self._with_hooked_head, (render.text, render.neutral), (head.text, head.neutral))
        )

    def _with_hooked_head(self, text: str, head: str) -> str:
        assert self.head_hook is not None
        return self.head_hook(head) + text[len(head) :] if text.startswith(head) else text


@dataclass(frozen=True, slots=True)
class _Walk:
    """The data for the checks of the deltas. `whole` is the render of a later prompt, which has the
    text of the deltas. `bare`: it lacks scaffolds of the prompt before the turn.
    """

    sequence: ServedSequence
    talk: ShownConversation
    whole: Shown
    bare: bool = False


class _Mismatch(Exception):
    """The sequence is not correct. The message is the kind of the difference."""
