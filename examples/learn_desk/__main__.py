"""`python -m examples.learn_desk`: train the model, or one of the negative controls."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

import torch
from examples.learn_desk.learn import CONTROL_SEED, Learner, Lessons, prepare
from examples.learn_desk.mistakes import MISTAKES


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.learn_desk", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/learn"),
        help="the folder of the runs; if it contains an interrupted run, that run continues",
    )
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only train the tokenizer and play the reference episodes",
    )
    parser.add_argument("--seed", type=int, help="default: 0; not with --control")
    parser.add_argument(
        "--control",
        choices=MISTAKES,
        help="train a negative control: from the network after a third of the imitation, a policy "
        "gradient with this mistake",
    )
    parser.add_argument("--threads", type=int, default=1, help="the number of threads of torch")
    given = parser.parse_args()
    if given.control and given.seed is not None:
        parser.error(f"--seed: a control always starts from seed {CONTROL_SEED}")
    torch.set_num_threads(given.threads)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("examples.learn_desk").setLevel(logging.INFO)
    lessons = Lessons()
    await prepare(given.out, lessons)
    if given.prepare:
        return
    control = MISTAKES[given.control] if given.control else None
    seed = CONTROL_SEED if control else given.seed or 0
    await Learner(given.out, seed, lessons, control).run()


if __name__ == "__main__":
    asyncio.run(_main())
