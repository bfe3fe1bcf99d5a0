"""The maximum time to wait for an event in a test, long enough for any machine, so that only a hang
reaches it.
"""

from __future__ import annotations

PATIENCE = 240.0
"""In seconds. It is below pytest's own timeout, so that a test that hangs fails with its own
words.
"""
