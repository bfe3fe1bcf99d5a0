"""The maximum time to wait for an event in a test, which only a hang reaches, and what waits."""

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 240.0
"""In seconds, below pytest's own timeout: a test that hangs fails with its own words."""


def held(
    function: Callable[..., Any], holds: Callable[..., bool] = lambda *args: True
) -> tuple[Callable[..., Any], threading.Event, threading.Event]:
    """Return `function`, which waits in its thread if `holds`, the event that one call waits, and
    the event that lets all go on.
    """
    begun, go_on = threading.Event(), threading.Event()

    def waiting(*args: Any) -> Any:
        if holds(*args):
            begun.set()
            assert go_on.wait(PATIENCE)
        return function(*args)

    return waiting, begun, go_on
