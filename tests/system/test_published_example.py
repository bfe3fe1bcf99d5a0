"""The files of slime's tau-bench example, unchanged, on toolroll (`make test-peers`)."""

from typing import Any

import pytest
from support.published_example import AGENTS, example_folder, run
from support.tau import REAL, needed

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def episodes() -> dict[str, Any]:
    needed(REAL)
    folder = example_folder()
    if folder is None:
        pytest.skip("the example's files are in slime's checkout on GitHub only: make test-peers")
    return run(folder)


@pytest.mark.parametrize("name", ["generate", *AGENTS[:3]])
def test_the_tokens_are_those_served_and_sampled(episodes: dict[str, Any], name: str) -> None:
    episode = episodes[name]
    assert (episode.get("error"), episode["status"]) == (None, "completed")
    assert len(episode["log"]) == 2
    start = len(episode["tokens"]) - episode["response_length"]
    response = zip(episode["tokens"][start:], episode["loss_mask"], strict=True)
    sampled = [token for token, mask in response if mask]
    assert sampled == [token for _, ids in episode["log"] for token in ids]
    prompt, ids = episode["log"][-1]
    assert episode["tokens"] == [*prompt, *ids]
    assert episode.get("mismatches", []) == []


@pytest.mark.parametrize("name", AGENTS[:2])
def test_all_hooks_are_overridden_through_super(episodes: dict[str, Any], name: str) -> None:
    assert len(episodes[name]["hooks"]) == 10


def test_the_published_asolve_calls_our_hooks(episodes: dict[str, Any]) -> None:
    """It encodes text, so its tokens are not compared with the engine's."""
    episode = episodes[AGENTS[3]]
    assert (episode.get("error"), episode["status"]) == (None, "completed")
    assert (len(episode["log"]), len(episode["hooks"])) == (2, 9)
    assert len(episode["loss_mask"]) == episode["response_length"] > 0


def test_generate_leaves_no_connection_open(episodes: dict[str, Any]) -> None:
    assert episodes["unclosed"] == 0
