"""The correct result for one template, one assistant turn and the messages that follow it.

The judge uses only `tokenizer.apply_chat_template` and the tokenizer, and imports nothing of
toolroll. A truth is one of:

- `append`: the whole render starts with the prompt and the sampled text. The rest of it, encoded,
  is the only correct answer.
- `drift`: the same, except for text that was not sampled, or white space.
- `rewrite`: the served or sampled text is rendered differently now. A fork is correct.
- `raises`: the template refuses the conversation.
- `unclear`: the bodies contain control-token text, and the render depends on it.
"""

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from support.adversarial.dialogues import Message, Messages, Step, Tools
from support.adversarial.templates import Template
from support.adversarial.texts import (
    ControlTokens,
    Inapplicable,
    Piece,
    Refused,
    Render,
    Unclear,
    common,
    squash,
    unwritten,
)

Kind = Literal["append", "drift", "rewrite", "raises", "unclear"]


@dataclass(frozen=True)
class Said:
    """A sampled turn: its ids, its text, the stop token's text (empty: cut), the message for it."""

    ids: list[int]
    text: str
    stop: str
    turn: Message


@dataclass(frozen=True)
class Truth:
    """`input_ids`: what to append, or the only right tail if a rewritten stream is kept (None:
    there is none). `careless_ids`: what the same text gives if control-token text in bodies becomes
    control tokens."""

    kind: Kind
    input_ids: list[int] | None = None
    careless_ids: list[int] | None = None
    why: str = ""


