"""The maximum time to wait for an event in a test: only a hang reaches it."""

from __future__ import annotations

PATIENCE = 240.0
"""In seconds, below pytest's own timeout: a test that hangs fails with its own words."""
