"""Coverage-guided fuzzing of the parsers' scanners with atheris, which must be installed for it: it is no dependency.

    python -m support.fuzz_scanners json FOLDER -max_total_time=240 -max_len=200        (in tests/)
    python -m support.fuzz_scanners --keep FOUND/json FOUND/python FOUND/values FOUND/blocks

The first word names the scanner: json, python, values, or blocks (every format, on texts made of its markers); FOLDER collects the
inputs that reach new code, further words are libFuzzer's (`-merge=1 SMALL FOLDER` makes a small folder of a large one). `--keep`
writes such folders, each named for its scanner, as `tests/unit/parsers/corpus/SCANNER.json`, which the tests replay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "unit" / "parsers" / "corpus"
LONGEST = 400


def keep(folders: list[str]) -> None:
    """Add what each folder holds to the corpus of its scanner."""
    from support.scanners import text_of

    for folder in map(Path, folders):
        path = CORPUS / f"{folder.name}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        for entry in sorted(folder.iterdir()):
            data = entry.read_bytes()
            found = list(text_of(data)) if folder.name == "blocks" else data.decode("utf-8", "ignore")
            if found not in kept and len(found[-1] if isinstance(found, list) else found) <= LONGEST:
                kept.append(found)
        path.write_text(json.dumps(kept, ensure_ascii=True, indent=0) + "\n", encoding="utf-8")


def fuzz(scanner: str, options: list[str]) -> None:
    """Run libFuzzer on `scanner`; it does not return."""
    import atheris

    with atheris.instrument_imports(include=["toolroll.parsers"]):
        from support.scanners import SCANNERS, check_format, text_of

    def check(data: bytes) -> None:
        if scanner == "blocks":
            check_format(*text_of(data))
        else:
            SCANNERS[scanner](data.decode("utf-8", "ignore"))

    # libFuzzer starts this program again where it merges folders.
    atheris.Setup([f"{sys.executable} -m support.fuzz_scanners {scanner}", *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--keep":
        keep(sys.argv[2:])
    else:
        fuzz(sys.argv[1], sys.argv[2:])