class Judge(ControlTokens):
    """Judges one template with one tokenizer, which has the template's control tokens."""

    def __init__(self, tokenizer: Any, template: Template) -> None:
        super().__init__(tokenizer, template.source)
        self.template = template
        self._renders: dict[str, Render] = {}

    def render(self, messages: Messages, tools: Tools, *, generate: bool) -> Render:
        """The text with the places of its own control tokens. Raises `Refused`, `Unclear`."""
        shown = repr((messages, tools, generate))
        if shown not in self._renders:
            if len(self._renders) > 8:
                self._renders.clear()
            self._renders[shown] = self.marked(messages, tools, generate=generate)
        return self._renders[shown]

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        return self.ids(self.render(messages, tools, generate=True).pieces())

    # --- what the model says ---------------------------------------------------------------------

    def say(self, before: Messages, step: Step, tools: Tools, rng: random.Random) -> Said:
        """What the model samples for the turn of `step`. Raises `Inapplicable`."""
        try:
            served = self.render(before, tools, generate=True)
            pieces = self._region(before, step, tools, served)
        except (Refused, Unclear) as error:
            raise Inapplicable(f"the turn cannot be rendered: {error}") from error
        turn = step.turn
        if step.sampling == "cut":
            text = "".join(text for text, _ in pieces[:-1])
            if any(is_control for _, is_control in pieces[:-1]) or len(text.strip()) < 2:
                raise Inapplicable("no plain text to cut")
            text = text[: rng.randint(max(1, len(text) // 2), len(text))]
            return Said(self.plain(text), text, "", {**turn, "content": text})
        if step.sampling == "spaced":
            pieces = [*pieces[:-1], ("\n", False), pieces[-1]]
        if step.sampling == "compact":
            pieces = [(t if c else t.replace('": ', '":'), c) for t, c in pieces]
        ids = self._split(pieces, rng) if step.sampling == "split" else self.ids(pieces)
        return Said(ids, "".join(text for text, _ in pieces), pieces[-1][0], turn)

    def _region(self, before: Messages, step: Step, tools: Tools, served: Render) -> list[Piece]:
        """The pieces of the turn behind the generation prompt. The last one is its stop token."""
        renders = [self.render([*before, step.turn], tools, generate=False)]
        if len(self._ends(renders[0], len(served.text))) > 1:
            raise Inapplicable("the template writes this turn as several")
        with suppress(Refused, Unclear):
            renders.append(self.render([*before, step.turn, *step.new], tools, generate=True))
        if step.sampling == "history":
            renders.reverse()
        for render in renders:
            ends = self._ends(render, len(served.text))
            if render.text.startswith(served.text) and ends:
                return self._between(render, len(served.text), ends[0][1])
        start = self._start_in(renders[0], served)
        ends = self._ends(renders[0], start)
        if not ends:
            raise Inapplicable("the template does not render this turn behind its prompt")
        pieces = self._between(renders[0], start, ends[0][1])
        opened = served.text.rstrip().endswith("<think>") and "</think>" in self.control
        if opened and not any(text == "</think>" for text, _ in pieces):
            pieces = [("Hm.\n", False), ("</think>", True), ("\n\n", False), *pieces]
        return pieces

    def _start_in(self, alone: Render, served: Render) -> int:
        """Where the turn begins in a render that does not begin with the prompt that was served:
        where it leaves the prompt (which opens a thought that history drops), or behind its own
        header."""
        start = common(served.text, alone.text)
        if len(served.text) - start <= 60:
            return start
        header = served.text[served.marks[-1][0] if served.marks else 0 :]
        if header not in alone.text:
            raise Inapplicable("the template does not render this turn behind its prompt")
        return alone.text.rindex(header) + len(header)

    def _ends(
        self, render: Render, start: int = 0, *, closes: bool = False
    ) -> list[tuple[int, int]]:
        """The places of the stop tokens from `start` on. `closes`: of what stands for them too."""
        ends = self.template.stops + self.template.closes * closes
        return [at for at in render.marks if at[0] >= start and render.text[slice(*at)] in ends]

    def _between(self, render: Render, start: int, end: int) -> list[Piece]:
        marks = tuple(at for at in render.marks if at[1] <= end)
        return Render(render.text[:end], marks).pieces(start)

    def _split(self, pieces: Sequence[Piece], rng: random.Random) -> list[int]:
        """Ids of the same text in token splits that the tokenizer would not choose."""
        found: list[int] = []
        for text, is_control in pieces:
            if is_control:
                found.append(self.control[text])
                continue
            at = 0
            while at < len(text):
                size = rng.randint(1, 5)
                found += self.plain(text[at : at + size])
                at += size
        return found

    # --- the truth -------------------------------------------------------------------------------

    def truth(self, before: Messages, said: Said, new: Messages, tools: Tools) -> Truth:
        """What is right after `said` for `new`."""
        messages = [*before, said.turn]
        try:
            served = self.text(before, tools, generate=True)
            full = self.render([*messages, *new], tools, generate=True)
        except Refused as error:
            return Truth("raises", why=str(error))
        except Unclear as error:
            return Truth("unclear", why=str(error))
        if full.text.startswith(served + said.text):
            return self._tail(full, "append", len(served) + len(said.text))
        if not full.text.startswith(served):
            return self._rewritten(messages, said, tools, full, "the prompt reads otherwise")
        alone = self._alone(messages, tools)
        end = self._end_in_history(full, self._in_history(messages, new, tools, full), len(served))
        if end is None:
            return Truth("rewrite", why="the turn has no end in history")
        then = full.text[len(served) : end[0]]
        at = end[1] if said.stop else end[0] - unwritten(said.text, then)
        content = str(said.turn.get("content") or "").strip()
        said_anew = any(content in str(message.get("content")) for message in new)
        if content and content not in then and content in full.text[at:] and not said_anew:
            return Truth("rewrite", why="the text of the turn is moved behind it")
        if said.stop and full.text[slice(*end)] != said.stop:
            return replace(self._tail(full, "rewrite", at), why="another token ends the turn")
        if self._reads_the_same(alone, served, said, then):
            return self._tail(full, "drift", at)
        return replace(self._tail(full, "rewrite", at), why="the turn reads otherwise")

    def _alone(self, messages: Messages, tools: Tools) -> Render | None:
        try:
            return self.render(messages, tools, generate=False)
        except (Refused, Unclear):
            return None

    def _in_history(
        self, messages: Messages, new: Messages, tools: Tools, full: Render
    ) -> Render | None:
        """The render of the turn alone, without its reasoning if `full` does not show that."""
        turn = {key: item for key, item in messages[-1].items() if key != "reasoning_content"}
        without = [*messages[:-1], turn]
        with suppress(Refused, Unclear):
            if self.render([*without, *new], tools, generate=True).text == full.text:
                return self._alone(without, tools)
        return self._alone(messages, tools)

    def _end_in_history(
        self, full: Render, alone: Render | None, start: int
    ) -> tuple[int, int] | None:
        """The place of the token that ends the turn once messages follow: as many tokens of its
        kind stand before it as when the turn stands alone."""
        found = self._ends(full, start, closes=True)
        behind = len(self._ends(alone, start, closes=True)) if alone is not None else 1
        return found[max(behind, 1) - 1] if len(found) >= max(behind, 1) else None

    def _tail(self, full: Render, kind: Kind, at: int) -> Truth:
        return Truth(kind, self.ids(full.pieces(at)), self.careless(full.text[at:]))

    def _rewritten(
        self, messages: Messages, said: Said, tools: Tools, full: Render, why: str
    ) -> Truth:
        """The tail if the stream is kept all the same: what follows the turn where the whole
        render goes on from the render of the turn alone; else it is not defined."""
        alone = self._alone(messages, tools)
        if alone is None:
            return Truth("rewrite", why=why)
        ends = self._ends(alone)
        if not ends or not full.text.startswith(alone.text[: ends[-1][1]]):
            return Truth("rewrite", why=why)
        # A turn that was cut is closed first.
        at = ends[-1][1] if said.stop else ends[-1][0]
        return replace(self._tail(full, "rewrite", at), why=why)

    def _reads_the_same(self, alone: Render | None, served: str, said: Said, then: str) -> bool:
        """Whether history shows the turn as it was sampled (in other white space), or as the
        template shows it at the end of a conversation (what was sampled never rendered so), or
        whether the two differ only in what was not sampled."""
        body = squash(said.text.removesuffix(said.stop))
        if body == squash(then):
            return True
        if alone is None or not alone.text.startswith(served):
            return False
        ends = self._ends(alone, len(served), closes=True)
        rest = alone.text[len(served) : ends[-1][0]] if ends else alone.text[len(served) :]
        last, shown = squash(rest), squash(then)
        if last == shown:
            return True
        begin = common(last, shown)
        differs = max(len(shown) - common(last[begin:][::-1], shown[begin:][::-1]), begin + 1)
        return body.startswith(shown[:differs])

    # --- forks -----------------------------------------------------------------------------------

    def fork_is_right(
        self, ids: Sequence[int], stream: Sequence[int], messages: Messages, tools: Tools
    ) -> bool | None:
        """Whether `ids` are the whole conversation, kept from `stream` up to some control token and
        encoded anew from there. Control-token text of an assistant message may be text or a token,
        unless `stream` has the message's content in the tokenizer's own tokens, and its calls spell
        none: the messages do not say which of the two was sampled. None: it is unclear which
        control tokens are the template's."""
        ids, stream = list(ids), list(stream)
        either = [
            message
            for message in messages
            if message["role"] == "assistant"
            and (
                self.pattern.search(json.dumps(message.get("tool_calls"), ensure_ascii=False))
                or not _holds(stream, self.plain(str(message.get("content") or "")))
            )
        ]
        try:
            render = self.marked(messages, tools, generate=True, as_they_are=either)
            required = self.marked(messages, tools, generate=True).marks
        except Unclear:
            return None
        text, allowed = render.text, set(render.marks)

        def fresh(rest: list[int], start: int) -> bool:
            marks = self._claimed(rest, text, start)
            needed = {at for at in required if at[0] >= start}
            return marks is not None and needed <= marks <= allowed

        if fresh(ids, 0):
            return True
        marks = set(self.control.values())
        for at in range(common(ids, stream) - 1, -1, -1):
            if ids[at] in marks:
                begin = self.decode(ids[: at + 1])
                if text.startswith(begin) and fresh(ids[at + 1 :], len(begin)):
                    return True
        return False

    def _claimed(self, ids: Sequence[int], text: str, start: int) -> set[tuple[int, int]] | None:
        """The places of the control tokens of `ids`, canonical ids of `text` from `start` on."""
        texts: dict[int | None, str] = {index: name for name, index in self.control.items()}
        marks, piece = set[tuple[int, int]](), list[int]()
        for index in [*ids, None]:
            if index is not None and index not in texts:
                piece.append(index)
                continue
            shown, mark = self.decode(piece), texts.get(index, "")
            if not text.startswith(shown + mark, start) or self.plain(shown) != piece:
                return None
            start += len(shown) + len(mark)
            marks |= {(start - len(mark), start)} if mark else set()
            piece = []
        return marks if start == len(text) else None


def _holds(stream: list[int], part: list[int]) -> bool:
    """Whether `part` is somewhere in `stream`; nothing is not."""
    starts = range(len(stream) - len(part) + 1)
    return bool(part) and any(stream[at : at + len(part)] == part for at in starts)
