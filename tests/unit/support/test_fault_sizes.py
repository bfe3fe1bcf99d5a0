"""The sample of the fault suite: seeded, in order, and everything in `make faults`."""

from __future__ import annotations

import pytest
from support.faults import size


def test_the_sample_is_the_same_each_time_and_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size, "FULL", False)
    found = size.sampled(range(100), 30)
    assert (
        len(found) == 30 and found == sorted(set(found)) and found == size.sampled(range(100), 30)
    )
    monkeypatch.setattr(size, "SEED", size.SEED + 1)
    assert size.sampled(range(100), 30) != found
    assert size.sampled("abc", 30) == ["a", "b", "c"]


def test_at_full_size_it_is_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "FULL", True)
    assert size.sampled(range(100), 30) == list(range(100))
