"""What a chat template can see of a message: the features on which its branches may depend.

A template is a loop over messages; the text it appends depends on history only through tests on message features, neighbours and
flags. Two conversations with equal `History.key` therefore drive the loop into the same state, which is what lets a learned frame
stand in for a render. The strings that a template tests bodies against (`'</think>' in content`, `content.startswith(...)`) are
read off its syntax tree; a body that holds one of them gets a kind of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes

from toolroll.rollout.template.locality import is_local
from toolroll.rollout.types import Message

Kind = tuple[Any, ...]

_SEEN_TWICE = 2  # a flag that the second exchange of a kind sets is seen (DeepSeek-V3 does that); no template counts further

_SEEN_THRICE = 3  # whether a message is the first, or the first behind the system's


def syntax_tree(source: str) -> nodes.Template | None:
    """The syntax tree of the template `source`; None where it cannot be read: then there is nothing to go by but renders."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        return environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return None


def tested_strings(tree: nodes.Template) -> tuple[str, ...]:
    """The strings that a template searches for in message texts, without those of white space only."""
    found: set[str] = set()
    for compare in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            found |= _constants([compare.expr])
        elif any(_is_of_text(side) for side in (compare.expr, *(operand.expr for operand in compare.ops))):
            found |= _constants([compare.expr, *(operand.expr for operand in compare.ops)])
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            found |= _constants(call.args)
    for item in tree.find_all(nodes.Filter):
        if item.name in ("replace", "split", "trim"):
            found |= _constants(item.args)
    return tuple(sorted(text for text in found if text.strip()))


def _measures_texts(tree: nodes.Template) -> bool:
    """Whether the template looks at how long a message's text is, or at a slice of it: no kind of a text says that."""
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice) and _is_of_text(item.node):
            return True
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        counted = any(isinstance(side, nodes.Filter) and side.name in ("length", "count") and _is_of_text(side) for side in sides)
        if counted and not all(side.value == 0 for side in sides if isinstance(side, nodes.Const)):
            return True
    return False


def _is_of_text(node: nodes.Node | None) -> bool:
    """Whether the expression is a message's text, or one made of it: `message.content`, `content`, `message['content'] | trim`."""
    if isinstance(node, nodes.Filter):
        return _is_of_text(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and "content" in node.name


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` blocks, which `transformers` adds to Jinja, as plain blocks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _constants(expressions: Iterable[nodes.Node]) -> set[str]:
    return {node.value for node in expressions if isinstance(node, nodes.Const) and isinstance(node.value, str)}


class Features:
    """The features of messages, for one template."""

    def __init__(self, source: str) -> None:
        tree = syntax_tree(source)
        self.readable = tree is not None and not _measures_texts(tree)
        """Whether the template's tests are known; where they are not, kinds do not tell everything."""
        self.tested = tested_strings(tree) if tree is not None else ()
        self.local = tree is not None and is_local(tree)
        """Whether what is appended depends on nothing further back than the message before the last turn."""

    def kind(self, message: Message) -> Kind:
        """What a branch of the template may ask about one message of history."""
        calls = message.get("tool_calls") or ()
        return (
            message.get("role"),
            min(len(calls), _SEEN_TWICE),
            self.text_kind(message.get("content")),
            bool(message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")),
            tuple(sorted([field for field, value in message.items() if value and field not in ("role", "content")])),
            all(call["function"].get("arguments") not in ("{}", {}, "", None) for call in calls),
        )

    def text_kind(self, text: Any) -> Kind:
        """None, empty, blank or text; and which of the tested strings stand in it."""
        if text is None:
            return ("none",)
        if not isinstance(text, str):
            return ("parts",)
        state = "text" if text.strip() else ("blank" if text else "empty")
        return (state, *(tested for tested in self.tested if tested in text))


class History:
    """The features of a conversation so far, kept up to date in O(1) a message and bounded in size.

    For a local template: the first message, how many there are up to three, the message before the last one, and the last one.
    For any other: leading system messages; the exchanges before the last user message thinned to two of a kind; the last exchange,
    its cycles (an assistant turn with its tool results) thinned alike, its last cycle always.
    """

    def __init__(self, features: Features) -> None:
        self._features = features
        self._lead: list[Kind] = []
        self._past: list[Kind] = []
        self._user: Kind | None = None
        self._cycles: list[Kind] = []
        self._cycle: list[Any] | None = None
        self._near: Kind = (None, 0, None, None)
        self._ended: Kind | None = None  # the cycle before this one: the neighbour that a template may look back at

    def copy(self) -> History:
        """Another one that has taken the same messages in."""
        other = History(self._features)
        other._lead, other._past, other._cycles = [*self._lead], [*self._past], [*self._cycles]
        other._cycle = None if self._cycle is None else [*self._cycle]
        other._user, other._near, other._ended = self._user, self._near, self._ended
        return other

    def add(self, message: Message) -> None:
        """Take the next message in."""
        kind = self._features.kind(message)
        role = message.get("role")
        if self._features.local:
            self._near = (self._near[0] or kind, min(self._near[1] + 1, _SEEN_THRICE), self._near[3], kind)
            return
        if role in ("user", "system", "developer"):
            if role != "user" and self._user is None and self._cycle is None:
                self._lead.append(kind)
                return
            self._end_exchange()
            self._user = kind
        elif role == "assistant" or self._cycle is None:
            self._end_cycle()
            self._cycle = [kind, (), 0]
        else:
            seen: tuple[Kind, ...] = self._cycle[1]
            self._cycle[1] = seen if kind in seen else (*seen, kind)
            self._cycle[2] = min(self._cycle[2] + 1, _SEEN_TWICE)

    def extend(self, messages: Sequence[Message]) -> None:
        """Take several messages in."""
        for message in messages:
            self.add(message)

    def _end_cycle(self) -> None:
        if self._cycle is not None:
            self._ended = tuple(self._cycle)
            _keep_two(self._cycles, self._ended)
            self._cycle = None

    def _end_exchange(self) -> None:
        self._end_cycle()
        if self._user is not None or self._cycles:
            _keep_two(self._past, (self._user, tuple(self._cycles), self._ended))
        self._user, self._cycles, self._ended = None, [], None

    @property
    def key(self) -> Kind:
        """Equal for conversations that a template cannot tell apart when it renders what comes next."""
        if self._features.local:
            return self._near
        last = tuple(self._cycle) if self._cycle is not None else None
        return (tuple(self._lead), tuple(self._past), self._user, tuple(self._cycles), self._ended, last)


def _keep_two(kept: list[Kind], kind: Kind) -> None:
    if kept.count(kind) < _SEEN_TWICE:
        kept.append(kind)
