"""Four of the clients of `make test-clients`, with the packages of `make test-all`. The first is
played streamed and not, as `make test-clients` plays all of them; the others alternate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from clients.play import PROGRAMS, play
from clients.table import CLIENTS, Client, Dialect

CHOSEN = [client for client in CLIENTS if client.quick]
QUICK = [
    pytest.param(client, dialect, stream, id=f"{client.name} {dialect} {stream}")
    for client in CHOSEN
    for place, dialect in enumerate(client.expected)
    for stream in client.streams
    if client is CHOSEN[0] or stream is client.streams[place % len(client.streams)]
]


@pytest.mark.parametrize(("client", "dialect", "stream"), QUICK)
async def test_clients_are_trained_on_what_they_were_served(
    client: Client, dialect: Dialect, stream: bool
) -> None:
    command: list[str | Path] = [sys.executable, PROGRAMS / client.program]
    played = await play(client, dialect, command, stream=stream)
    assert played.differences(client.expected[dialect]) == []


def test_four_clients_are_played() -> None:
    assert len(CHOSEN) == 4
