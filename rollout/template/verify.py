"""`Verifier`: checks a finished sequence with `transformers` and the tokenizer alone.

It shares no code with what made the sequence: the conversation is rendered by
`tokenizer.apply_chat_template`, and the text that follows a sampled turn is encoded by the tokenizer
itself, after the token that the turn ended with. It asks three questions:

1. Are the tokens of the first prompt those of its render?
2. Does the render continue with exactly the text of each delta, directly after the sampled turn?
3. Are the tokens of each delta those of that text? Where a message holds the text of a control token,
   whose tokens are meant to differ: is the text the same, and are the control tokens those of the same
   conversation with that text replaced by other text of the same length?

What it does not judge is how the template shows a sampled turn: its tokens are the engine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import numpy as np

from toolroll.rollout.types import IdArray, Message, Tool

_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What a template, or its sandbox, raises for messages that it refuses."""
_SAMPLE = 3
"""How many turns of a sequence are checked if the template rewrites its history (one render each)."""
_PROMPTS = 128
"""How many first prompts are kept encoded: each is that of every sample of its task."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Where a sampled turn is in the sequence ([start, stop) in tokens), and which message it became."""

    start: int
    stop: int
    message: int


@dataclass(frozen=True, slots=True)
class ServedSequence:
    """One sequence as it was served and sampled, up to its last sampled turn.

    `turns` are those sampled in it, oldest first; what precedes the first is its prompt. `messages` and
    `tools` are the conversation's. `forked`: the prompt holds tokens of earlier turns. `preserved`: the
    template would have rewritten some of it, and it was kept on request.
    """

    input_ids: IdArray
    turns: tuple[TurnSpan, ...]
    messages: Sequence[Message]
    tools: Sequence[Tool]
    forked: bool = False
    preserved: bool = False


