"""A run spread over a Ray cluster of two nodes, one of which dies under it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from support.commands import lines
from support.faults.tally import Tally, contents
from support.ray_processes import desk_engine, desk_run

from toolroll.cli.run_command import run
from toolroll.evaluation.ray_worker import connected
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import EmbeddedEngine

SAMPLES = 3
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    with desk_engine(samples=SAMPLES, latency=0.15) as served:
        yield served


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes on this machine."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing is asked of the network
    found = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.mark.faults
async def test_a_node_that_dies_loses_and_doubles_nothing(
    engine: EmbeddedEngine, cluster: Cluster, tmp_path: Path, caplog: Any, tally: Tally
) -> None:
    console = Console(quiet=True)
    here, spread = tmp_path / "here", tmp_path / "ray"
    await run(desk_run(engine, here, samples=SAMPLES), console)
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    config = desk_run(engine, spread, samples=SAMPLES, ray=cluster.address, processes=2)
    running = asyncio.create_task(run(config, console))
    while not running.done() and lines(spread) < 15:
        await asyncio.sleep(0.05)
    before = lines(spread)
    await asyncio.to_thread(cluster.remove_node, node)
    outcome = await running
    assert 15 <= before < 33 * SAMPLES, "it died in mid-run"
    assert "died (attempt 1)" in caplog.text, "a worker was on it, and played"
    assert outcome.summary.episodes == 33 * SAMPLES
    assert outcome.report["aborted"] == 0
    whole = contents(read_episodes(here))
    tally.tried()
    tally.played(list(read_episodes(spread)), whole, whole)
    tally.check()


async def test_a_local_cluster_is_a_new_one(cluster: Cluster, monkeypatch: Any) -> None:
    """Even if another one runs on this machine: it would end with its owner."""
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    async with connected("local", 1):
        assert ray.get_runtime_context().gcs_address != cluster.address
    assert not ray.is_initialized()
