"""`toolroll compare`: what is paired, what is refused, the numbers, the status of a gate, and the
interval: it holds the true difference of simulated benchmarks, and sees it, as often as it says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.commands import toolroll
from support.results import episode, trajectory
from support.source import ROOT

from toolroll import Episode, StopReason, UsageError
from toolroll.cli.compare import _p
from toolroll.evaluation.compare import Question, compare, read_runs
from toolroll.evaluation.compare.difference import Difference, holm, mcnemar
from toolroll.rollout.runs.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("here")
SETTINGS = {"model": "tiny", "max_turns": 8, "seed": 0}


def folder(
    path: str,
    episodes: Iterable[Episode],
    *,
    provenance: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run of the environment `pond`."""
    facts = {"date": "today", **(provenance or {})}
    with RunDirectory(Path(path), "pond", {**SETTINGS, **settings}, provenance=facts) as run:
        for one in episodes:
            run.append(one)
    return Path(path)


def played(
    rewards: Mapping[str, Iterable[float | None]], metrics: dict[str, float] | None = None
) -> list[Episode]:
    """The samples of each task; None is an aborted one."""
    reasons = {True: StopReason.ENGINE_ERROR, False: StopReason.DONE}
    return [
        episode(task, sample, reward, reason=reasons[reward is None], metrics=metrics)
        for task, samples in rewards.items()
        for sample, reward in enumerate(samples)
    ]


def many(count: int, passes: int, start: int = 0) -> list[Episode]:
    """One sample of each of `count` tasks, of which `passes` pass, from the task `start` on."""
    return played({f"t-{task}": [float(start <= task < start + passes)] for task in range(count)})


def comparison(base: Path, candidate: Path, **question: Any) -> dict[str, Any]:
    (found,) = compare(read_runs(base), [read_runs(candidate)], Question(**question))
    return found


# --- what is paired -------------------------------------------------------------------------------


def test_only_samples_that_both_have_graded_are_compared() -> None:
    base = folder("a", played({"t-0": [1.0, 0.0], "t-1": [1.0, None], "t-2": [1.0]}))
    other = folder("b", played({"t-0": [0.0, None], "t-1": [1.0, 0.0], "t-3": [0.0]}))
    found = comparison(base, other)
    counts = {"tasks": 2, "of_tasks": 4, "samples": 2, "of_samples": 6, "other_data": []}
    assert found["coverage"] == {**counts, "aborted": {"base": 1, "candidate": 1}}
    assert (found["reward"]["base"], found["reward"]["candidate"]) == (1.0, 0.5)
    worse = [{"task": "t-0", "base": 1.0, "candidate": 0.0}]
    assert found["changed"] == {"worse": worse, "better": []}


def test_a_task_whose_data_changed_is_left_out() -> None:
    def hashed(name: str, changed: str) -> Path:
        hashes = {"t-0": "same", "t-1": changed}
        episodes = played({"t-0": [1.0], "t-1": [1.0]})
        return folder(name, [replace(one, task_hash=hashes[one.task_id]) for one in episodes])

    base, other = hashed("a", "old"), hashed("b", "new")
    found = comparison(base, other)
    assert (found["coverage"]["tasks"], found["coverage"]["other_data"]) == (1, ["t-1"])
    assert comparison(base, other, allowed=["tasks"])["coverage"]["tasks"] == 2
    line = "\nleft out without --allow-different tasks, as their data differ: t-1\n"
    assert line in toolroll("compare", base, other).stdout


