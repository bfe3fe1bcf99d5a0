"""summary.json: every number in it, from episodes made by hand. pass@k and pass^k: against
enumeration, tau-bench's numbers, and a simulation.
"""

import json
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.results import episode, summary_of, trajectory

from toolroll import Episode, StopReason, Trajectory, Turn
from toolroll.cli.display import results_table
from toolroll.evaluation.report import by_task, report, write_summary
from toolroll.evaluation.viewer.data import row
from toolroll.rollout.runs.pass_at_k import (
    mean_over_tasks,
    pass_at_k,
    pass_bounds,
    pass_estimates,
    pass_hat_k,
    passed,
)
from toolroll.rollout.runs.summary import Summary, recomputed_tokens


def reported(*episodes: Episode, **options: Any) -> dict[str, Any]:
    return report(summary_of(*episodes), **options)


def drawn(found: Any, columns: int) -> str:
    """The table of a terminal with 80 columns."""
    console = Console(width=80)
    with console.capture() as capture:
        parts = {f"pond-{number}": found | {"seconds": 1.0} for number in range(columns)}
        console.print(results_table(parts))
    return capture.get()


def metrics(**named: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in named.items()}
    return {"turns": 2.0, "seconds": 4.0} | named


def test_aborted_episodes_count_in_no_rate_and_are_told() -> None:
    found = reported(
        episode("t-2", 0, 1.0),
        episode("t-10", 1, 0.0),
        episode("t-10", 0, 1.0),
        episode("t-2", 1, 0.0, reason=StopReason.MAX_TURNS),
        episode("t-3", 0, reason=StopReason.ENGINE_ERROR),
        episode("t-2", 2, reason=StopReason.USER_ERROR),
    )
    assert (found["episodes"], found["graded"], found["aborted"], found["tasks"]) == (6, 4, 2, 2)
    assert found["reward"]["value"] == found["pass@k"]["1"]["value"] == 0.5
    assert (found["pass^k"]["2"]["value"], found["pass@k"]["2"]["value"]) == (0.0, 1.0)
    assert list(found["by_task"].items()) == [
        ("t-2", {"rewards": [1.0, 0.0], "aborted": 1}),
        ("t-3", {"rewards": [], "aborted": 1}),
        ("t-10", {"rewards": [1.0, 0.0], "aborted": 0}),
    ], "in the order in which people count"
    assert found["stop_reasons"] == {"done": 3, "engine_error": 1, "max_turns": 1, "user_error": 1}
    assert found["warnings"] == [
        "2 of 6 episodes were aborted and excluded from rewards: engine_error 1, user_error 1",
        "tasks without a graded episode, in neither pass^k nor pass@k (1): t-3",
    ]


def test_reruns_and_failed_calls_of_close_are_told() -> None:
    twice, once = (episode(f"t-{n}", metrics=metrics(reruns=n, close_errors=n - 1)) for n in (2, 1))
    found = reported(twice, once)
    assert (found["reruns"], found["environment_errors"]) == (3, {"metrics": 0, "close": 1})
    retried, failed = sorted(found["warnings"])
    assert retried.startswith(
        "attempts that failed outside the model (engine, environment, user, time limit) and were "
        "retried: 3 (each was logged)."
    )
    assert failed.startswith("calls of an environment's metrics or close that failed: 1;")


@pytest.mark.parametrize(
    ("lost", "bounds", "cell"),
    [
        ((), None, "(10 tasks)"),
        ((5, 6, 7), (0.5, 0.8), "(7 of 10 tasks)"),
        ((5, 6, 7, 8, 9), (0.5, 1.0), "(5 of 10 tasks)"),
    ],
)
def test_lost_tasks_are_part_of_every_rate(lost: Any, bounds: Any, cell: str) -> None:
    """Tasks 0 to 4 always pass, tasks 5 to 9 never. A failing environment loses whole tasks."""
    failed, done = StopReason.ENVIRONMENT_ERROR, StopReason.DONE
    played = [
        episode(f"t-{task}", sample, float(task < 5), reason=failed if task in lost else done)
        for task in range(10)
        for sample in range(4)
        if not (task in lost and sample % 2)  # these were not even played
    ]
    found = report(summary_of(*played), planned={f"t-{task}": 4 for task in range(10)})
    covered = 10 - len(lost)
    assert set(found["by_task"]) == {f"t-{task}" for task in range(10)}
    share = {"of_episodes": 40, "share": len(lost) / 10}
    assert found["lost"] == {"episodes": 4 * len(lost), "tasks": len(lost), **share}
    for value in (found["reward"], found["pass@k"]["1"], found["pass^k"]["4"]):
        assert value["value"] == pytest.approx(5 / covered)
        assert (value["tasks"], value["of_tasks"]) == (covered, 10)
    for k in "1234":
        pair = found["pass_bounds"] and tuple(found["pass_bounds"]["pass^k"][k])
        assert pair == (None if bounds is None else pytest.approx(bounds))
    for columns in (1, 2):
        text = drawn(found, columns)
        assert text.count(cell) == columns * 6  # the reward, and the rates for k = 1, 2, 4
        assert max(map(len, text.splitlines())) <= 80


