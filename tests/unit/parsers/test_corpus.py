"""Texts that fuzzing found, each for some new way through the code or for a failure that was
mended: all of them, in every format. `corpus/` has a file for each scanner."""

import json
from pathlib import Path

import pytest
from support.scanners import SCANNERS, check_format
from support.tiers import by_code

from toolroll.parsers.registry import built_in_parsers

FOLDER = Path(__file__).parent / "corpus"
FOUND: dict[str, list[str]] = {
    scanner: json.loads((FOLDER / f"{scanner}.json").read_text(encoding="utf-8"))
    for scanner in SCANNERS
}
BLOCKS: list[tuple[str, str]] = json.loads((FOLDER / "blocks.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scanner", SCANNERS)
def test_what_was_found_in_a_scanner_holds(scanner: str) -> None:
    assert FOUND[scanner]
    for text in FOUND[scanner]:
        SCANNERS[scanner](text)


@pytest.mark.parametrize("name", by_code([kind.name for kind in built_in_parsers()], str))
def test_what_was_found_breaks_no_other_format(name: str) -> None:
    [kind] = [kind for kind in built_in_parsers() if kind.name == name]
    opener = (*kind.openers, *kind.markers, "")[0]
    for text in (
        *(text for _, text in BLOCKS),
        *(text for texts in FOUND.values() for text in texts),
    ):
        check_format(name, text)
        check_format(name, opener + text)
