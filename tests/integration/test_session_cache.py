"""Sessions in the cache of the real server: what long agents keep, and that nothing stays open.

TOOLROLL_FAULTS=full plays all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults.size import FULL
from support.processes import Server
from support.proxy import CountingProxy, counting_proxy
from support.servers import sglang_server
from support.session_load import POOL, play_long_among_short


@pytest.fixture(scope="module")
def small(log_folder: Path) -> Iterator[Server]:
    """SGLang with sessions in a small cache."""
    flags = ["--enable-session-radix-cache", "--max-total-tokens", str(POOL)]
    with sglang_server(log_folder, flags=flags, name="sglang-sessions") as server:
        yield server


@pytest.fixture
def proxy(small: Server) -> Iterator[CountingProxy]:
    with counting_proxy(small.url) as proxy:
        yield proxy


def sessions(proxy: CountingProxy, path: str) -> list[str]:
    """The session ids in the requests for `path`, in order."""
    seen = [seen.json().get("session_id") for seen in proxy.requests if seen.path == path]
    return [session_id for session_id in seen if session_id]


async def test_long_agents_keep_their_prefixes_among_short_episodes(proxy: CountingProxy) -> None:
    turns = 10 if FULL else 5
    plain = await play_long_among_short(proxy.url, session_cache=False, turns=turns)
    assert sessions(proxy, "/generate") == []
    kept = await play_long_among_short(proxy.url, session_cache=True, turns=turns)
    assert sorted(set(sessions(proxy, "/generate"))) == sorted(sessions(proxy, "/close_session"))
    sys.stderr.write(
        f"{(plain.cached_share, kept.cached_share, plain.recomputed, kept.recomputed)}"
    )
    assert len(plain.later) == len(kept.later) == 4 * (turns - 1)
    assert plain.cached_share < 0.1
    assert kept.cached_share >= (0.9 if FULL else 0.85)
    assert kept.recomputed * 10 < plain.recomputed
