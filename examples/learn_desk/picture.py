"""Draw the curves and print the table of controls: `python -m examples.learn_desk.picture`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from examples.learn_desk.learn import Lessons
from examples.learn_desk.mistakes import MISTAKES
from matplotlib import pyplot

Line = dict[str, Any]


def read_log(folder: Path) -> list[Line]:
    """Return the lines of a run's log, without those that a resumed run wrote a second time."""
    lines: dict[tuple[int, bool], Line] = {}
    for text in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        lines[line["step"], "held_out" in line] = line
    return sorted(lines.values(), key=lambda line: line["seconds"])


def held_out(lines: list[Line]) -> list[tuple[float, float]]:
    """Return (minutes, mean reward on held-out tasks) of each evaluation."""
    return [(line["seconds"] / 60, line["held_out"]) for line in lines if "held_out" in line]


def draw(out: Path, to: Path) -> None:
    """Draw the held-out reward of each seed over time, and the band between them."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    runs = [read_log(folder) for folder in sorted(out.glob("seed-*"))]
    curves = [held_out(lines) for lines in runs]
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color="#1f77b4", alpha=0.5, linewidth=1)
    points = list(zip(*curves, strict=False))
    minutes = [sum(time for time, _ in point) / len(point) for point in points]
    low = [min(reward for _, reward in point) for point in points]
    high = [max(reward for _, reward in point) for point in points]
    mean = [sum(reward for _, reward in point) / len(point) for point in points]
    axes.fill_between(minutes, low, high, color="#1f77b4", alpha=0.2)
    axes.plot(minutes, mean, color="#1f77b4", linewidth=2, label=f"mean of {len(curves)} seeds")
    starts = [line["seconds"] / 60 for line in runs[0] if line["lesson"] == "reinforcement"]
    if starts:
        axes.axvline(starts[0], color="grey", linestyle=":", label="policy gradient starts")
    axes.set(xlabel="minutes on one CPU core", ylabel="reward on held-out tasks", ylim=(0, 1))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(to)


def table(out: Path) -> str:
    """Return the held-out reward of each control after its policy gradient: the mean of the last
    two evaluations.
    """
    half = Lessons().drills + Lessons().imitation // 2
    [start] = [
        line["held_out"]
        for line in read_log(out / "seed-0")
        if line["step"] == half and "held_out" in line
    ]
    rows = ["| control | reward |", "| --- | --- |", f"| (before) | {start:.3f} |"]
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
