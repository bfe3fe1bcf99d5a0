"""Four of the clients of `make test-clients`, with the packages of `make test-all`."""

from __future__ import annotations

import sys

import pytest
from clients.play import PROGRAMS, play
from clients.table import CLIENTS, Client, Dialect

QUICK = [
    pytest.param(client, dialect, id=f"{client.name} {dialect}")
    for client in CLIENTS
    if client.quick
    for dialect in client.expected
]


@pytest.mark.parametrize(("client", "dialect"), QUICK)
async def test_clients_are_trained_on_what_they_were_served(
    client: Client, dialect: Dialect
) -> None:
    for stream in client.streams:
        played = await play(
            client, dialect, [sys.executable, PROGRAMS / client.program], stream=stream
        )
        assert played.differences(client.expected[dialect]) == []


def test_four_clients_are_played() -> None:
    assert sum(client.quick for client in CLIENTS) == 4