@pytest.mark.parametrize(
    ("kind", "settings", "provenance"),
    [
        ("template", {"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ("template", {}, {"template_sha256": "other"}),
        ("tokenizer", {}, {"tokenizer_sha256": "other"}),
        ("user", {"user_model": "another"}, {}),
        ("user", {"user_strategy": "react"}, {}),
        ("limits", {"max_turns": 9}, {}),
        ("benchmark", {}, {"benchmark": {"bfcl-eval": "2"}}),
        ("benchmark", {"split": "train"}, {}),
        ("seed", {"seed": 1}, {}),
        ("model", {}, {"tokenizer_sha256": "other", "template_sha256": "other"}),
    ],
)
def test_runs_that_differ_elsewhere_are_refused(kind: str, settings: Any, provenance: Any) -> None:
    base = folder("a", many(4, 2))
    other = folder("b", many(4, 2), provenance=provenance, **settings)
    with pytest.raises(UsageError, match=f"To allow it: --allow-different {kind}$") as refused:
        comparison(base, other)
    assert f"{kind}: {kind}:" not in str(refused.value)
    named = [line.partition(":")[0] for line in comparison(base, other, allowed=[kind])["settings"]]
    assert sorted(named) == sorted({**settings, **provenance})


@pytest.mark.parametrize("allowed", [[], ["benchmark"]])
@pytest.mark.parametrize(
    ("ids", "problem", "pairs"),
    [
        ("t", "the tasks of the same names have other data", 1),
        ("h", "the runs have no task in common", 0),
    ],
)
def test_runs_of_other_tasks_are_told_what_to_play(
    ids: str, problem: str, pairs: int, allowed: list[str]
) -> None:
    """The names of other tasks may be the same by chance."""
    base = folder("a b", [replace(one, task_hash="test") for one in many(4, 2)], split="test")
    others = [replace(one, task_hash="held-out") for one in played({f"{ids}-0": [1.0]})]
    other = folder("b", others, split="held-out", model="new")
    with pytest.raises(UsageError) as refused:
        comparison(base, other, allowed=allowed)
    assert str(refused.value).splitlines() == [
        f"pond: {problem}:",
        "  baseline, a b: split test, 4 tasks, such as t-0",
        f"  candidate, b: split held-out, 1 task, such as {ids}-0",
        "Play the baseline's tasks with the candidate's model, and with its settings that differ, "
        "and compare this:",
        "  toolroll run pond --from 'a b' --model new --out FOLDER",
        *[
            "To compare the tasks of the same names nevertheless: --allow-different tasks "
            "--allow-different benchmark"
        ]
        * bool(pairs),
    ]
    if pairs:
        found = comparison(base, other, allowed=["tasks", "benchmark"])
        assert found["coverage"]["tasks"] == pairs


def test_another_model_is_what_is_compared() -> None:
    base = folder("a", many(4, 2))
    other = folder("b", many(4, 2), model="other", top_p=0.5, processes=2)
    assert comparison(base, other)["settings"] == [
        'model: baseline "tiny", candidate "other"',
        "top_p: baseline not set, candidate 0.5",
    ]


def test_a_limit_that_the_context_left_is_no_setting() -> None:
    """Of sessions, whose requests have a limit of their own or none."""

    def played_with(limits: Iterable[int]) -> list[Episode]:
        part = trajectory()
        turns = [
            replace(turn, sampling_params={"max_new_tokens": limit})
            for turn, limit in zip(part.turns, limits, strict=True)
        ]
        return [episode(trajectories=[replace(part, turns=tuple(turns))])]

    starts = [turn.start for turn in trajectory().turns]
    left = [100 - start for start in starts]
    runs = {"none": left, "own": [50, 50], "cut": [95, left[1]]}
    facts = {
        name: read_runs(folder(name, played_with(limits)))["pond"].facts
        for name, limits in runs.items()
    }
    assert {name: fact.get("max_new_tokens") for name, fact in facts.items()} == {
        "none": None,
        "own": 50,
        "cut": 95,
    }


def test_other_seeds_are_paired_only_if_that_is_allowed() -> None:
    base = folder("a", many(4, 2))
    other = folder("b", [replace(one, seed=one.seed + 1) for one in many(4, 2)])
    with pytest.raises(UsageError, match="no graded sample in common"):
        comparison(base, other)
    assert comparison(base, other, allowed=["seed"])["coverage"]["samples"] == 4


def test_sessions_which_have_no_seeds_are_paired_by_number() -> None:
    runs = [
        folder(name, [replace(one, seed=0) for one in played({"s": samples})])
        for name, samples in (("a", [1.0, 0.0, 1.0]), ("b", [0.0, 0.0]))
    ]
    found = comparison(*runs)
    assert (found["coverage"]["samples"], found["coverage"]["of_samples"]) == (2, 3)
    assert (found["reward"]["base"], found["reward"]["candidate"]) == (0.5, 0.0)


# --- the numbers ----------------------------------------------------------------------------------


def test_pass_hat_k_is_compared_where_a_task_has_k_pairs() -> None:
    base = folder("a", played({"t-0": [1, 1, 0], "t-1": [1, 1]}))
    other = folder("b", played({"t-0": [1, 0, 0], "t-1": [1, 1]}))
    found = comparison(base, other)
    expected = {"1": (5 / 6, 4 / 6, 2), "2": (2 / 3, 1 / 2, 2), "3": (0, 0, 1)}
    assert found["pass^k"].keys() == expected.keys()
    for k, part in found["pass^k"].items():
        assert (part["base"], part["candidate"], part["tasks"]) == pytest.approx(expected[k])
    assert found["mcnemar"] is None


def test_no_interval_has_the_width_zero_or_an_impossible_end() -> None:
    for passes in (0, 20):
        base = folder(f"a{passes}", many(20, passes))
        found = comparison(base, base)["reward"]
        assert found["difference"] == 0.0
        assert found["high"] == -found["low"] == pytest.approx(2.093 / 380**0.5, rel=1e-3)
    base = folder("a", played({"t-0": [-2.0], "t-1": [2.0]}))
    found = comparison(base, base)
    assert (found["reward"]["low"], found["reward"]["high"]) == (-4.0, 4.0)
    assert (found["pass^k"]["1"]["low"], found["pass^k"]["1"]["high"]) == (-1.0, 1.0)


def test_mcnemars_test_holms_correction_and_the_power_are_exact() -> None:
    """The values of McNemar's test are those of scipy.stats.binomtest(worse, worse + better)."""
    exact = [mcnemar(*pair) for pair in [(0, 0), (1, 9), (9, 1), (3, 5), (40, 60)]]
    assert exact == pytest.approx([1.0, 0.021484375, 0.021484375, 0.7265625, 0.05688793364])
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # it keeps the order
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    difference = Difference.of([(0.0, 1.0)] * 6 + [(1.0, 0.0)] * 4 + [(0.0, 0.0)] * 90)
    assert difference.power(difference.detectable) == pytest.approx(0.8, abs=1e-3)
    assert difference.tasks_for(difference.detectable / 2) == pytest.approx(400, abs=1)
    assert difference.power(0.0) == pytest.approx(0.05, abs=0.003)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "status", "verdict"),
    [(100, 0, "no worse"), (99, 0, "no worse"), (97, 4, "inconclusive"), (60, 3, "worse")],
)
def test_a_gate_has_three_exit_statuses(passes: int, status: int, verdict: str) -> None:
    base, other = folder("a", many(100, 100)), folder("b", many(100, passes))
    result = toolroll("compare", base, other, "--fail-if-worse", 0.05)
    assert (result.exit_code, verdict in result.stdout) == (status, True), result.stdout
    assert " if it fell by 0.05)\n" in result.stdout
    assert ("as if one task alone had changed" in result.stdout) == (passes >= 99)
    assert "--fail-if-worse 0.05 needs" not in result.stdout, "100 tasks are enough"
    assert toolroll("compare", base, other).exit_code == 0


