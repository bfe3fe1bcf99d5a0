"""Write the model of a run into the package: `python -m examples.learn_desk.export`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from examples.learn_desk.network import load_network, save_network
from examples.learn_desk.tokenizer import FILES


def export(model: Path, to: Path) -> None:
    """Write the model in the folder `model` to the folder `to`: the weights in float16, and the
    tokenizer.
    """
    save_network(load_network(model), to, torch.float16)
    for name in FILES:
        shutil.copyfile(model / name, to / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("out/learn/seed-0/model"))
    parser.add_argument("--to", type=Path, default=Path("src/toolroll/rollout/model/desk_1m"))
    given = parser.parse_args()
    export(given.model, given.to)
