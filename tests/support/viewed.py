"""A run whose texts try to become markup, for tests of its page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.exports import a_call
from support.results import episode, trajectory

from toolroll.cli.view import view
from toolroll.evaluation.report import report, write_summary
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.run_directory import RunDirectory
from toolroll.rollout.types import StopReason

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x "
    "onerror=\"document.title='owned'\"> \u2028 <!-- & é"
)


def called(*names: str) -> list[dict[str, Any]]:
    """A conversation that calls `names` at once."""
    calls = [a_call(name, '{"at": "<b>"}', f"c{at}") for at, name in enumerate(names)]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    return [
        {"role": "user", "content": "Please look."},
        {**turn, "reasoning_content": "I shall."},
        {"role": "tool", "name": HOSTILE, "tool_call_id": "c0", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE},
    ]


def episodes() -> list[Episode]:
    """One that passed, one with a fork, one with a partial reward, one that was aborted."""
    forked = trajectory(14, [(6, 9), (10, 14)], fork_reason=f"the template rewrote {HOSTILE}")
    forked = replace(forked, turns=(replace(forked.turns[0], excluded="context"), forked.turns[1]))
    forked.loss_mask[6:9] = 0
    numbers = {"turns": 3.0, "tool_calls": 2.0, "seconds": 2.5}
    numbers |= {"invalid_calls": 1.0, "invalid_calls/invalid_json": 1.0}
    talk, sequences = called("look", "jump"), [trajectory(), forked]
    failed = {"error": {"type": "E", "message": HOSTILE}}
    aborted: Any = {"reason": StopReason.ENGINE_ERROR, "trajectories": [], "messages": []}
    return [
        episode("t-2", 0, 1.0, messages=called("look")),
        episode("t-10", 0, 0.0, messages=talk, trajectories=sequences, metrics=numbers),
        episode(f"t-{HOSTILE}", 0, 0.5),
        episode("t-3", 0, info=failed, **aborted),
    ]


def viewed_run(path: Path) -> Path:
    """Write the run and its page into `path`."""
    with RunDirectory(
        path, "pond", {"model": "embedded", "agent": "tool-calling", "note": HOSTILE}
    ) as folder:
        for found in episodes():
            folder.append(found)
        settings = {"model": "embedded", "temperature": 0.5, "sampling_params": {"min_tokens": 3}}
        facts = [{"date": "2031-03-30T08:00:00+00:00"}, {"date": "2031-03-31T08:00:00+00:00"}]
        pond = report(folder.summary, floor=folder.summary, settings=settings, provenance=facts)
        write_summary(path, {"pond": pond})
    shown = view(path, out=None, tokenizer=None, tokens=500)
    assert shown == (path / "view.html", 4, [], {"pond": pond})
    return path
