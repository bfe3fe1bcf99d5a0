"""Convert errors about settings to messages that name the command-line option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from toolroll.parsers.types import UnknownParserError
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import complaints


@contextmanager
def named() -> Iterator[None]:
    """Convert errors about an unknown parser, an invalid engine address or an invalid context
    length to a `UsageError` that names the option.
    """
    try:
        yield
    except UnknownParserError as error:
        raise UsageError(f"--parser: {error}") from error
    except ValidationError as error:
        if error.title != "EngineConfig":
            raise
        options = {"url": "--engine", "context_length": "--context-length"}
        raise UsageError(complaints(error, lambda name: options.get(name, name))) from error
