"""`WordSplit`: where a byte-level BPE cuts text into words, read off the tokenizer's own description.

A pre-tokenizer of this kind is a sequence of regular expressions of the Oniguruma dialect over Unicode classes. In text of a small
alphabet (`ALPHABET`: ASCII, the Latin letters of Europe, typographic punctuation) each of them is an expression of the standard
library's `re` with the classes written out. Invariants: what is not known to mean the same in both
dialects is not translated (`read_split` gives None); text with any other character is never cut here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the pre-tokenizer `ByteLevel` cuts by where it is told to (tokenizers 0.23, `pre_tokenizers/byte_level.rs`)."""

_ABSENT = frozenset(("Han", "Hiragana", "Katakana", "Hangul", "Thai", "Lao", "Khmer", "Myanmar"))
"""Scripts without a character in `ALPHABET`."""

_SAME_ESCAPES = frozenset("rnt")  # so does any that escapes punctuation
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!")
_FOLDED = re.compile(r"\(\?i:['a-z|]*\)")  # beyond ASCII the dialects fold cases in their own ways
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}(?![?+*])")
_CATEGORIES = frozenset(
    (*"LMNPSZC", *"Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co".split())
)

_ODD = frozenset("\u0130\u0131\u017f")  # dotted, dotless and long: other letters' cases, which dialects fold in their own ways
ALPHABET = tuple(
    chr(code) for code in (*range(0x180), *range(0x2010, 0x2028), *range(0x2030, 0x205F), 0x20AC) if chr(code) not in _ODD
)
"""What may be cut here. All of it is in normal form C, whatever stands beside it."""
_SPACES = tuple("\t\n\v\f\r \x85\xa0")  # Unicode's White_Space in it; Python's `\\s` has U+001C to U+001F besides
_OTHERS = re.compile("[^" + "".join(map(re.escape, ALPHABET)) + "]")


class WordSplit:
    """`patterns` in their order: each cuts every piece that the one before it left. What stands between the matches of the last one
    is a word too; without `keeps_rest` the tokenizer drops it, and such a text is not cut here."""

    def __init__(self, patterns: Sequence[re.Pattern[str]], *, keeps_rest: bool = True) -> None:
        *self._before, self._last = patterns
        self._keeps_rest = keeps_rest

    def words(self, text: str) -> list[str] | None:
        """The words of `text`, in order, nothing left out; None where they cannot be told."""
        if not text.isascii() and _OTHERS.search(text):
            return None
        pieces = [text]
        for pattern in self._before:
            pieces = [part for piece in pieces for part in _cut(pattern, piece)]
        words: list[str] = []
        for piece in pieces:
            found = self._last.findall(piece)
            if "".join(found) != piece:
                if not self._keeps_rest:
                    return None
                found = _cut(self._last, piece)
            words += found
        return words


def _cut(pattern: re.Pattern[str], text: str) -> list[str]:
    """The matches of `pattern` and what stands between them."""
    parts, at = [], 0
    for match in pattern.finditer(text):
        if match.end() > match.start():
            parts += [text[at : match.start()], match.group()]
            at = match.end()
    return [part for part in (*parts, text[at:]) if part]


def read_split(tokenizer: Tokenizer) -> WordSplit | None:
    """How `tokenizer` cuts text of `ALPHABET`; None where it does something else besides, or something that is not known here."""
    cuts_off = tokenizer.truncation is not None or tokenizer.padding is not None
    if cuts_off or type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
        return None
    if any(step["type"] != "NFC" for step in _steps(tokenizer.normalizer, "normalizers")):
        return None
    steps = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    cuts: list[tuple[str, bool]] = []
    for step in steps:
        found = _cuts(step)
        if found is None:
            return None
        cuts += found
    patterns = [in_python(source) for source, _ in cuts]
    kept = [keeps for _, keeps in cuts]
    if not patterns or None in patterns or not all(kept[:-1]):
        return None
    return WordSplit([pattern for pattern in patterns if pattern is not None], keeps_rest=kept[-1])


