"""Find the parts of a render that spell a control token but are ordinary text, because they come
from a message or a tool (I6 in docs/guarantees.md).

The conversation is rendered twice: as it is, and with markers. A marker replaces each text that
comes from a message or a tool and spells a control token. Text that a marker replaced is ordinary
text. `TemplateError` is raised if the two renders differ in anything else, because the position of
the text is then unknown. It is also raised if the text of a message and the text next to it in the
render spell a control token together.
"""

from __future__ import annotations

import html
import marshal
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import orjson
from jinja2 import nodes

from toolroll.parsers.types import Span
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.snapshot import ATOMS, TYPE_EXACT, SharedTools, texts_of
from toolroll.rollout.types import Message

_LETTERS = "甲乙丙丁戊己庚辛壬癸"
"""Ten letters that represent the digits of a marker. They have no upper or lower case, and no
template changes, escapes or strips them.
"""


def _written(number: int) -> str:
    return "".join(_LETTERS[int(digit)] for digit in str(number))


def _opening(number: int) -> str:
    """Return the start of a marker. Its length is always the same: a template that counts
    characters must render every process's markers alike.
    """
    return "子" + _written(number).rjust(12, _LETTERS[0]) + "丑"


_OPEN, _CLOSE = _opening(secrets.randbelow(10**12)), "寅"
_MARKER = re.compile(f"{_OPEN}([{_LETTERS}]+){_CLOSE}")
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The tags that transformers adds to Jinja. They mark text and do not change it."""
_NEAR = 8
"""The number of characters next to a part of a control token that identify its position."""


class Spelled(NamedTuple):
    """Where a conversation spells control tokens.

    `tokens`: the control tokens that messages and tools contain, in upper or lower case.
    `messages`: the indexes of the messages that contain one, or a part of one at the start or the
    end of a text. `tools`: True if the tools do.
    """

    tokens: frozenset[str]
    messages: frozenset[int] = frozenset()
    tools: bool = False

    def union(self, other: Spelled) -> Spelled:
        """Return what `self` and `other`, parts of one conversation, spell together."""
        return Spelled(
            self.tokens | other.tokens, self.messages | other.messages, self.tools or other.tools
        )


class BodyMasker:
    """Replaces control-token text in messages and tools with markers, and finds this text in a
    render.

    In assistant messages, only the text of special tokens is replaced. A special token that the
    template itself searches for is kept, because the template may split reasoning from content
    there.
    """

    def __init__(self, encoder: Encoder, source: str) -> None:
        # A template may change the case of a text.
        self._pattern = re.compile(encoder.pattern.pattern, re.IGNORECASE)
        self._control = encoder.pattern
        # Escaped in the same way as messages, so that a token with a quote is found too.
        self._folded = {token: _folded(orjson.dumps(token)[1:-1]) for token in encoder.control}
        self._any_folded = re.compile("|".join(map(re.escape, self._folded.values())) or r"(?!)")
        self._parts = _parts(frozenset(encoder.control))
        looked_for = " ".join(_looked_for(source))
        maskable = sorted((text for text in encoder.special if text not in looked_for), key=len)
        self._own = re.compile(
            "|".join(map(re.escape, reversed(maskable))) or r"(?!)", re.IGNORECASE
        )

    def spelled(
        self, messages: Sequence[Message], tools: SharedTools | None = None, *, first: int = 0
    ) -> Spelled:
        """Return where `messages` from `Renderer.prepare` and `tools` spell control tokens. `first`
        is the index of the first message in its conversation.

        Raises `TemplateError` if the text parts of a content spell a control token only together.
        """
        for message in messages:
            self._refuse_split(message.get("content"), self._pattern)
        token_sets = [self._tokens_in(message) for message in messages]
        marked = (
            index
            for index, message in enumerate(messages)
            if token_sets[index] or self._has_part_at_edge(texts_of(message))
        )
        in_tools = frozenset() if tools is None else self._tokens_in(tools.tools)
        return Spelled(
            in_tools.union(*token_sets),
            frozenset(first + index for index in marked),
            bool(in_tools) or (tools is not None and self._has_part_at_edge(tools.strings)),
        )

    def _tokens_in(self, part: Any) -> frozenset[str]:
        try:
            marshal.dumps(part, TYPE_EXACT)  # a subclass may print as anything
            text = _folded(orjson.dumps(part, option=orjson.OPT_NON_STR_KEYS))
        except (TypeError, ValueError):  # not JSON, but a template may still render it
            return frozenset(self._folded)
        if self._any_folded.search(text) is None:
            return frozenset()
        return frozenset(token for token, folded in self._folded.items() if folded in text)

    def _has_part_at_edge(self, texts: Iterable[str]) -> bool:
        firsts, rests = self._parts
        for text in texts:
            stripped = text.strip()
            if stripped.endswith(firsts) or stripped.startswith(rests):
                return True
        return False

    def may_spell(self, text: str, spelled: Spelled, strings: Iterable[str]) -> bool:
        """Return True if the render `text` has a control token that is in `spelled`, or if one of
        `strings` may contain the beginning or the end of one of its control tokens.
        """
        if not (spelled.messages or spelled.tools):
            return False
        tokens = frozenset(self._control.findall(text))
        return not tokens.isdisjoint(spelled.tokens) or any(
            _parts_at_edges(string, tokens, text) for string in strings
        )

    def mask(
        self, messages: Sequence[Message], tools: SharedTools, spelled: Spelled, text: str
    ) -> tuple[list[Message], SharedTools, list[str]]:
        """Return `messages` and `tools` with markers in copies of those that are in `spelled`, and
        the texts that were replaced. `text` is the render without markers.
        """
        originals: list[str] = []
        tokens = frozenset(self._control.findall(text))
        maskable = frozenset(filter(self._own.fullmatch, tokens))

        def marker(match: re.Match[str]) -> str:
            originals.append(match.group())
            return f"{_OPEN}{_written(len(originals) - 1)}{_CLOSE}"

        def walk(item: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(item, str) and str(item) == item:
                parts = _parts_at_edges(item, maskable if pattern is self._own else tokens, text)
                if not parts:
                    return pattern.sub(marker, item)
                stripped = item.strip()
                before, _, after = item.partition(stripped)
                # Whole tokens come first in the pattern, so that a part of one never splits it.
                combined = "|".join([pattern.pattern, *parts])
                return before + re.sub(combined, marker, stripped, flags=re.IGNORECASE) + after
            if isinstance(item, Mapping):
                return {walk(name, pattern): walk(entry, pattern) for name, entry in item.items()}
            if isinstance(item, list):
                return [walk(entry, pattern) for entry in item]
            if isinstance(item, tuple):
                return tuple(walk(entry, pattern) for entry in item)
            if type(item) not in ATOMS and pattern.search(str(item)):
                raise TemplateError(
                    f"a {type(item).__name__} in a message or a tool prints the text of a control "
                    "token, which cannot be distinguished from a real one: pass it as a string"
                )
            return item

        masked = list(messages)
        for index in sorted(spelled.messages):
            message = messages[index]
            pattern = self._own if message.get("role") == "assistant" else self._pattern
            self._refuse_split(message.get("content"), pattern)
            parts = {name: entry for name, entry in message.items() if name != "role"}
            masked[index] = {**message, **walk(parts, pattern)}
        if spelled.tools:
            tools = SharedTools.of(walk(tools.tools, self._pattern))
        return masked, tools, originals

    def _refuse_split(self, content: Any, pattern: re.Pattern[str]) -> None:
        """Raise `TemplateError` if the parts of a content spell a control token only together."""
        if not isinstance(content, list):
            return
        texts = [str(part.get("text", "")) for part in content if isinstance(part, dict)]
        counts = {
            len(pattern.findall("".join(texts))),
            len(pattern.findall("".join(map(str.strip, texts)))),  # as Gemma's template joins them
            sum(len(pattern.findall(text)) for text in texts),
        }
        if len(counts) > 1:
            raise TemplateError(
                "the text parts of a message's content spell a control token when they are joined: "
                "pass the content as one string"
            )

    def locate(
        self, masked: str, originals: Sequence[str], text: str, *, start: int = 0
    ) -> tuple[Span, ...]:
        """Return the spans of the render `text` that the markers replace in the render `masked`.

        Raises `TemplateError` if the two renders differ in anything else, or if a control token
        from `start` on is only partly in a span.
        """
        spans: list[Span] = []
        fixed, places = _taken_apart(masked)
        pos = len(fixed[0]) if text.startswith(fixed[0]) else len(text) + 1
        for index, following in zip(places, fixed[1:], strict=True):
            # The fixed text after a marker must follow its body at once, so each step is certain
            # before the next one starts.
            end = self._end_of_form(originals[index], following, text, pos)
            if end is None:
                break
            spans.append((pos, end))
            pos = end + len(following)
        if len(spans) == len(places) and pos == len(text):
            self._refuse_joined(text, spans, start)
            return tuple(spans)
        raise TemplateError(
            "a message contains the text of a control token, and the chat template renders the "
            "message differently because of this text, so it cannot be encoded as ordinary text"
        )

    def _refuse_joined(self, text: str, spans: Sequence[Span], start: int) -> None:
        for match in self._control.finditer(text, start):
            for begin, end in spans:
                overlaps = begin < match.end() and match.start() < end
                if overlaps and not begin <= match.start() < match.end() <= end:
                    raise TemplateError(
                        f"a message contains a part of the control token {match.group()!r}, and "
                        "the text next to it in the render is the rest of the token, so the "
                        "message cannot be encoded as ordinary text"
                    )

    def _end_of_form(self, original: str, following: str, text: str, pos: int) -> int | None:
        """Return where the rendered form of `original` ends in the render `text`. This form starts
        at `pos`, and the text `following` comes after it. Return None if the end is unknown.

        The template may have changed the text's case or escaped HTML. If it changed the text in
        another way, the text is accepted only if the result contains no control token. In this case
        the exact span does not matter.
        """
        forms = (original, original.upper(), original.lower(), html.escape(original))
        for form in forms:
            if text.startswith(form + following, pos):
                return pos + len(form)
        end = text.find(following, pos) if following else -1
        return end if end > pos and self._pattern.search(text, pos, end) is None else None


def _folded(data: bytes) -> str:
    """Return text without regard to case. The upper case of the dotless i is the I of ASCII."""
    return data.decode().upper().casefold()


def _parts_at_edges(item: str, tokens: frozenset[str], text: str) -> list[str]:
    """Return patterns for the parts of `tokens` with which `item` starts or ends, if the rest of
    the token is next to that part in the render `text`. White space around `item` is ignored.
    """
    stripped = item.strip()
    firsts, rests = _parts(tokens)
    if not stripped.endswith(firsts) and not stripped.startswith(rests):
        return []
    patterns = []
    for token in tokens:
        for size in range(1, len(token)):
            first, rest = token[:size], token[size:]
            # A few characters beside the part show that this edge is meant, not another text.
            if stripped.endswith(first) and stripped[-size - _NEAR :] + rest in text:
                patterns.append(re.escape(first) + r"\Z")
            if stripped.startswith(rest) and first + stripped[: len(rest) + _NEAR] in text:
                patterns.append(r"\A" + re.escape(rest))
    return sorted(patterns, key=len, reverse=True)


@lru_cache(256)
def _parts(tokens: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the beginnings of all `tokens`, and the ends of all `tokens`."""
    cuts = [(token, size) for token in tokens for size in range(1, len(token))]
    return (
        tuple({token[:size] for token, size in cuts}),
        tuple({token[size:] for token, size in cuts}),
    )


def _taken_apart(masked: str) -> tuple[list[str], list[int]]:
    """Return the texts between the markers, and the numbers of the markers."""
    parts = _MARKER.split(masked)
    numbers = ["".join(str(_LETTERS.index(letter)) for letter in part) for part in parts[1::2]]
    return parts[::2], [int(number) for number in numbers]


def _looked_for(source: str) -> Iterator[str]:
    """Yield the string constants that a template compares with something, or passes to a call, a
    filter or a test.
    """
    try:
        plain = _GENERATION.sub("", source)
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError:  # the first render reports it
        return
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        parts = node.args if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) else [node]
        for part in parts:
            for constant in (part, *part.find_all(nodes.Const)):
                if isinstance(constant, nodes.Const) and isinstance(constant.value, str):
                    yield constant.value
