"""A well-formed reply and some broken ones of each family, from the published specification or
template of the format: the texts in the golden files of tests/unit/parsers.

The tools are `get_weather(city: string, days: integer)` and `get_time()`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from support.parsing import tool

GOLDEN = Path(__file__).parents[1] / "unit" / "parsers" / "golden"
TOOLS = [
    tool(
        "get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, required=["city"]
    ),
    tool("get_time"),
]


@dataclass(frozen=True)
class Example:
    """`source`: the publication of the format. `good`: a reply with text and calls. `broken`: what
    is wrong -> the reply."""

    source: str
    good: str
    broken: dict[str, str]


def _read(file: Path) -> Example:
    golden = json.loads(file.read_text(encoding="utf-8"))
    texts = {case["what"]: case["text"] for case in golden["cases"]}
    broken = {what: text for what, text in texts.items() if not what.startswith("cut at ")}
    return Example(golden["source"], broken.pop("well-formed"), broken)


EXAMPLES = {file.stem: _read(file) for file in sorted(GOLDEN.glob("*.json"))}