def state_of(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer says of itself; `{"type": "Custom"}` of one that is written in Python and says nothing."""
    try:
        return dict(orjson.loads(part.__getstate__()))
    except Exception:  # noqa: BLE001 - tokenizers raises Exception itself
        return {"type": "Custom"}


def _steps(part: Any, of: str) -> list[dict[str, Any]]:
    """The states of a sequence's parts, which it names `of`, or of the part alone."""
    if part is None:
        return []
    state = state_of(part)
    return list(state[of]) if state["type"] == "Sequence" else [state]


def _cuts(step: dict[str, Any]) -> list[tuple[str, bool]] | None:
    """The expressions that one step cuts by, each with whether what stands between its matches stays; None for a step that does
    anything else."""
    kind = step.get("type")
    if kind == "Split" and (step["behavior"], step["invert"]) in (("Isolated", False), ("Removed", True)):
        pattern = step["pattern"]
        # Inverted, what is removed is what does not match.
        return [(pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"]), not step["invert"])]
    if kind == "Digits":
        return [(r"\p{N}" if step["individual_digits"] else r"\p{N}+", True)]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [(_GPT2, True)] if step["use_regex"] else []
    return None


def in_python(source: str) -> re.Pattern[str] | None:
    """The expression of Python's that matches in text of `ALPHABET` what Oniguruma's `source` does; None where that is not certain."""
    parts: list[str] = []
    at = 0
    while at < len(source):
        read = _next(source, at)
        if read is None:
            return None
        part, at = read
        parts.append(part)
    try:
        made = re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
    return None if made.match("") else made  # the dialects do different things behind an empty match


def _next(source: str, at: int) -> tuple[str, int] | None:
    """One piece of the expression and the place behind it; None for Ruby's anchors and dot, groups that capture, and the rest."""
    here = source[at]
    if here == "\\":
        found = _escape(source, at)
        if found is None:
            return None
        members, behind = found
        return members if isinstance(members, str) else _class(members, negated=False), behind
    if here == "[":
        return _bracket(source, at)
    if here == "{":
        counted = _COUNT.match(source, at)  # behind a count, Ruby's `?` and `+` are no marks of it
        return (counted.group(), counted.end()) if counted is not None else None
    if here == "(":
        folded = _FOLDED.match(source, at)
        opened = folded.group() if folded is not None else next((group for group in _GROUPS if source.startswith(group, at)), None)
        return (opened, at + len(opened)) if opened is not None else None
    return None if here in "^$." else (here, at + 1)


def _escape(source: str, at: int) -> tuple[str | list[str], int] | None:
    """The escape at `at`: as it is, or the characters that it stands for; and the place behind it."""
    kind = source[at + 1 : at + 2]
    if kind in ("p", "P"):
        end = source.find("}", at)
        members = _members(source[at + 3 : end]) if source[at + 2 : at + 3] == "{" and end > 0 else None
        return None if members is None else (_either(members, negated=kind == "P"), end + 1)
    if kind in ("s", "S"):
        return _either(_SPACES, negated=kind == "S"), at + 2
    if kind in _SAME_ESCAPES or (kind and not kind.isalnum() and kind.isascii()):
        return source[at : at + 2], at + 2
    return None


def _either(members: Sequence[str], *, negated: bool) -> list[str]:
    return [char for char in ALPHABET if (char in members) is not negated]


def _members(name: str) -> list[str] | None:
    """The characters of a Unicode class in `ALPHABET`: a general category (`L`, `Lu`), or a script without any."""
    if name in _ABSENT:
        return []
    if name not in _CATEGORIES:
        return None
    return [char for char in ALPHABET if unicodedata.category(char).startswith(name)]


def _class(members: Sequence[str], *, negated: bool) -> str:
    if not members:
        return r"[\s\S]" if negated else "(?!)"
    return "[" + "^" * negated + "".join(map(re.escape, members)) + "]"


def _bracket(source: str, at: int) -> tuple[str, int] | None:
    """The bracketed class at `at`, and the place behind it."""
    at += 1
    negated = source[at : at + 1] == "^"
    at += negated
    if source[at : at + 1] == "]":
        return None
    inside: list[str] = []
    while source[at : at + 1] != "]":
        here = source[at : at + 1]
        if not here or here == "[" or source.startswith(("&&", "-\\p", "-\\P", "-\\s", "-\\S"), at):
            return None  # unclosed, a class in a class, an intersection, a range to a class
        if here == "\\":
            found = _escape(source, at)
            if found is None:
                return None
            members, at = found
            inside += [members] if isinstance(members, str) else map(re.escape, members)
            continue
        inside.append("\\^" if here == "^" else here)
        at += 1
    if not inside:
        return _class((), negated=negated), at + 1
    return "[" + "^" * negated + "".join(inside) + "]", at + 1
