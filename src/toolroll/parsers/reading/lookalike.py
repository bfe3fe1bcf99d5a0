"""Find text that looks like a call of an offered tool, although the format does not count it as a
call: the outer marker is missing or misspelled, or the call is written in another format.

Invariants: such text stays content, and only names of offered tools count. Text between backticks
on one line is a quotation, so prose about a format is rarely found. The time is linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache

from toolroll.parsers.types import CallStatus, ToolCall

LOOKALIKE = "the text looks like a tool call"
"""The error of text that looks like a call begins with it."""
_NAME = r"[^\W\d][\w.\-/]*+"
_KEY = r"""(?:"[^"\n]{1,60}"|'[^'\n]{1,60}'|\w{1,60}+)\s*+:"""
_AS_JSON = (
    rf"""["'](?:tool_)?name["']\s*+:\s*+["'](?P<json>{_NAME})["']\s*+,\s*+"""
    r"""["'](?:arguments|parameters|args)["']"""
)
_AS_TAG = (
    rf"<[^<>=\n]{{0,40}}?(?:function|invoke|tool|call)[^<>=\n]{{0,20}}=\s*+[\"']?(?P<tag>{_NAME})"
)
# After `name()` without a bracket before it, the line must end: "name() returns ..." is prose.
_AS_PYTHON = (
    rf"(?m:^)[ \t]*+(?P<bracket>\[)?(?P<python>{_NAME})"
    r"\(\s*+(?:\w{1,60}+\s*+=[^=]|\)(?(bracket)|[ \t]*+(?m:$)))"
)
_MARKER = r"\s*+(?:<[^<>\n]{1,40}>|\[[A-Z_]{1,20}\]|```(?:json)?)\s*+"
# A space before an empty object is prose or a command, as in `find . -exec grep {} +`.
_BEFORE_OBJECT = (
    rf"(?<![\w.\-/])(?P<object>{_NAME})(?::\d++)?"
    rf"(?:(?:{_MARKER})?\{{\s*+\}}|(?:{_MARKER}|\s*+)\{{\s*+{_KEY})"
)
_BACKTICKS = re.compile("(?<!`)`{1,2}(?!`)")  # three start a block of code
Beside = tuple[tuple[str, ...], tuple[str, ...]]
"""A format's own markers that precede the name of a tool, and those that follow it."""


def lookalikes(text: str, beside: Beside, names: Collection[str]) -> Iterator[ToolCall]:
    """Yield the parts of `text` that look like calls of tools in `names`."""
    if not any(map(text.__contains__, names)):  # much faster than the pattern
        return
    quoted, position = False, 0
    for match in _pattern(beside).finditer(text):
        _, line_break, line = text[position : match.start()].rpartition("\n")
        quoted = (len(_BACKTICKS.findall(line)) + (quoted and not line_break)) % 2 == 1
        position = match.start()
        written = match[match.lastgroup or 0]
        name = written if written in names else written.removeprefix("functions.")
        if name in names and not quoted:
            yield lookalike(match.group(), name)


def lookalike(raw: str, name: str = "") -> ToolCall:
    """Return the text `raw`, which looks like a call of `name`."""
    error = (
        f"{LOOKALIKE}{' of ' * bool(name)}{name}, but it is not one in the "
        "format of this model, so nothing was executed"
    )
    return ToolCall(name, None, raw, CallStatus.LOOKS_LIKE_A_CALL, error)


@lru_cache(maxsize=64)
def _pattern(beside: Beside) -> re.Pattern[str]:
    ways = [_AS_JSON, _AS_TAG, _AS_PYTHON, _BEFORE_OBJECT]
    before, after = ("|".join(map(re.escape, markers)) for markers in beside)
    if before:
        ways.append(rf"(?:{before})\s*+(?P<marked>{_NAME})")
    if after:
        ways.append(rf"(?<![\w.\-/])(?P<marking>{_NAME})\s*+(?:{after})")
    return re.compile("|".join(ways))