class Verifier:
    """Checks sequences served under one chat template. Safe to use in threads.

    `head_changed`: a hook rewrites the head of each prompt, so first prompts are not compared.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None,
        kwargs: Mapping[str, Any],
        now: datetime,
        head_changed: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._kwargs = dict(kwargs)
        self._now = now
        self._head_changed = head_changed
        self._shows_parts: dict[str, bool] = {}
        self._prompt_ids = lru_cache(_PROMPTS)(lambda text: np.array(self._encode(text), np.int32))
        added = tokenizer.get_added_vocab()
        self._control = {index: text for text, index in added.items() if text.strip()}
        texts = sorted(self._control.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def check(self, served: ServedSequence) -> str | None:
        """Return None if the sequence is right, else what is wrong with it."""
        if not served.turns:
            return None
        try:
            if served.preserved:
                self._check_preserved(served)
            else:
                self._check_all(served)
        except _Mismatch as found:
            return found.kind
        except _RENDER_ERRORS as error:
            return f"render: {error}"
        return None

    # --- one render for the whole sequence ---------------------------------------------------------

    def _check_all(self, served: ServedSequence) -> None:
        first, last = served.turns[0].message, served.turns[-1].message
        begin = self._render(served.messages[:first], served.tools)
        self._check_prompt(served, begin)
        if first == last:
            return
        whole = self._render(served.messages[:last], served.tools)
        if not whole.startswith(begin):
            raise _Mismatch("rewritten")
        neutral = self._neutral(served, last, whole)
        shown = _Shown(whole, neutral, len(begin))
        try:
            self._check_deltas(served, shown)
        except _Mismatch:
            # A tokenizer that normalizes (NFC, white space beside a token) shows its own form of a text.
            forms = (self._decode(self._encode(text)) for text in (whole, neutral, begin))
            whole, neutral, begin = forms
            self._check_deltas(served, _Shown(whole, neutral, len(begin)))

    def _check_prompt(self, served: ServedSequence, text: str) -> None:
        if self._head_changed or self._is_of_another_day:
            return
        prompt, expected = served.input_ids[: served.turns[0].start], self._prompt_ids(text)
        if np.array_equal(prompt, expected):
            return
        ids = prompt.tolist()
        stop = served.turns[0].message
        neutral = self._neutral(served, stop, text)
        if not served.forked and neutral == text:
            raise _Mismatch("prompt")
        if self._decode(ids) != self._decode(expected.tolist()):
            raise _Mismatch("prompt")
        for shown in (neutral, self._neutral(served, stop, text, assistant=True)):
            if self._controls(ids) == self._controls(self._encode(shown)):
                return
        raise _Mismatch("prompt: control tokens")

    def _check_deltas(self, served: ServedSequence, shown: _Shown) -> None:
        at = shown.start
        for turn, following in zip(served.turns, served.turns[1:], strict=False):
            sampled = served.input_ids[turn.start : turn.stop].tolist()
            delta = served.input_ids[turn.stop : following.start].tolist()
            text = self._continuation(sampled, delta)
            start = self._end_of_turn(shown.text, at, sampled, text)
            at = start + len(text)
            self._check_ids(sampled, delta, text, shown.neutral[start:at])
        if at != len(shown.text):
            raise _Mismatch("delta: text is missing")

    def _end_of_turn(self, shown: str, at: int, sampled: list[int], text: str) -> int:
        """Return where the sampled turn that begins at `at` ends in the render, which `text` must follow."""
        said = self._decode(sampled)
        if shown.startswith(said + text, at):
            return at + len(said)
        # The template shows the turn in its own way (JSON spacing, another turn close).
        start = shown.find(text, at)
        if start < 0:
            raise _Mismatch("delta")
        closed = not sampled or sampled[-1] not in self._control
        turn = shown[at:start]
        if not closed and not any(turn.endswith(mark) for mark in self._control.values()):
            raise _Mismatch("delta: the turn does not end there")
        return start

    def _check_ids(self, sampled: list[int], delta: list[int], text: str, neutral: str) -> None:
        last = sampled[-1] if sampled else -1
        if last in self._control:
            anchored = self._encode(self._control[last] + text)
            if anchored == [last, *delta]:
                return
            expected = self._encode(self._control[last] + neutral)[1:]
        else:  # the turn was cut: text continues text, where a tokenizer may have merged
            expected = self._encode(neutral)
            if expected == delta:
                return
        cut = last not in self._control
        if not cut and neutral == text:
            raise _Mismatch("delta: tokens")
        if self._controls(expected) != self._controls(delta):
            raise _Mismatch("delta: control tokens")

    # --- one render for a turn ---------------------------------------------------------------------

    def _check_preserved(self, served: ServedSequence) -> None:
        """The template rewrites history: each delta must be the end of the render at its time."""
        self._check_prompt(served, self._render(served.messages[: served.turns[0].message], served.tools))
        gaps = list(zip(served.turns, served.turns[1:], strict=False))
        middle = len(gaps) // 2
        for turn, following in [*gaps[:1], *gaps[middle : middle + 1], *gaps[-1:]][:_SAMPLE]:
            sampled = served.input_ids[turn.start : turn.stop].tolist()
            delta = served.input_ids[turn.stop : following.start].tolist()
            text = self._continuation(sampled, delta)
            whole = self._render(served.messages[: following.message], served.tools)
            if not whole.endswith(text):
                whole = self._decode(self._encode(whole))
            if not whole.endswith(text):
                raise _Mismatch("delta")
            neutral = self._neutral(served, following.message, whole)
            self._check_ids(sampled, delta, text, neutral[len(neutral) - len(text) :])

    # --- transformers and the tokenizer ------------------------------------------------------------

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        shown = [self._prepared(message) for message in messages]
        return self._apply(shown, list(tools) or None)

    def _apply(self, messages: list[Message], tools: list[Tool] | None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **self._kwargs,
            )
        )

    def _prepared(self, message: Message) -> Message:
        """Return the message with its arguments and its content in the form that the template takes."""
        made = dict(message)
        if isinstance(made.get("content"), list):
            parts = [{**part, "type": "text"} for part in made["content"]]
            text = "".join(str(part["text"]) for part in parts)
            made["content"] = parts if self._takes_parts(str(made.get("role"))) else text
        if made.get("tool_calls"):
            made["tool_calls"] = [self._prepared_call(call) for call in made["tool_calls"]]
        return made

    def _prepared_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        given = function.get("arguments")
        if self._takes_objects and not isinstance(given, Mapping):
            function["arguments"] = _as_object(given)
        elif not self._takes_objects and not isinstance(given, str):
            function["arguments"] = json.dumps(given or {}, ensure_ascii=False, separators=(",", ":"))
        return {**call, "function": function}

    @cached_property
    def _takes_objects(self) -> bool:
        """True if the template takes tool arguments as objects (else as JSON text, as DeepSeek-V3's)."""
        try:
            return "qxa" in self._apply([_USER, _calling({"x": "qxa"}), _result("x")], None)
        except _RENDER_ERRORS:
            return False

    def _takes_parts(self, role: str) -> bool:
        """True if the template shows the texts of a content that is a list of parts."""
        if role not in self._shows_parts:
            parts = [{"type": "text", "text": "qxa"}, {"type": "text", "text": "qxb"}]
            message = {"role": role, "content": parts}
            call = _calling({"x": "x"} if self._takes_objects else '{"x":"x"}')
            talks = {"user": [message], "tool": [_USER, call, _result(parts)]}
            try:
                shown = self._apply(talks.get(role, [message, _USER]), None)
            except _RENDER_ERRORS:
                shown = ""
            found = "qxa" in shown and "qxb" in shown and repr(parts[0]) not in shown
            self._shows_parts[role] = found
        return self._shows_parts[role]

    @cached_property
    def _is_of_another_day(self) -> bool:
        """True if the template shows a date, and today's is not that of the prompts."""
        template = self._tokenizer.get_chat_template(self._chat_template, tools=[{}])
        return "strftime_now" in str(template) and self._now.date() != datetime.now().date()

    def _encode(self, text: str) -> list[int]:
        fast = self._tokenizer.backend_tokenizer
        if fast.truncation is None and fast.padding is None:
            return list(fast.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        fast = self._tokenizer.backend_tokenizer
        return str(fast.decode(list(ids), skip_special_tokens=False))

    def _continuation(self, before: list[int], ids: list[int]) -> str:
        """Return the text of `ids` as it continues that of `before`."""
        head = self._decode(before[-1:])
        text = self._decode([*before[-1:], *ids])
        return text[len(head) :] if text.startswith(head) else self._decode(ids)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [index for index in ids if index in self._control]

    def _neutral(
        self, served: ServedSequence, stop: int, text: str, *, assistant: bool = False
    ) -> str:
        """Return the render in which control-token text of messages is other text of the same length.

        `assistant`: also in messages of the assistant.
        """
        given = {"messages": list(served.messages[:stop]), "tools": list(served.tools)}
        changed = _neutral(given, self._pattern, assistant=assistant)
        if changed == given:
            return text
        shown = self._render(changed["messages"], changed["tools"])
        if len(shown) != len(text):
            raise _Mismatch("control-token text changes the render")
        return shown


@dataclass(frozen=True, slots=True)
class _Shown:
    """A render, the same with neutral bodies, and where the first prompt ends in both."""

    text: str
    neutral: str
    start: int


class _Mismatch(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def _neutral(value: Any, pattern: re.Pattern[str], *, assistant: bool) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: "\u3007" * len(match.group()), value)
    if isinstance(value, Mapping):
        if value.get("role") == "assistant" and not assistant:
            return value
        return {
            _neutral(name, pattern, assistant=assistant): _neutral(item, pattern, assistant=assistant)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_neutral(item, pattern, assistant=assistant) for item in value]
    return value


_USER: Message = {"role": "user", "content": "x"}


def _calling(arguments: Any) -> Message:
    function = {"name": "x", "arguments": arguments}
    call = {"id": "callid000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "callid000", "name": "x", "content": content}


def _as_object(given: Any) -> dict[str, Any]:
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return {}
    return dict(found) if isinstance(found, Mapping) else {}
