"""Mistakes on the command line that a deeper part finds, as one line that names the option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from toolroll.parsers.errors import UnknownParserError
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints


@contextmanager
def named() -> Iterator[None]:
    """Turns an unknown parser, and an engine's address that is none, into a `UsageError` with
    the option's name.
    """
    try:
        yield
    except UnknownParserError as error:
        raise UsageError(f"--parser: {error}") from error
    except ValidationError as error:
        if error.title != "EngineConfig":
            raise
        options = {"url": "--engine", "context_length": "--context-length"}
        raise UsageError(
            "; ".join(f"{options.get(name, name)}: {said}" for name, said in complaints(error))
        ) from error