def test_a_gate_is_open_while_a_run_is_not_finished() -> None:
    base = folder("a", many(100, 100))
    planned = [(f"t-{task}", 0) for task in range(100)]
    for played, status in ((90, 4), (100, 0)):
        with RunDirectory(Path("b"), "pond", SETTINGS, planned=planned) as run:
            for one in many(100, 100)[len(run.done) : played]:
                run.append(one)
        result = toolroll("compare", base, "b", "--fail-if-worse", 0.05)
        line = "WARNING: candidate: the run is not finished: 90 of 100 episodes"
        assert (result.exit_code, line in result.stdout) == (status, status == 4)
        assert ("\ninconclusive: a run is not finished\n" in result.stdout) == (status == 4)
        assert toolroll("compare", base, "b").exit_code == 0
    file = Path("b/episodes.jsonl")
    file.write_bytes(b"{" + file.read_bytes())  # one line of the finished run is damaged
    result = toolroll("compare", base, "b", "--fail-if-worse", 0.05)
    assert result.exit_code == 4 and "not finished: 99 of 100 episodes" in result.stdout


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_gate_says_how_many_tasks_it_needs(candidates: int) -> None:
    """Nothing changed: it passes with that many tasks, and not with one less."""
    needed = {1: 41, 3: 51}[candidates]
    for count, status in ((needed - 1, 4), (needed, 0)):
        base = folder(str(count), many(count, count))
        arguments = ("compare", base, *[base] * candidates, "--fail-if-worse", 0.05)
        result = toolroll(*arguments)
        assert result.exit_code == status
        line = f"--fail-if-worse 0.05 needs at least {needed} tasks, even if nothing changed"
        assert (line in result.stdout) == (status == 4)
        compared = json.loads(toolroll(*arguments, "--json").stdout)["comparisons"]
        assert [found["gate"] for found in compared] == [
            {"loss": 0.05, "tasks_if_unchanged": needed, "open": False}
        ] * candidates
    zero = toolroll("compare", base, base, "--fail-if-worse", 0).stdout
    assert "--fail-if-worse 0 cannot pass if nothing changed" in zero