def test_unequal_samples_leave_the_rates_out_with_the_reason() -> None:
    summary = summary_of(episode("t-0", 0), episode("t-0", 1), episode("t-1", 0, 0.0))
    found = report(summary)
    assert found["pass@k"] is found["pass^k"] is None
    assert found["reward"]["value"] == 0.5
    words = "no pass@k and no pass^k: tasks have between 1 and 2 graded samples (1 of 2 have fewer "
    assert words in found["warnings"][0]
    rates = report(summary, allow_unequal=True)["pass^k"]
    assert (list(rates), rates["1"]["value"]) == (["1"], 0.5)


def test_calls_and_errors() -> None:
    numbers = metrics(
        tool_calls=8, invalid_calls=2, invalid_calls__invalid_json=1,
        invalid_calls__unknown_tool=1, lookalike_calls=3, executed_calls__find=4,
        executed_calls__book=2, tool_errors=1, tool_errors__book=1,
    )  # fmt: skip
    found = reported(episode(metrics=numbers))
    book = {"calls": 2, "errors": 1, "error_rate": 0.5}
    find = {"calls": 4, "errors": 0, "error_rate": 0.0}
    assert found["tool_calls"] == {"attempted": 8, "by_tool": {"book": book, "find": find}}
    assert found["lookalike_calls"] == 3
    kinds = {key: {"count": 1, "rate": 0.125} for key in ("invalid_json", "unknown_tool")}
    assert found["invalid_calls"] == {"total": 2, "rate": 0.25, "by_kind": kinds}
    found = reported(episode(metrics=metrics(executed_calls__find=4, tool_errors=3)))
    unknown = {"calls": 4, "errors": None, "error_rate": None}  # none is made up
    assert found["tool_calls"]["by_tool"] == {"find": unknown}


def test_tokens_and_times() -> None:
    numbers = metrics(
        prompt_tokens=100, cached_tokens=75, completion_tokens=20, trained_tokens=18,
        env_seconds=1.5, user_seconds=1.0, user_calls=4,
        user_prompt_tokens=50, user_completion_tokens=9, user_retries=1, user_errors=0,
    )  # fmt: skip
    found = reported(episode(metrics=numbers), episode(sample=1, metrics=numbers), seconds=3.5)
    assert (found["turns"], found["seconds"]) == ({"total": 4, "mean": 2.0}, 3.5)
    totals = {"prompt": 200, "completion": 40, "trained": 36}
    tokens = {name: {"total": total, "mean": total / 2} for name, total in totals.items()}
    assert found["tokens"] == {**tokens, "delivered": 0.9, "cached_share": 0.75}
    latency = found["latency"]
    assert (latency["engine_turn"]["mean"], latency["engine_turn"]["p50"]) == (1.0, 1.0)
    per_step = pytest.approx(1.0 / 6)  # two steps and the reset, without the user
    assert latency["env_step_mean"] == per_step
    assert (latency["user_call_mean"], latency["episode_mean"]) == (0.25, 4.0)
    names = ("calls", "prompt_tokens", "completion_tokens", "retries", "errors")
    assert found["user_simulator"] == dict(zip(names, (8, 100, 18, 2, 0), strict=True))


def test_a_prefix_that_sequences_share_counts_once_in_the_trie() -> None:
    def ids(*tokens: int) -> Trajectory:
        made = trajectory(len(tokens), [(1, 2)])
        return replace(made, input_ids=np.array(tokens, np.int32))

    forked = [ids(1, 2, 3, 4), ids(1, 2, 5), ids(1, 2, 3, 4, 6), ids(1, 2, 5, 7)]
    played = [
        episode(trajectories=forked),
        episode(sample=1, reward=0.0, trajectories=[ids(1, 2)]),
        episode(sample=2, reason=StopReason.ENGINE_ERROR, trajectories=[ids(1, 2, 3)]),
    ]
    found = report(summary_of(*played))["prefix_trie"]
    assert found == {"flat_tokens": 18, "trie_tokens": 9, "ratio": 2.0}
    assert reported(episode(trajectories=[]))["prefix_trie"]["ratio"] is None


def test_a_forks_history_is_counted_once() -> None:
    whole = trajectory()
    fork = trajectory(fork_reason="rewritten")
    fork = replace(fork, turns=(replace(fork.turns[0], excluded="context"), fork.turns[1]))
    assert summary_of(episode(trajectories=[whole, fork])).turn_seconds == [0.5, 1.5, 1.5]


