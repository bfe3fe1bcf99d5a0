"""`Tally`: count the injected faults of a test, and the outcomes of its episodes.

The counts of all tests are added and printed at the end of a run (`tests/conftest.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from support.results import content

from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import from_line, to_line

COUNTS = ("tried", "played", "lost", "doubled", "changed", "affected", "tracebacks")
"""Faults tried; episodes played; of these lost, doubled, or changed by writing and reading;
episodes that no fault was meant for and that are not what they are without faults; tracebacks for
users."""


class Tally:
    """The counts of one test. `counts` may grow until the test ends."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)

    def tried(self, faults: int = 1) -> None:
        self.counts["tried"] += faults

    def played(
        self,
        found: Sequence[Episode],
        expected: Iterable[tuple[str, int]],
        undisturbed: dict[tuple[str, int], dict[str, Any]],
    ) -> None:
        """Count the episodes of a run: `found`, of the `expected` keys.

        `undisturbed` holds the content of the episodes that no fault was meant for, as a run
        without faults gives it (`contents`).
        """
        keys = Counter((episode.task_id, episode.sample) for episode in found)
        self.counts["played"] += len(found)
        self.counts["lost"] += len(set(expected) - keys.keys())
        self.counts["doubled"] += sum(keys.values()) - len(keys)
        lines = list(map(to_line, found))
        self.counts["changed"] += sum(to_line(from_line(line)) != line for line in lines)
        now = contents(found)
        self.counts["affected"] += sum(1 for key in undisturbed if now.get(key) != undisturbed[key])

    def texts(self, *printed: str) -> None:
        """Count the tracebacks in what a user would see."""
        self.counts["tracebacks"] += sum(text.count("Traceback (most recent") for text in printed)

    def check(self) -> None:
        """Fail if anything was lost, doubled, changed, affected or shown as a traceback."""
        wrong = {
            name: n for name, n in self.counts.items() if n and name not in ("tried", "played")
        }
        assert not wrong, wrong
        assert self.counts["tried"], "no fault was tried"


def contents(episodes: Iterable[Episode]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what each episode holds, without clocks and caches."""
    return {(e.task_id, e.sample): content(e, circumstances=False) for e in episodes}
