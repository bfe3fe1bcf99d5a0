"""`toolroll compare`: prints how runs differ from a baseline run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from toolroll.cli.display import listed, shortened
from toolroll.evaluation.compare import SIGNIFICANT, ComparedRun, Question, compare, read_runs
from toolroll.evaluation.viewer import PageRun, write_side_by_side
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.run_directory import read_settings

Runs = Mapping[str, ComparedRun]
EXIT_STATUS = {"worse": 3, "inconclusive": 4}
"""The exit status of a failed gate by verdict."""
_HEADER = ("", "baseline", "candidate", "difference [95 %]")
_RULE = ("---", *["---:"] * 3)
_DIGITS = {"aborted": 0, "user cost (mean)": 4} | {
    f"{kind} tokens (mean)": 0 for kind in ("prompt", "completion")
}
"""The decimals of a row of the table, if they are not two."""
_MOST_TASKS = 8
_LEAST = (
    "the interval is widened: it is as wide as if one task alone had changed, by the whole range "
    "of rewards"
)


def compare_folders(
    folders: Sequence[Path], question: Question, page: Path | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the comparisons of the first folder with each other one, and messages about lines that
    cannot be read. Write the file `page`, which shows them with their episodes.
    """
    bad_lines: list[str] = []
    runs = [read_runs(folder, on_bad_line=bad_lines.append) for folder in folders]
    comparisons = compare(runs[0], runs[1:], question)
    if page is not None:
        shown = [_page_run(*pair, runs[0], question) for pair in zip(folders, runs, strict=True)]
        texts = [as_text(comparison, table_last=True) for comparison in comparisons]
        names = " and ".join(folder.resolve().name for folder in folders)
        write_side_by_side(page, f"toolroll: {names}", shown, texts)
    return comparisons, shortened(bad_lines)


def _page_run(folder: Path, runs: Runs, base: Runs, question: Question) -> PageRun:
    """Return the run in `folder` for the page, with the samples that are compared with `base`."""
    pairs = {
        (env, task, after.number): before.number
        for env in (() if runs is base else runs.keys() & base.keys())
        for task, samples in question.pairing(base[env], runs[env]).pairs.items()
        for before, after in samples
    }
    episodes = read_episodes(folder, on_bad_line=lambda message: None)
    return PageRun(str(folder), episodes, read_settings(folder), pairs)


