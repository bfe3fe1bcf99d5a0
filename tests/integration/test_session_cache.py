"""Sessions in the cache of the real server: what long agents keep, and that nothing stays open.

TOOLROLL_FAULTS=full plays all of it.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults.size import FULL
from support.patience import PATIENCE
from support.processes import TOOLROLL, Server
from support.proxy import CountingProxy, counting_proxy
from support.session_load import PARAMS, play_long_among_short
from support.tiny_model import tiny_model


@pytest.fixture
def proxy(sglang_small: Server) -> Iterator[CountingProxy]:
    with counting_proxy(sglang_small.url) as proxy:
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
    assert len(plain.later) == len(kept.later) == 4 * (turns - 1)
    assert plain.cached_share < 0.1
    assert kept.cached_share >= (0.9 if FULL else 0.85)
    assert kept.recomputed * 10 < plain.recomputed


ENVIRONMENT = """
from toolroll.agents.environments.tool_environment import tool_environment
from support.session_load import look

env = tool_environment(
    tools=[look], tasks=[{"prompt": f"{n}: look around."} for n in range(200)], reward=lambda: 1.0
)
"""


@pytest.mark.parametrize("out", ["--out", "no folder"])
def test_killed_runs_leave_no_session_open(proxy: CountingProxy, tmp_path: Path, out: str) -> None:
    (tmp_path / "looks.py").write_text(ENVIRONMENT)
    params = json.dumps({name: PARAMS[name] for name in ("regex", "logit_bias")})
    options = "--max-turns 4 --concurrency 4 --max-new-tokens 48 --no-do-nothing".split()
    options += ["--model", str(tiny_model()), "--sampling-params", params]
    options += ["--out", str(tmp_path / "run")] if out == "--out" else []
    command = [*TOOLROLL, "run", f"{tmp_path}/looks.py:env", "--engine", proxy.url, *options]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    environment = os.environ | paths
    left, random_moments = 0, random.Random(11)
    for _ in range(20 if FULL else 3):
        sent = len(proxy.generations()) + random_moments.randint(4, 12)
        log = (tmp_path / "log").open("ab")
        with log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            deadline = time.monotonic() + PATIENCE
            while len(proxy.generations()) < sent and time.monotonic() < deadline:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
            process.kill()
        opened, closed = set(sessions(proxy, "/generate")), set(sessions(proxy, "/close_session"))
        left += len(opened - closed)
    assert left  # the kills hit open sessions
    done = subprocess.run([*command, "--tasks", "0"], env=environment, check=False)
    assert done.returncode == 0
    assert set(sessions(proxy, "/generate")) == set(sessions(proxy, "/close_session"))
    assert not list(tmp_path.rglob(".open-sessions-*"))
