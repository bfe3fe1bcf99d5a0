"""Find the tokens that end an assistant turn: those named by the generation config and the
tokenizer, and those that close a turn in the template. Find the added tokens that are only words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import orjson

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.delta import SENTINEL
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import TOOL, USER, Renderer, call_turn, tool_result
from toolroll.rollout.types import Message, Tool

_BASE: list[Message] = [USER, {"role": "assistant", "content": SENTINEL}]
_FOLLOW: list[Message] = [USER, {"role": "tool", "content": "x", "name": "x"}]
_LIKE_CONTROL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?(?:start|begin|end|eo)[a-z_]*>|\[/?[A-Z_]{3,}\]"
)
"""The usual forms of control tokens."""


def find_stops(tokenizer: Any, renderer: Renderer, encoder: Encoder) -> set[int]:
    """Return the ids of all tokens that end a turn."""
    stops = _configured(tokenizer)
    # a tokenizer may have a separate template for conversations with tools
    for tools in (None, [TOOL]):
        texts = _Closing(renderer, encoder, tools).texts()
        stops |= {encoder.control[text] for text in texts}
    return stops


def missing_tokens(renderer: Renderer, encoder: Encoder) -> tuple[str, ...]:
    """Return the texts of control tokens that the template writes but the tokenizer does not have,
    if one of them ends an assistant turn. Otherwise return nothing: some templates write such texts
    as ordinary text, and end the turn with a token.
    """
    closing = _Closing(renderer, encoder, None)
    after = closing.after_sentinel([*_BASE, _FOLLOW[0]]) or ""
    close = _LIKE_CONTROL.search(after)
    token = encoder.pattern.search(after)
    if close is None or (token is not None and token.start() <= close.start()):
        return ()
    texts = dict.fromkeys(_LIKE_CONTROL.findall("\n".join(_written(renderer))))
    return tuple(text for text in texts if text not in encoder.control)


def find_words(tokenizer: Any, renderer: Renderer) -> frozenset[str]:
    """Return the added tokens that are only words: not special, not configured as a stop token, and
    either of letters, digits and `_`, or neither written nor searched for by the template. Return
    none if code renders, because it may use any token.
    """
    if renderer.function is not None:
        return frozenset()
    template = tokenizer.chat_template
    sources = [renderer.source, *(template.values() if isinstance(template, dict) else ())]
    template_text = "\n".join([*sources, *_written(renderer)]).casefold()
    starts, ends = _edges([literal for source in sources for literal in _literals(source)])
    stops = _configured(tokenizer)
    texts = (
        token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if not token.special and index not in stops
    )
    return frozenset(
        text
        for text in texts
        if re.fullmatch(r"\w+", text)
        or not (text.casefold() in template_text or _may_be_joined(text, starts, ends))
    )


_LONGEST = 64


def _literals(source: str) -> Iterator[str]:
    """Yield the texts of a Jinja template: outside its tags, and in quotes."""
    with suppress(jinja2.TemplateSyntaxError):  # a render says what is wrong
        for _, kind, value in jinja2.Environment().lex(source):
            if kind in ("data", "string"):
                yield value[1:-1] if kind == "string" else value


def _edges(literals: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the texts with which `literals` start, and those with which they end. A token is not
    longer than `_LONGEST`.
    """
    sizes = range(1, _LONGEST)
    starts = {literal[:size] for literal in literals for size in sizes}
    return starts, {literal[-size:] for literal in literals for size in sizes}


def _may_be_joined(token: str, starts: set[str], ends: set[str]) -> bool:
    """Return True if a template may write `token`, which has punctuation at both ends, as a literal
    that ends with its start, a value, and a literal that starts with its end.
    """
    if re.search(r"[\w\s]", token[0] + token[-1]):
        return False
    cuts = range(1, len(token))
    return any(token[:cut] in ends for cut in cuts) and any(token[cut:] in starts for cut in cuts)


def _written(renderer: Renderer) -> list[str]:
    """Return renders of small conversations. Those that the template refuses are left out."""
    user, call = _calling(1)
    turns = call, {**call, "reasoning_content": "x"}
    talks = [[user, turn, tool_result()] for turn in turns]
    talks += [[*_BASE, user], [{"role": "system", "content": "x"}, user]]
    prepared = map(renderer.prepare, talks)
    renders = (renderer.shows(talk, tools) for talk in prepared for tools in (None, [TOOL]))
    return [text for text in renders if text is not None]


def _configured(tokenizer: Any) -> set[int]:
    eos = tokenizer.eos_token_id
    stops = set() if eos is None else {int(eos)}
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    if path.is_file():
        listed = orjson.loads(path.read_bytes()).get("eos_token_id")
        stops |= (
            set(listed)
            if isinstance(listed, list)
            else ({int(listed)} if isinstance(listed, int) else set())
        )
    return stops


class _Closing:
    """Finds the tokens that close a turn in conversations with `tools`."""

    def __init__(self, renderer: Renderer, encoder: Encoder, tools: list[Tool] | None) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._tools = tools

    def texts(self) -> set[str]:
        """Return the control tokens that close a turn.

        A turn without calls is closed by the last control token after its text. A turn with calls
        may be closed by a different token (Gemma 4, gpt-oss). If no control token closes the text,
        return the first control token of the user message or tool result after the turn. (In GLM's
        template, the next role's marker is the stop token.)
        """
        alone = self.after_sentinel(_BASE)
        if alone is None:
            return set()
        closing = self._encoder.pattern.findall(alone)
        if closing:
            return {closing[-1], *self._closing_calls()}
        after = [self.after_sentinel([*_BASE, message]) for message in _FOLLOW]
        markers = {
            match.group()
            for text in after
            if text is not None and (match := self._encoder.pattern.search(text))
        }
        return markers | self._marker_after_call()

    def _closing_calls(self) -> set[str]:
        """Return the last control token after a turn with one call, if a turn with two calls also
        has it exactly once. (It is then not part of a call.)
        """
        single, two = self.after_sentinel(_calling(1)), self.after_sentinel(_calling(2), first=True)
        closing = self._encoder.pattern.findall(single or "")
        return (
            {closing[-1]} if closing and two is not None and two.count(closing[-1]) == 1 else set()
        )

    def _marker_after_call(self) -> set[str]:
        """Return the role marker that starts a tool result if it also ends the turn before."""
        alone, then = (
            self.after_sentinel(_calling(1)),
            self.after_sentinel([*_calling(1), tool_result()]),
        )
        if alone is None or then is None or not then.startswith(alone.rstrip("\n")):
            return set()
        match = self._encoder.pattern.match(then, len(alone.rstrip("\n")))
        return {match.group()} if match else set()

    def after_sentinel(self, messages: list[Message], *, first: bool = False) -> str | None:
        """Return the text after the last sentinel, or after the first one if `first` is True.
        Return None if the template refuses the messages or omits the sentinel.
        """
        try:
            text = self._renderer.render(messages, self._tools, generate=False)
        except TemplateError:
            return None
        pos = text.find(SENTINEL) if first else text.rfind(SENTINEL)
        return text[pos + len(SENTINEL) :] if pos >= 0 else None


def _calling(count: int) -> list[Message]:
    turn = call_turn({"x": SENTINEL})
    [call] = turn["tool_calls"]
    return [USER, {**turn, "tool_calls": [{**call, "id": f"callid{n:03d}"} for n in range(count)]}]