def exit_status(comparisons: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit status of `--fail-if-worse`: 0 if no candidate is worse."""
    statuses = [EXIT_STATUS.get(comparison["verdict"], 0) for comparison in comparisons]
    return min(filter(None, statuses), default=0)


def json_text(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparisons as JSON."""
    content = {"schema_version": 1, "comparisons": comparisons}
    return orjson.dumps(content, option=orjson.OPT_INDENT_2).decode()


def as_text(
    comparison: Mapping[str, Any], *, markdown: bool = False, table_last: bool = False
) -> str:
    """Return one comparison as a title, a table and lines, as plain text or as Markdown. A page has
    the table last.
    """
    title = "{env}: baseline {base}, candidate {candidate}: {verdict}".format_map(comparison)
    rows = [_HEADER, *([_RULE] if markdown else []), *_rows(comparison)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines = _lines(comparison)
    if markdown:
        title, table = f"**{title}**", [f"| {row} |" for row in table]
        lines = [f"- {line}" for line in lines]
    parts = [title, *lines, "", *table] if table_last else [title, "", *table, "", *lines]
    return "\n".join([*parts, ""])


def _rows(comparison: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rates = {"reward (mean)": comparison["reward"]} | {
        f"pass^{k}": part for k, part in comparison["pass^k"].items()
    }
    interval = "{difference:+z.3f} [{low:+z.3f}, {high:+z.3f}]".format_map
    rows: list[tuple[str, ...]] = [
        (name, f"{part['base']:.3f}", f"{part['candidate']:.3f}", interval(part))
        for name, part in rates.items()
    ]
    usage = {f"{name.replace('_', ' ')} (mean)": part for name, part in comparison["usage"].items()}
    usage["aborted"] = comparison["coverage"]["aborted"]
    return rows + [
        (name, *(f"{part[side]:,.{_DIGITS.get(name, 2)}f}" for side in ("base", "candidate")), "")
        for name, part in usage.items()
    ]


def _p(value: float) -> str:
    digits = 4 if value < 0.1 else 3  # near 0.05, the verdict must be clear
    return f"p = {value:.{digits}f}" if value >= 0.001 else "p < 0.001"


def _lines(comparison: Mapping[str, Any]) -> list[str]:
    coverage, reward = comparison["coverage"], comparison["reward"]
    setups = (comparison["setup"][side] for side in ("base", "candidate"))
    before, after = (listed(setup) or "not recorded" for setup in setups)
    played = [f"baseline: {before}", f"candidate: {after}"]
    lines = [
        *(f"WARNING: {side}: {line}" for side, line in comparison["unfinished"].items() if line),
        "inconclusive: a run is not finished"
        if comparison.get("gate", {}).get("open")
        else _verdict(comparison["verdict"], **reward),
        *([_LEAST] if reward["least_error"] else []),
        *_power(comparison),
        *_gate_lines(comparison),
        *([f"both: {before}"] if before == after else played),
        f"compared: {coverage['tasks']} of {coverage['of_tasks']} tasks, {coverage['samples']} of "
        f"{coverage['of_samples']} samples",
    ]
    if coverage["other_data"]:
        tasks = _some(coverage["other_data"])
        lines.append(f"left out without --allow-different tasks, as their data differ: {tasks}")
    if (mcnemar := comparison["mcnemar"]) is not None:
        lines.append(
            "tasks that passed only in the baseline: {worse}, only in the candidate: {better} "
            f"(McNemar's exact test: {_p(mcnemar['p'])})".format_map(mcnemar)
        )
    if equivalence := comparison.get("equivalence"):
        answer = "" if equivalence["p"] <= SIGNIFICANT else "not "
        lines.append(
            f"{answer}shown to differ by less than {equivalence['margin']:g} "
            f"({_p(equivalence['p'])})"
        )
    for name, tasks in comparison["changed"].items():
        if tasks:
            texts = ["{task} {base:.2f} -> {candidate:.2f}".format_map(task) for task in tasks]
            count = "1 task" if len(tasks) == 1 else f"{len(tasks)} tasks"
            lines.append(f"{name} in {count}: {_some(texts)}")
    return lines + [f"also different: {line}" for line in comparison["settings"]]


def _verdict(verdict: str, *, limit: float, p_holm: float, **_: Any) -> str:
    """Return the verdict as a sentence, with the p-value and its hypothesis."""
    more = f" by more than {-limit:g}" if limit else ""
    phrases = {
        "worse": f"fell{more}",
        "no worse": f"did not fall{more}",
        "better": "rose",
        "inconclusive": f"may have fallen{more}, or not" if limit else "may have changed, or not",
    }
    p_value = f"{_p(p_holm)} if it {f'fell by {-limit:g}' if limit else 'did not change'}"
    return f"{verdict}: the mean reward {phrases[verdict]} ({p_value})"


def _power(comparison: Mapping[str, Any]) -> list[str]:
    asked = comparison.get("power_for")
    line = "so few tasks can show no difference of these rewards"
    if comparison["detectable"] <= comparison["span"]:
        hint = "" if asked else "; for others: --power-for REWARD"
        claim = f"a true difference of {comparison['detectable']:.3f} would be found in"
        line = f"{claim} 80% of such comparisons{hint}"
    if not asked:
        return [line]
    claim = "a true difference of {difference:g} would be found in {power:.0%} of such comparisons"
    return [line, f"{claim}, and in 80% with {{tasks}} tasks".format_map(asked)]


def _gate_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return why an inconclusive gate may need more tasks."""
    gate = comparison.get("gate")
    if gate is None or gate["open"] or comparison["verdict"] != "inconclusive":
        return []
    option, tasks = f"--fail-if-worse {gate['loss']:g}", gate["tasks_if_unchanged"]
    if tasks is None:
        return [f"{option} cannot pass if nothing changed"]
    if comparison["coverage"]["tasks"] >= tasks:
        return []
    return [f"{option} needs at least {tasks} tasks, even if nothing changed"]


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_MOST_TASKS]) + (", ..." if len(texts) > _MOST_TASKS else "")