def test_the_floor_the_end_and_the_baseline() -> None:
    lost = episode("t-2", reason=StopReason.ENVIRONMENT_ERROR)
    found = report(
        summary_of(episode(info={"trainable": False}, trajectories=[])),
        floor=summary_of(episode(), episode("t-1", reward=0.0), lost),
        planned={f"t-{task}": 1 for task in range(5)},
        settings={"seed": 1},
    )
    rates = {"pass_rate": 0.5, "reward_mean": 0.5}
    assert found["do_nothing"] == {"episodes": 3, "passed": 1, "aborted": 1, **rates}
    assert found["trainable"] is False
    assert found["settings"] == {"seed": 1}
    assert found["warnings"][0] == "the run is not finished: 1 of 5 episodes"
    assert "nothing can be trained on" in found["warnings"][1]


def test_nothing_at_all() -> None:
    found = report(Summary("pond"), planned={"t-0": 3})
    assert (found["reward"], found["pass@k"]) == (None, None)
    assert found["by_task"] == {"t-0": {"rewards": [], "aborted": 0}}
    assert found["lost"] == {"episodes": 3, "of_episodes": 3, "share": 1.0, "tasks": 1}
    json.dumps(found)


def test_the_file_keeps_other_environments(tmp_path: Path) -> None:
    write_summary(tmp_path, {"pond": reported(episode())})
    path = write_summary(tmp_path, {"lake": report(Summary("lake"))})
    data = json.loads(path.read_text())
    assert sorted(data["environments"]) == ["lake", "pond"]
    interval = {"value": 1.0, "low": pytest.approx(0.025), "high": 1.0}
    assert data["environments"]["pond"]["reward"] == {**interval, "tasks": 1, "of_tasks": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["summary.json"]


def test_the_ids_of_tasks_may_hold_any_digits() -> None:
    """ "²" and "٣" are digits for Python, but `int` reads only the second."""
    names = ["t10", "t9", "t²", "t٣", "2", "", "t"]
    found = by_task(summary_of(*(episode(name) for name in names)), names)
    assert list(found) == ["", "2", "t", "t٣", "t9", "t10", "t²"]


def test_tokens_that_the_engine_computed_again() -> None:
    """The last token of a turn is computed with the next turn; a repeated turn counts once."""
    first = Turn(10, 15, "stop", prompt_tokens=10)
    kept = Turn(20, 25, "stop", prompt_tokens=20, cached_tokens=14)
    dropped = Turn(30, 35, "stop", prompt_tokens=30, cached_tokens=4)
    whole = replace(trajectory(), turns=(first, kept, dropped))
    assert recomputed_tokens([whole]) == 24 - 4
    context = replace(dropped, excluded="context")
    fork = replace(whole, turns=(first, kept, context, replace(kept, start=40, stop=45)))
    assert recomputed_tokens([whole, fork]) == 20 + (34 - 14)


# --- pass@k and pass^k ----------------------------------------------------------------------------


rewards_of_tasks = st.integers(1, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n), min_size=1, max_size=6
    )
)


@given(rewards=rewards_of_tasks, data=st.data())
def test_they_are_shares_of_all_choices(rewards: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards[0])))
    choices = [[[r == 1.0 for r in chosen] for chosen in combinations(task, k)] for task in rewards]
    for found, rule in ((pass_hat_k(rewards, k), all), (pass_at_k(rewards, k), any)):
        expected = sum(sum(map(rule, task)) / len(task) for task in choices) / len(choices)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_intervals_hold_the_truth_as_often_as_they_say(k: int) -> None:
    """The success rates of tasks are Beta(2, 1): pass^k is E[p^k] = 2 / (2 + k)."""
    rng = np.random.default_rng(5)
    truth = 2 / (2 + k)
    inside, values = 0, []
    for _ in range(400):
        chances = rng.beta(2, 1, size=60)
        rewards = {f"t{i}": list((rng.random(8) < p).astype(float)) for i, p in enumerate(chances)}
        estimate = mean_over_tasks([comb(int(sum(r)), k) / comb(8, k) for r in rewards.values()])
        assert estimate.value == pytest.approx(pass_hat_k(list(rewards.values()), k))
        values.append(estimate.value)
        inside += estimate.low <= truth <= estimate.high
    assert np.mean(values) == pytest.approx(truth, abs=3 * np.std(values) / 20), "without bias"  # type: ignore[arg-type]
    assert 0.92 <= inside / 400 <= 0.98, "95 % of them"


