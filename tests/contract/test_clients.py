"""Some of the clients of `make test-clients`, with the packages of `make test-all`: each dialect
streamed and not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from clients.play import PROGRAMS, play
from clients.table import CLIENTS, Dialect

PLAYED: list[tuple[str, Dialect, bool]] = [
    ("langgraph", "chat", False),
    ("langgraph", "responses", True),
    ("langgraph", "messages", False),
    ("pydantic-ai", "chat", True),
    ("pydantic-ai", "responses", False),
    ("pydantic-ai", "messages", True),
    ("haystack", "chat", False),
    ("OpenAI", "chat", False),
    ("OpenAI", "responses", True),
    ("instructor", "messages", False),
]
"""The clients' names without their versions; True for a streamed answer."""


@pytest.mark.parametrize(("name", "dialect", "stream"), PLAYED)
async def test_clients_are_trained_on_what_they_were_served(
    name: str, dialect: Dialect, stream: bool
) -> None:
    [client] = [one for one in CLIENTS if one.name.split()[0] == name]
    command: list[str | Path] = [sys.executable, PROGRAMS / client.program]
    played = await play(client, dialect, command, stream=stream)
    assert played.differences(client.expected[dialect]) == []
