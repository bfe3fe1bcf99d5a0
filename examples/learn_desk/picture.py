"""Draw the learning curves, and print the table of the negative controls:
`python -m examples.learn_desk.picture`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from examples.learn_desk.learn import CONTROL_SEED, Lessons
from examples.learn_desk.mistakes import MISTAKES
from matplotlib import pyplot

Line = dict[str, Any]
_BLUE, _RED = "#1f77b4", "#d62728"


def read_log(folder: Path) -> list[Line]:
    """Return the lines of a run's log. If a resumed run wrote a line again, return only the new
    one.
    """
    lines: dict[tuple[int, bool], Line] = {}
    for text in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines[line["step"], "held_out" in line] = line
    return sorted(lines.values(), key=lambda line: (line["step"], "held_out" in line))


def held_out(lines: list[Line]) -> list[tuple[int, float]]:
    """Return (step, mean reward on held-out tasks) of each evaluation."""
    return [(line["step"], line["held_out"]) for line in lines if "held_out" in line]


def draw(out: Path, to: Path) -> None:
    """Draw the held-out reward by step. The left plot has a line for each seed, their range and
    their mean. The right plot has two controls.
    """
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(8, 3.2), sharey=True, width_ratios=(3, 2)
    )
    taught = Lessons().drills + Lessons().imitation
    curves = [held_out(read_log(folder)) for folder in sorted(out.glob("seed-*"))]
    steps = [step for step, _ in curves[0]]
    rewards = list(zip(*([reward for _, reward in curve] for curve in curves), strict=True))
    for curve in curves:
        left.plot(steps, [reward for _, reward in curve], color=_BLUE, alpha=0.5, linewidth=1)
    low, high = [min(one) for one in rewards], [max(one) for one in rewards]
    left.fill_between(steps, low, high, color=_BLUE, alpha=0.2)
    mean = [sum(one) / len(one) for one in rewards]
    label = f"mean of {len(curves)} seeds"
    left.plot(steps, mean, color=_BLUE, linewidth=2, marker="o", label=label)
    left.axvline(Lessons().drills, color="grey", linestyle=":", label="imitation starts")
    left.axvline(taught, color="grey", linestyle="--", label="policy gradient starts")
    left.set(xlabel="steps of training", ylabel="reward on held-out tasks", ylim=(0, 1.02))
    for name, color, label in (
        ("none", _BLUE, "right mask"),
        ("mask-everywhere", _RED, "mask 1 everywhere"),
    ):
        curve = [
            (0, before(out)),
            *((at - taught, won) for at, won in held_out(read_log(out / name))),
        ]
        right.plot(*zip(*curve, strict=True), color=color, linewidth=2, marker="o", label=label)
    right.set(xlabel="steps of policy gradient, weaker start")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(to)


def before(out: Path) -> float:
    """Return the held-out reward of the network that the controls start from."""
    third = Lessons().drills + Lessons().imitation // 3
    return dict(held_out(read_log(out / f"seed-{CONTROL_SEED}")))[third]


def table(out: Path) -> str:
    """Return the held-out reward of each control after its policy gradient: the mean of the last
    two evaluations.
    """
    rows = ["| control | reward |", "| --- | --- |", f"| (before) | {before(out):.3f} |"]
    for name in MISTAKES:
        if (out / name).exists():
            last = held_out(read_log(out / name))[-2:]
            rows.append(f"| {name} | {sum(reward for _, reward in last) / len(last):.3f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/learn"))
    parser.add_argument("--to", type=Path, default=Path("docs/images/learn.svg"))
    given = parser.parse_args()
    draw(given.out, given.to)
    print(table(given.out))
