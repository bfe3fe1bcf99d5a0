"""A field that changes no token is accepted in every dialect, and counted in its session."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.dialect_bodies import DIALECTS, PATHS, Dialect, body_of
from support.served import in_session, serve, system, tool_results, user

from toolroll.endpoint.requests.ignored_fields import IgnoredFields

FUNCTION = {"name": "look", "arguments": '{"at": "x"}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
REPLY = {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]}
HISTORY: list[dict[str, Any]] = [system("S"), user("hi"), REPLY, *tool_results(REPLY)]
EFFORTS: dict[Dialect, dict[str, Any]] = {
    "chat": {"reasoning_effort": "medium"},
    "messages": {"output_config": {"effort": "low"}},
    "responses": {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
}
PATHS_OF_EFFORTS = {
    "chat": {"reasoning_effort"},
    "messages": {"output_config.effort"},
    "responses": {"reasoning.effort", "text.verbosity"},
}
NEVER_SHOWN = "extra"


def marked(value: Any) -> Any:
    """`value` with an unknown field in each of its objects, but not in arguments."""
    if isinstance(value, list):
        return [marked(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {name: item if name == "input" else marked(item) for name, item in value.items()}
    if "text" in value:  # @openai/agents 0.20 adds these to a part of the message
        inner |= {"role": "assistant", "tool_calls": [{"id": "c"}]}
    return {**inner, NEVER_SHOWN: {"function_id": "c"}}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_changes_no_token_is_counted_and_said_once(
    dialect: Dialect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = [dict(message) for message in HISTORY]
    if dialect == "chat":
        for message in history:
            message["content"] = [{"type": "text", "text": message["content"]}]
    plain = body_of(dialect, history, stream=False)
    name = "input" if dialect == "responses" else "messages"
    body = {**plain, **EFFORTS[dialect], name: marked(plain[name])}
    caplog.set_level(logging.WARNING)
    async with serve(out=tmp_path) as bench:
        for request in (plain, body, body):
            await bench.send(in_session(PATHS[dialect]), request)
        assert len({tuple(entry.input_ids) for entry in bench.engine.log}) == 1
        counted = (await bench.get("/sessions/s/trajectories"))["ignored_fields"]
        [listed] = (await bench.get("/sessions"))["data"]
    assert listed["ignored_fields"] == counted
    assert set(counted.values()) == {2}
    assert PATHS_OF_EFFORTS[dialect] < set(counted)
    assert any(path.endswith(f"[].{NEVER_SHOWN}") for path in counted)
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if "no token" in message]
    assert all(path in warning for path in counted)
    async with serve(out=tmp_path) as bench:
        assert (await bench.get("/sessions/s/trajectories"))["ignored_fields"] == counted
        assert await bench.delete() == 200
    [line] = (tmp_path / "episodes.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["info"]["session"]["ignored_fields"] == counted


def test_what_is_counted_is_bounded() -> None:
    ignored = IgnoredFields()
    ignored.add_others({"x" * 1000: 1, "known": 1, "null": None}, ["known"], "messages[7]")
    assert ignored.paths == {f"messages[].{'x' * 1000}"[:100]}
    for number in range(100):
        ignored.add(f"field{number}")
    assert len(ignored.paths) == 32
