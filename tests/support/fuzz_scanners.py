"""Coverage-guided fuzzing of the parsers' scanners with atheris, which must be installed
separately.

    python -m support.fuzz_scanners json FOLDER -max_total_time=240 -max_len=200        (in tests/)
    python -m support.fuzz_scanners --keep FOUND/json FOUND/python FOUND/values FOUND/blocks

The first word names the scanner: json, python, values, or blocks (every format, on texts made from
its markers). FOLDER collects the inputs that reach new code. Further words are passed to libFuzzer
(`-merge=1 SMALL FOLDER` makes a small folder from a large one). `--keep` takes such folders, each
named after its scanner, and adds inputs that reach a new step of the parsers' code to
`tests/unit/parsers/corpus/SCANNER.json`, which the tests replay. After fixing a failure, add its
text there by hand.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).parents[1] / "unit" / "parsers" / "corpus"


class Reached:
    """Which steps from line to line the parsers have taken, over all texts so far."""

    def __init__(self) -> None:
        self.steps: set[tuple[str, int, int]] = set()

    def is_new(self, check: Callable[[], None]) -> bool:
        """Whether `check` takes a step that none before it took."""
        before = len(self.steps)
        sys.settrace(self._frame)
        try:
            check()
        finally:
            sys.settrace(None)
        return len(self.steps) > before

    def _frame(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if "/parsers/" not in name or "/tests/" in name:
            return None
        last = frame.f_lineno

        def step(frame: FrameType, event: str, argument: object) -> object:
            nonlocal last
            self.steps.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step


def keep(folders: list[str]) -> None:
    """Add to each scanner's corpus what reaches something new, the short ones first."""
    from support.scanners import SCANNERS, check_format, text_of

    for folder in map(Path, folders):
        reached = Reached()
        blocks = folder.name == "blocks"
        path = CORPUS / f"{folder.name}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        data = sorted(
            (entry.read_bytes() for entry in folder.iterdir()), key=lambda one: (len(one), one)
        )
        new = [list(text_of(one)) if blocks else [one.decode("utf-8", "ignore")] for one in data]
        check = check_format if blocks else SCANNERS[folder.name]
        for found in kept:
            reached.is_new(partial(check, *(found if blocks else [found])))
        kept += [
            found if blocks else found[0] for found in new if reached.is_new(partial(check, *found))
        ]
        path.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


def fuzz(scanner: str, options: list[str]) -> None:
    """Run libFuzzer on `scanner`; it does not return."""
    atheris: Any = importlib.import_module("atheris")

    with atheris.instrument_imports(include=["toolroll.parsers"]):
        from support.scanners import SCANNERS, check_format, text_of

    def check(data: bytes) -> None:
        if scanner == "blocks":
            check_format(*text_of(data))
        else:
            SCANNERS[scanner](data.decode("utf-8", "ignore"))

    # libFuzzer starts this program again to merge folders.
    atheris.Setup([f"{sys.executable} -m support.fuzz_scanners {scanner}", *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--keep":
        keep(sys.argv[2:])
    else:
        fuzz(sys.argv[1], sys.argv[2:])