def test_an_improvement_and_too_few_tasks_are_told() -> None:
    base, other = folder("a", many(40, 5)), folder("b", many(40, 30))
    assert ": better" in toolroll("compare", base, other, "--fail-if-worse", 0.02).stdout
    few = folder("few", many(3, 2))
    assert "so few tasks can show no difference" in toolroll("compare", few, few).stdout


def test_several_candidates_are_corrected() -> None:
    base, worse = folder("a", many(100, 50)), folder("b", many(100, 45))
    alone = compare(read_runs(base), [read_runs(worse)], Question())
    both = compare(read_runs(base), [read_runs(run) for run in (worse, base, base)], Question())
    verdicts = [found["verdict"] for found in (*alone, *both)]
    assert verdicts == ["worse", *["inconclusive"] * 3]
    assert both[0]["reward"]["p_holm"] == pytest.approx(3 * alone[0]["reward"]["p"])


def test_the_table_and_the_markdown_have_the_same_rows() -> None:
    base, other = folder("a", many(40, 20)), folder("b", many(40, 21, start=1), top_p=0.5)
    options = ["--margin", "0.5", "--power-for", "0.03"]
    table = toolroll("compare", base, other, *options).stdout
    text = toolroll("compare", base, other, *options, "--markdown").stdout
    for words in (
        f"pond: baseline {base}, candidate {other}: inconclusive",
        "candidate: model tiny, temperature 1.0, top_p 0.5",
        "+0.025 [",
        "compared: 40 of 40 tasks, 40 of 40 samples",
        "only in the baseline: 1, only in the candidate: 2 (McNemar's exact test: p = 1.000)",
        "shown to differ by less than 0.5",
        "would be found in 80% of such comparisons\n",
        "a true difference of 0.03 would be found in ",
        "the mean reward may have changed, or not (p = 0.",
        "worse in 1 task: t-0 1.00 -> 0.00",
        "better in 2 tasks: t-20 0.00 -> 1.00, t-21 0.00 -> 1.00",
        "also different: top_p: baseline not set, candidate 0.5",
    ):
        assert words in table and words in text, words
    found, asked = (line for line in table.splitlines() if line.startswith("a true difference"))
    assert "in 80% with" in asked and table.index(found) + len(found) + 1 == table.index(asked)
    assert "---" not in table and "---" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {5}


def test_the_page_has_the_whole_output() -> None:
    """Two runs of 40 tasks: the rewards of three tasks differ."""
    before = {f"t-{task:02}": [float(task < 25), float(task < 20)] for task in range(40)}
    names = "turns prompt_tokens completion_tokens tool_calls invalid_calls tool_errors seconds"
    numbers = (
        (6.4, 9120.0, 412.0, 4.15, 0.125, 0.3, 23.25),
        (6.2, 8904.0, 398.0, 4.1, 0.05, 0.275, 22.5),
    )
    metrics = [dict(zip(map(str, names.split()), side, strict=True)) for side in numbers]
    sampling: dict[str, Any] = {"temperature": 0.6, "max_new_tokens": 32768, "split": "test"}
    folder("out/base", played(before, metrics[0]), model="Qwen/Qwen3-8B", **sampling)
    changes = {"t-04": [0.0, 0.0], "t-07": [1.0, 0.0], "t-31": [1.0, 0.0]}
    after = played(before | changes, metrics[1])
    folder("out/new", after, model="out/checkpoint", **sampling)
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    command, output = re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    found = toolroll(*command.splitlines()[-1].split()[1:])
    assert found.stdout.strip() == output.strip().replace("desk: ", "pond: ", 1)


