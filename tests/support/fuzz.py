"""Texts that a model would not write, made from parts of a wire format."""

import random

from support.calls import ordinary_calls
from support.formats import FORMATS

from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import built_in_parsers

COMMON = (
    "{", "}", "[", "]", '"', "'", "\\", ",", ":", "=", "(", ")", "<", ">", "\n", " ", "a", "name",
    '"name"', '"arguments"', "null", "1",
    "-", "1e999", "NaN", "é", "\u2028", "\x00", "<think>", "</think>", "<|", "|>", "{}",
    '{"name": "x", "arguments": {"id": "a"}}', "[x(id='a')]",
)  # fmt: skip
OWN = {
    kind.name: [form for form in FORMATS if form.name == kind.name] for kind in built_in_parsers()
}


def pieces_of(kind: type[ToolCallParser], picks: random.Random) -> list[str]:
    """A text in pieces: markers, fragments, whole calls, and calls with a cut or an insert."""
    forms = OWN[kind.name]
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
                    + picks.choice(("", *COMMON, *marks))
                    + text[at + picks.choice((0, 1, 1, 5, 30)) :]
                )
            found.append(text[: picks.choice((len(text), picks.randint(0, len(text))))])
        elif sort < 0.8 and marks:
            mark = picks.choice(marks)
            found.append(mark if picks.random() < 0.8 else mark[: picks.randint(0, len(mark))])
        else:
            found.append("".join(picks.choice(COMMON) for _ in range(picks.randint(1, 6))))
    return found
