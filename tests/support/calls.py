"""Tool calls: Hypothesis strategies, ordinary ones, and texts made from parts of a wire format."""

import random
from dataclasses import replace
from string import ascii_letters, ascii_lowercase, digits
from typing import Any

from hypothesis import strategies as st
from support.formats import FORMATS, Call, Format

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers, get_parser
from toolroll.parsers.types import ParsedReply


def _words(first: str, others: str, longest: int) -> st.SearchStrategy[str]:
    """One of `first`, and up to `longest` of `others`; `from_regex` takes several times as long."""
    return st.builds(str.__add__, st.sampled_from(first), st.text(others, max_size=longest))


NAMES = _words(ascii_lowercase, f"{ascii_lowercase}{digits}_", 15)
_EDGES = (
    *(0, -1, 2**31, 2**53 + 1, -(2**63)),
    *(0.1, -1.5, 1e22, 1e-7, 5e-324, 1.7976931348623157e308),
    2**64,
)
_NO_NAMES = frozenset("true false null none".split())


def strings(form: Format) -> st.SearchStrategy[str]:
    """Text that is mostly the format's own markers, and that it can carry."""
    piece = st.one_of(
        st.sampled_from(form.markers),
        st.text(max_size=6),
        st.sampled_from(("null", "true", "12", "1.5", " ", "{}")),
    )
    return st.lists(piece, max_size=5).map("".join).filter(form.carries)


def _spells(text: str, marks: list[str]) -> bool:
    return any(mark in text for mark in marks)


def arguments(form: Format) -> st.SearchStrategy[dict[str, Any]]:
    """An object of arguments that the format can carry."""
    scalars = st.one_of(
        st.booleans(),
        st.integers() if form.wide else st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(_EDGES if form.wide else _EDGES[:-1]),
        strings(form),
        *([st.none()] if form.null else []),
    )
    words = _words(f"{ascii_letters}_", f"{ascii_letters}{digits}_", 9).filter(
        lambda word: word.lower() not in _NO_NAMES
    )
    parser = get_parser(form.name)  # a key with one of its markers is never ok
    marks = [mark.strip().rstrip(">") for mark in (*parser.markers, *parser.inner) if len(mark) > 3]
    unmarked = strings(
        replace(form, markers=tuple(one for one in form.markers if not _spells(one, marks)))
    ).filter(lambda key: not _spells(key, marks))
    keys = words if form.keys == "word" else st.one_of(words, unmarked)
    values = st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=6,
    )
    return st.dictionaries(keys, values, max_size=4).filter(
        lambda found: form.carries(found) and all(map(form.carries, found))
    )


def calls(form: Format) -> st.SearchStrategy[list[Call]]:
    """One call or, where the format has several in a reply, up to three; one tool of a name."""
    pair = st.tuples(NAMES, arguments(form))
    return st.lists(
        pair, min_size=1, max_size=3 if form.parallel else 1, unique_by=lambda call: call[0]
    )


def same(left: Any, right: Any) -> bool:
    """Equal, with True and 1 told apart, 1 and 1.0 not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# --- ordinary calls, without hypothesis: many, quickly, the same each time ------------------------

_WORDS = (
    *("order", "Zürich", " ", "\n", '"', "'", "{", "}", "[x]", "é", "𝛑", "-", "1.5", ", "),
    *("#W12", "a@b.de", "null", "true", "10"),
)


def ordinary_calls(form: Format, picks: random.Random) -> list[Call]:
    """Calls whose strings spell no marker of any format."""
    number = picks.choice((1, 1, 2, 3)) if form.parallel else 1
    names = picks.sample(("get_order", "cancel", "search_flights", "book2", "x"), number)
    return [(name, _object(picks, ("id", "city", "Rooms", "n_max"), 3, 2)) for name in names]


def _object(picks: random.Random, keys: tuple[str, ...], most: int, depth: int) -> dict[str, Any]:
    chosen = picks.sample(keys, picks.randint(0, most))
    return {key: _value(picks, depth) for key in chosen}


def _value(picks: random.Random, depth: int) -> Any:
    kind = picks.choice(
        ("text", "text", "integer", "float", "boolean", "null", "list", "object")
        if depth
        else ("text", "integer")
    )
    if kind == "text":
        return "".join(picks.choice(_WORDS) for _ in range(picks.randint(0, 5)))
    if kind == "integer":
        return picks.choice((0, 7, -3, 10**9, 2**53 + 1))
    if kind == "float":
        return picks.choice((0.5, -1.25, 1e22, 3.0))
    if kind == "boolean":
        return picks.random() < 0.5
    if kind == "list":
        return [_value(picks, depth - 1) for _ in range(picks.randint(0, 3))]
    return _object(picks, ("a", "b", "c"), 2, depth - 1) if kind == "object" else None


def assert_read_back(reply: ParsedReply, written: list[Any]) -> None:
    """The calls of `reply` are `written`, with their arguments and without an error."""
    statuses = [(call.name, call.status.value, call.error) for call in reply.tool_calls]
    assert statuses == [(name, "ok", None) for name, _ in written]
    for call, (_, arguments) in zip(reply.tool_calls, written, strict=True):
        assert same(call.arguments, arguments)


# --- texts that a model would not write -----------------------------------------------------------

_FRAGMENTS = (
    "{", "}", "[", "]", '"', "'", "\\", ",", ":", "=", "(", ")", "<", ">", "\n", " ", "a", "name",
    '"name"', '"arguments"', "null", "1",
    "-", "1e999", "NaN", "é", "\u2028", "\x00", "<think>", "</think>", "<|", "|>", "{}",
    '{"name": "x", "arguments": {"id": "a"}}', "[x(id='a')]",
)  # fmt: skip
_FORMS = {
    kind.name: [form for form in FORMATS if form.name == kind.name] for kind in built_in_parsers()
}


def pieces_of(kind: type[ToolCallParser], picks: random.Random) -> list[str]:
    """A text in pieces: markers, fragments, whole calls, and calls with a cut or an insert."""
    forms = _FORMS[kind.name]
    marks = (*kind.openers, *kind.markers, *(marker for form in forms for marker in form.markers))
    found = []
    for _ in range(picks.randint(1, 6)):
        sort = picks.random()
        if sort < 0.45 and forms:
            form = picks.choice(forms)
            text = form.write(ordinary_calls(form, picks))
            for _ in range(picks.randint(0, 2)):
                at = picks.randint(0, len(text))
                text = (
                    text[:at]
                    + picks.choice(("", *_FRAGMENTS, *marks))
                    + text[at + picks.choice((0, 1, 1, 5, 30)) :]
                )
            found.append(text[: picks.choice((len(text), picks.randint(0, len(text))))])
        elif sort < 0.8 and marks:
            mark = picks.choice(marks)
            found.append(mark if picks.random() < 0.8 else mark[: picks.randint(0, len(mark))])
        else:
            found.append("".join(picks.choice(_FRAGMENTS) for _ in range(picks.randint(1, 6))))
    return found