@pytest.mark.parametrize(
    ("value", "tasks", "low", "high"),
    [
        *((0, 10, 0, 0.3085), (1, 3, 0.2924, 1), (1, 100, 0.9638, 1), (0.5, 1, 0.0125, 0.9875)),
        (7, 2, 1.1068, 7),
    ],
)
def test_equal_values_leave_room(value: float, tasks: int, low: float, high: float) -> None:
    """Clopper and Pearson, for 0 and 1 (scipy.stats.binomtest gives the same). With rewards outside
    of 0 to 1, another task may have any reward from 0.
    """
    estimate = mean_over_tasks([value] * tasks)
    interval = (estimate.value, estimate.low, estimate.high)
    assert interval == pytest.approx((value, low, high), abs=1e-4)


@pytest.mark.parametrize("tasks", [5, 11, 12, 60])
def test_intervals_are_those_of_agresti_and_coull(tasks: int) -> None:
    """With rewards of 0 and 1: those of `tasks - 1` tasks, because the variance is an estimate."""
    passes, t = tasks // 2 + 1, scipy.stats.t.ppf(0.975, tasks - 1)
    share = (passes / tasks * (tasks - 1) + t**2 / 2) / (tasks - 1 + t**2)
    width = t * (share * (1 - share) / (tasks - 1 + t**2)) ** 0.5
    for bottom, scale in ((0.0, 1.0), (-1.0, 3.0)):
        values = [bottom + scale] * passes + [bottom] * (tasks - passes)
        estimate = mean_over_tasks(values)
        expected = [bottom + scale * (share + sign * width) for sign in (-1, 1)]
        assert (estimate.low, estimate.high) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("tasks", [20, 50, 100])
def test_intervals_hold_shares_near_0_and_1(tasks: int) -> None:
    """Exact: the sum over all numbers of passes whose interval has the share."""
    estimates = [mean_over_tasks([1.0] * n + [0.0] * (tasks - n)) for n in range(tasks + 1)]
    for share in np.arange(0.02, 0.981, 0.01):
        chances = scipy.stats.binom.pmf(range(tasks + 1), tasks, share)
        inside = [estimate.low <= share <= estimate.high for estimate in estimates]
        assert chances @ inside >= 0.935


@pytest.mark.parametrize("tasks", [2, 3, 5, 20, 100])
def test_a_worse_result_has_lower_bounds(tasks: int) -> None:
    estimates = [mean_over_tasks([1.0] * n + [0.0] * (tasks - n)) for n in range(tasks + 1)]
    for name in ("low", "high"):
        bounds = [getattr(estimate, name) for estimate in estimates]
        assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("reward", "passes"),
    [
        *((reward, True) for reward in (1.0, 0.9999995, 1.0000005)),
        *((reward, False) for reward in (1.1, 2.5, 0.99, -1.0)),
    ],
)
def test_a_pass_is_a_reward_of_1_in_every_number(reward: float, passes: bool) -> None:
    """tau-bench's rule has a margin in both directions."""
    played = episode(reward=reward)
    found = report(summary_of(played))
    assert passed(reward) is passes
    assert pass_hat_k([[reward]], 1) == pass_at_k([[reward]], 1) == float(passes)
    assert summary_of(played).pass_rate == float(passes)
    assert found["pass@k"]["1"]["value"] == found["pass^k"]["1"]["value"] == float(passes)
    assert row(played)["passed"] is passes
    outside = not 0 <= reward <= 1 and not passes
    assert any("outside [0, 1]" in line for line in found["warnings"]) is outside


def test_bounds_count_missing_samples_as_failed_and_as_passed() -> None:
    graded = {"a": [1.0, 1.0, 0.0], "b": [1.0]}
    bounds = pass_bounds(graded, {"a": 3, "b": 3, "c": 3})
    assert set(bounds["pass^k"]) == set(bounds["pass@k"]) == {1, 2, 3}
    for k in (1, 2, 3):
        for at, missing in enumerate((0.0, 1.0)):
            whole = [(graded.get(task, []) + [missing] * 3)[:3] for task in "abc"]
            assert bounds["pass^k"][k][at] == pytest.approx(pass_hat_k(whole, k))
            assert bounds["pass@k"][k][at] == pytest.approx(pass_at_k(whole, k))


def test_nothing_and_a_k_too_large_have_no_rate() -> None:
    with pytest.raises(ValueError, match="no task is graded"):
        pass_estimates({"a": []})
    with pytest.raises(ValueError, match="k = 3 needs at least 3"):
        pass_hat_k([[1.0, 1.0]], 3)


def test_pass_hat_k_of_tau_benchs_trials_is_what_it_prints() -> None:
    """gpt-4o's passes in the airline tasks, and what `display_metrics` prints for them."""
    passes = "01100111000142021140430040220122003443413241222144"
    rewards = [[1.0] * int(count) + [0.0] * (4 - int(count)) for count in passes]
    assert [round(pass_hat_k(rewards, k), 3) for k in (1, 2, 3, 4)] == [0.42, 0.273, 0.22, 0.2]
