"""What each parser makes of its family's examples: whole, broken, and cut at ten places; kept in
`golden/`, which `support.examples` reads the texts from.

TOOLROLL_GOLDEN=1 writes the files with the replies to their texts: look at what changed before you
commit it.
"""

import json
import os
from typing import Any

import pytest
from support.examples import EXAMPLES, GOLDEN, TOOLS
from support.formats import FORMATS
from support.parsing import assert_same_in_pieces, lost

from toolroll.parsers.registry import built_in_parsers, get_parser
from toolroll.parsers.types import ParsedReply

CALL_FIELDS = ("name", "arguments", "error", "id", "span")


def as_json(reply: ParsedReply) -> dict[str, Any]:
    calls = [
        {"status": call.status.value, **{name: getattr(call, name) for name in CALL_FIELDS}}
        for call in reply.tool_calls
    ]
    thought = {"reasoning": reply.reasoning, "closed": reply.reasoning_closed}
    return {"content": reply.content, **thought, "calls": calls}


def texts(name: str) -> dict[str, str]:
    """What is read: the good reply, the broken ones, and the good one cut at ten places."""
    good, broken = EXAMPLES[name].good, EXAMPLES[name].broken
    cut = {f"cut at {tenth}/11": good[: len(good) * tenth // 11] for tenth in range(1, 11)}
    return {"well-formed": good, **broken, **cut}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_read_as_before(name: str) -> None:
    parser = get_parser(name)
    cases = []
    for what, text in texts(name).items():
        reply = assert_same_in_pieces(parser, text, tools=TOOLS, in_reasoning=False)
        assert not lost(parser, text, reply), text
        cases.append({"what": what, "text": text, "reply": as_json(reply)})
    whole = {"parser": name, "source": EXAMPLES[name].source, "cases": cases}
    found = json.loads(json.dumps(whole))
    path = GOLDEN / f"{name}.json"
    if os.environ.get("TOOLROLL_GOLDEN"):
        path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(path.read_text(encoding="utf-8"))


def test_every_format_with_calls_has_examples_and_a_writer() -> None:
    names = {kind.name for kind in built_in_parsers()} - {"plain"}
    assert set(EXAMPLES) == names <= {form.name for form in FORMATS}