def test_numbers_have_no_exponent_and_there_is_no_negative_zero() -> None:
    metrics = {"prompt_tokens": 58_540.4, "turns": 8.596, "invalid_calls": 0.5, "user_cost": 0.0012}
    base = folder("a", played({"t-0": [1.0], "t-1": [1.0]}, metrics))
    table = toolroll("compare", base, base).stdout
    shown = [line.split("|")[1].strip() for line in table.splitlines()[5:10]]
    assert shown == ["8.60", "58,540", "0.50", "0.0012", "0"]
    base = folder("b", many(4, 2))
    for options in ([], ["--fail-if-worse", 0]):
        assert "-0.0," not in toolroll("compare", base, base, "--json", *options).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a"], "give at least two folders"),
        (["a", "empty"], "holds no episodes.jsonl"),
        (["a", "lake"], "no environment in common: pond; lake\n.* pond --from a --model MODEL"),
        (["a", "a", "--allow-different", "sampling"], "the names are template, tokenizer, user"),
        *(
            (["a", "a", option, "2"], f"{option} is 2, in rewards, .* differ by at most 1")
            for option in ("--fail-if-worse", "--margin", "--power-for")
        ),
    ],
)
def test_what_cannot_be_compared_is_named(arguments: list[str], words: str) -> None:
    folder("a", many(2, 1), split="test")
    Path("empty").mkdir()
    with RunDirectory(Path("lake"), "lake", SETTINGS) as run:
        run.append(episode(env="lake"))
    with pytest.raises(UsageError, match=f"(?s){words}"):
        toolroll("compare", *arguments)


def test_what_is_missing_is_named_after_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "toolroll" in name and "compare" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UsageError, match="give at least two folders"):
        toolroll("compare", "a")
    with pytest.raises(UsageError, match=r'pip install -e "\.\[compare\]"$'):
        toolroll("compare", "a", "a")


def test_a_p_value_near_the_level_has_a_fourth_decimal() -> None:
    shown = [_p(value) for value in (0.0502, 0.5, 0.0005)]
    assert shown == ["p = 0.0502", "p = 0.500", "p < 0.001"]


# --- the interval: how often it holds the true difference -----------------------------------------


Array = npt.NDArray[np.float64]
_TASKS = 20_000


@dataclass(frozen=True)
class Population:
    """The pass rates of all tasks with two models. Their means differ by exactly `difference`, and
    those of a task by an amount of its own.
    """

    before: Array
    after: Array
    difference: float

    @classmethod
    def of(cls, mean: float, difference: float) -> Population:
        rng = np.random.default_rng(5)
        before = rng.beta(2 * mean, 2 * (1 - mean), _TASKS).clip(1e-4, 1 - 1e-4)
        logits = np.log(before / (1 - before)) + 0.5 * rng.standard_normal(_TASKS)
        low, high = -10.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            gained = (1 / (1 + np.exp(-logits - middle)) - before).mean()
            low, high = (middle, high) if gained < difference else (low, middle)
        after = 1 / (1 + np.exp(-logits - low))
        return cls(before, after, float((after - before).mean()))

    def play(self, tasks: int, samples: int, rng: np.random.Generator) -> Array:
        """The changes of the mean rewards of `tasks` tasks with `samples` samples each."""
        chosen = rng.integers(0, _TASKS, tasks)
        passes = [rng.binomial(samples, rates[chosen]) for rates in (self.before, self.after)]
        changes: Array = (passes[1] - passes[0]) / samples
        return changes


def rates(
    population: Population, tasks: int, samples: int, pairs: int
) -> tuple[float, float, float]:
    """The shares of `pairs` simulated pairs of benchmarks whose interval contains the difference,
    and does not contain 0, and the mean of the stated powers.
    """
    rng = np.random.default_rng(11)
    covered, seen, powers = 0, 0, []
    for _ in range(pairs):
        changes = population.play(tasks, samples, rng)
        difference = Difference.of([(0.0, change) for change in changes.tolist()])
        low, high = difference.interval()
        covered += low <= population.difference <= high
        seen += not low <= 0 <= high
        powers.append(difference.power(population.difference))
    return covered / pairs, seen / pairs, float(np.mean(powers))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("difference", [0.0, 0.03, 0.1])
def test_the_interval_covers_and_sees_as_often_as_it_says(samples: int, difference: float) -> None:
    covered, seen, power = rates(Population.of(0.5, difference), 100, samples, 800)
    assert 0.93 <= covered <= 0.97
    if difference:
        assert seen == pytest.approx(power, abs=0.03)
    else:
        assert seen <= 0.06  # 0.05, and what chance adds to it


@pytest.mark.parametrize("samples", [1, 4])
def test_the_interval_holds_where_almost_every_task_passes(samples: int) -> None:
    """The percentile bootstrap over tasks covers less than 0.92 here."""
    covered, _, _ = rates(Population.of(0.97, 0.02), 33, samples, 200)
    assert covered >= 0.95
