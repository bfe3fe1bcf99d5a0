"""What a run shows while it goes on: a bar in a terminal, lines elsewhere."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.results import episode

from toolroll import StopReason, Summary
from toolroll.cli import display
from toolroll.cli.display import RunDisplay, print_line, program, remarks, show_environments
from toolroll.evaluation.report import report
from toolroll.rollout.runs.registry import environment_names, find_environment


def shown(name: str = "pond", *, earlier: int = 0, total: int = 40, **terminal: Any) -> str:
    """The output of a run of `total` episodes, `earlier` of which were played before."""
    out, summary = io.StringIO(), Summary(name)
    for sample in range(earlier):
        summary.add(episode(sample=sample))
    console = Console(file=out, **{"width": 160, **terminal})
    with RunDisplay(console, summary, total) as display:
        for sample in range(earlier, total):
            metrics = {"completion_tokens": 1e4, "turns": 3.0}
            found = episode(sample=sample, reward=float(sample % 2), metrics=metrics)
            summary.add(found)
            display.show(found)
    return out.getvalue()


@pytest.mark.parametrize(("minutes", "count"), [(1 / 3, 1), (5, 10), (600, 50)])
def test_lines_in_no_terminal(monkeypatch: pytest.MonkeyPatch, minutes: float, count: int) -> None:
    """They are few, however long the run is and however many episodes it has."""
    clock = SimpleNamespace(now=0.0)

    def later() -> float:
        clock.now += minutes * 60 / 1000  # once per episode
        return clock.now

    monkeypatch.setattr(display, "time", SimpleNamespace(perf_counter=later))
    lines = shown(total=1000).splitlines()
    assert abs(len(lines) - count) <= 2
    assert lines[-1].startswith("pond: 1000/1000  reward 0.500  ")
    assert all(words in lines[-1] for words in ("episodes/s", "tok/s", "0:00 left"))
    for line in lines:  # an estimate when 5 % have ended
        ended, left = int(line[6:].partition("/")[0]), line.partition("tok/s  ")[2]
        assert bool(left) == (ended >= 50)


@pytest.mark.parametrize("earlier", [39, 40])
def test_a_run_that_goes_on_counts_what_is_there(earlier: int) -> None:
    lines = shown(earlier=earlier).splitlines()
    assert [line[:12] for line in lines] == ["pond: 40/40 "] * (40 - earlier)


def test_what_a_model_wrote_does_not_control_the_terminal() -> None:
    out = io.StringIO()
    print_line(Console(file=out, force_terminal=True), "Hi\x1b]0;owned\x07\x9b2J\r [b]é\nend")
    assert out.getvalue() == "Hi?]0;owned??2J? [b]é\nend\n"


def test_remarks_say_what_a_reader_must_know() -> None:
    summary = Summary("pond")
    calls = {"tool_calls": 4.0, "invalid_calls": 2.0, "invalid_calls/unclosed": 2.0}
    summary.add(episode("t-0", metrics={**calls, "lookalike_calls": 3.0}))
    summary.add(episode("t-1", reason=StopReason.ENGINE_ERROR))
    sampling = {"temperature": 0.6, "top_p": None, "sampling_params": {"min_tokens": 2}}
    settings = {"env": "pond", "split": "test", "model": "m", **sampling}
    aborted = "1 of 2 episodes were aborted and excluded from rewards: engine_error 1"
    assert remarks("pond", report(summary, settings=settings))[:5] == [
        "pond: split test, model m, temperature 0.6, min_tokens 2",
        "pond: ended by done 1, engine_error 1",
        "pond: invalid calls: unclosed 2",
        "pond: text that looks like a tool call: 3",
        f"pond: WARNING: {aborted}",
    ]


def lines_of(text: str) -> list[str]:
    """What a terminal has shown, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()


def test_80_columns_hold_a_bar_and_the_times_with_their_names() -> None:
    name = "bfcl/multi_turn_base"
    bar, numbers = lines_of(shown(name, total=200, force_terminal=True, width=80))[-2:]
    times = r"elapsed \d:\d\d:\d\d left 0:00"
    assert re.fullmatch(rf"{name} ━{{15,}} 200/200 {times}", bar)
    rates = r"[\d,.]+ episodes/s  [\d,.]+ turns/s  [\d,]+ tok/s"
    assert re.fullmatch(rf"reward 0\.500  {rates}", numbers)


def test_the_rates_and_the_time_left_are_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out, summary = SimpleNamespace(now=100.0), io.StringIO(), Summary("pond")
    monkeypatch.setattr(display, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    sampled = (5, 50)  # by an earlier run of the same model
    summary.add(episode(sample=9))
    times = (130.0, *[145.0] * 4, 160.0, 190.0)
    with RunDisplay(Console(file=out, width=160), summary, 21, lambda: sampled) as shows:
        for sample, now in enumerate(times):
            clock.now, sampled = now, (45, 450) if now == 160.0 else (5, 50)
            found = episode(sample=sample, metrics={"turns": 3.0, "completion_tokens": 20.0})
            summary.add(found)
            shows.show(found)
    assert shows.seconds == 90.0
    assert out.getvalue().splitlines() == [
        "pond: 2/21  reward 1.000  0.0 episodes/s  0.1 turns/s  1 tok/s",
        "pond: 7/21  reward 1.000  0.1 episodes/s  0.7 turns/s  7 tok/s  2:20 left",
        "pond: 8/21  reward 1.000  0.1 episodes/s  0.2 turns/s  2 tok/s  2:47 left",
    ]


def test_80_columns_hold_the_names_of_the_environments() -> None:
    out = io.StringIO()
    factories = [find_environment(name) for name in environment_names()]
    show_environments(factories, Console(file=out, width=80))
    table = out.getvalue()[: out.getvalue().rindex("└")]
    for factory in factories:
        assert f"│ {factory.name} " in table
    assert "…" not in table


def test_the_command_is_named_as_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is found on PATH, its name is enough."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for started_as, name in (("cli/__main__.py", "toolroll"), (".venv/bin/toolroll",) * 2):
        monkeypatch.setattr("sys.argv", [started_as])
        assert program() == name
    (tmp_path / "toolroll").touch(0o755)
    assert program() == "toolroll"


def test_turns_and_tokens_are_counted_before_an_episode_ends() -> None:
    out = io.StringIO()
    sampled = (5, 50)  # by an earlier run of the same model
    console = Console(file=out, force_terminal=True, width=80)
    with RunDisplay(console, Summary("pond"), 2, lambda: sampled):
        sampled = (5 + 10**6, 50 + 10**9)
    last = lines_of(out.getvalue())[-1]
    assert re.fullmatch(r"reward -  0\.0 episodes/s  [\d,]{7,}\.\d turns/s  [\d,]{9,} tok/s", last)
