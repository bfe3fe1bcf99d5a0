"""Hypothesis strategies for tool calls."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from support.formats import Call, Format

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,15}", fullmatch=True)
_EDGES = (0, -1, 2**31, 2**53 + 1, -(2**63), 2**64, 0.1, -1.5, 1e22, 1e-7, 5e-324, 1.7976931348623157e308)
_NO_NAMES = frozenset("true false null none".split())


def strings(form: Format) -> st.SearchStrategy[str]:
    """Text that is mostly the format's own markers, and that it can carry."""
    piece = st.one_of(st.sampled_from(form.markers), st.text(max_size=6), st.sampled_from(("null", "true", "12", "1.5", " ", "{}")))
    return st.lists(piece, max_size=5).map("".join).filter(form.carries)


def arguments(form: Format) -> st.SearchStrategy[dict[str, Any]]:
    """An object of arguments that the format can carry."""
    scalars = st.one_of(
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(_EDGES),
        strings(form),
        *([st.none()] if form.null else []),
    )
    words = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,9}", fullmatch=True).filter(lambda word: word.lower() not in _NO_NAMES)
    keys = words if form.keys == "word" else st.one_of(words, strings(form))
    values = st.recursive(
        scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)), max_leaves=6
    )
    return st.dictionaries(keys, values, max_size=4).filter(lambda found: form.carries(found) and all(map(form.carries, found)))


def calls(form: Format) -> st.SearchStrategy[list[Call]]:
    """One call or, where the format has several in a reply, up to three; one tool of a name."""
    pair = st.tuples(NAMES, arguments(form))
    return st.lists(pair, min_size=1, max_size=3 if form.parallel else 1, unique_by=lambda call: call[0])
