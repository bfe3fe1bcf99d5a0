"""The JSON form of a trajectory: one form, documented, and readable since version 0.1."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from pydantic import BaseModel, ValidationError
from support.results import content, episode, trajectory
from support.source import ROOT

from toolroll.rollout.media import Image
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.session.trajectory_json import (
    TrajectoryRecord,
    TurnRecord,
    from_json,
    to_json,
)
from toolroll.rollout.types import Trajectory, Turn

WRITTEN_BEFORE = Path(__file__).parent.parent / "runs" / "episodes-0.1.jsonl"


def third() -> Trajectory:
    """A trajectory whose logprobs no decimal of few digits gives exactly."""
    found = trajectory(
        fork_reason="rewritten", routed_experts=np.arange(22, dtype=np.int32).reshape(11, 2)
    )
    found.logprobs[4] = np.float32(-1 / 3)
    media = (Image(1, 2, "ab", url="data:"), Image(3, 1, "cd"))
    return replace(found, lineage={"thread_id": "t"}, media=media)


def test_what_is_printed_of_an_episode_are_counts() -> None:
    played = episode(trajectories=[trajectory(fork_reason="rewritten")])
    shown = "<Trajectory: 12 tokens, 6 trained, 2 turns, source engine, fork_reason 'rewritten'>"
    assert str(played.result.trajectories[0]) == shown
    assert f"trajectories=({shown},), stop_reason=" in str(played)
    assert "[" not in str(played).replace("expected_calls=[]", "")


@pytest.mark.parametrize("arrays", [False, True])
def test_what_is_read_is_what_was_written(arrays: bool) -> None:
    mine = third()
    data = orjson.loads(
        orjson.dumps(to_json(mine, arrays=arrays), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    theirs = from_json(data)
    for name in ("input_ids", "loss_mask", "logprobs", "routed_experts"):
        assert getattr(mine, name).dtype == getattr(theirs, name).dtype
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    assert theirs.loss_mask.dtype == np.int32
    assert (theirs.turns, theirs.lineage) == (mine.turns, mine.lineage)
    assert theirs.media == mine.media and theirs.media[0].url == ""
    assert data["media"][0] == {"position": 1, "count": 2, "sha256": "ab"}
    assert (theirs.prompt_length, theirs.source, theirs.fork_reason) == (4, "engine", "rewritten")
    assert data["logprobs"][0] is None
    assert data.keys() == TrajectoryRecord.model_fields.keys()
    assert data["turns"][0].keys() == TurnRecord.model_fields.keys()


def test_a_constraint_is_not_read_back_and_another_form_refused() -> None:
    turn = Turn(4, 7, "stop", sampling_params={"temperature": 1.0, "regex": "[0-9]+"})
    found = trajectory(spans=[(4, 7)])
    data = to_json(Trajectory(found.input_ids, found.loss_mask, found.logprobs, (turn,), 4))
    assert data["turns"][0]["constrained"] == "regex"
    assert from_json(data).turns == (turn,)
    with pytest.raises(ValidationError, match=r"turns\.0\.begin"):
        from_json({**data, "turns": [{"begin": 4}]})


def test_a_file_of_the_first_version_is_read() -> None:
    episodes = list(read_episodes(WRITTEN_BEFORE))
    assert [found.result.stop_reason for found in episodes] == ["done", "engine_error"]
    for found, line in zip(episodes, WRITTEN_BEFORE.read_bytes().splitlines(), strict=True):
        now = content(found)
        assert (now.pop("task_hash"), now.pop("expected_calls")) == ("", [])
        assert now.pop("environment") == ""
        for part in now["trajectories"]:
            for turn in part["turns"]:
                assert turn.pop("constrained") is None
                assert turn.pop("reward") == 0.0
        assert now == orjson.loads(line)


@pytest.mark.parametrize(("record", "first"), [(TrajectoryRecord, 0), (TurnRecord, 1)])
def test_every_field_is_documented(record: type[BaseModel], first: int) -> None:
    text = (ROOT / "docs" / "trajectory-format.md").read_text()
    table = text.split("| field | shape |")[first + 1].split("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(documented) == sorted(record.model_fields)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("input_ids", value) for value in (2**31, "7", 7.0, True)]
    + [("loss_mask", value) for value in (2, 300, -1, True)],
)
def test_what_is_no_id_or_mask_is_refused(name: str, wrong: object) -> None:
    data = to_json(third())
    data[name][0] = wrong
    with pytest.raises(ValidationError, match=rf"{name}\.0"):
        from_json(data)
