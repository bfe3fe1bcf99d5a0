"""A field that changes no token is accepted in every dialect, and counted in its session. What has
content is refused.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from support.dialect_bodies import DIALECTS, PATHS, Dialect, body_of
from support.endpoints import endpoint

from toolroll.endpoint.requests.ignored_fields import IgnoredFields

FUNCTION = {"name": "look", "arguments": '{"at": "x"}'}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "seen x"},
]
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
    tokenizer: Any, dialect: Dialect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = body_of(dialect, copy.deepcopy(HISTORY), stream=False)
    for message in plain["messages"] if dialect == "chat" else ():
        message["content"] = [{"type": "text", "text": message["content"]}]
    name = "input" if dialect == "responses" else "messages"
    body = {**plain, **EFFORTS[dialect], name: marked(plain[name])}
    path = f"/sessions/s{PATHS[dialect]}"
    caplog.set_level(logging.WARNING)
    async with endpoint(tokenizer, lambda request: "Hello.", out=tmp_path / "out") as bench:
        for each in (plain, body, body):
            status, answer = await bench.post(path, each)
            assert status == 200, answer
        assert len({tuple(entry.input_ids) for entry in bench.engine.log}) == 1
        counted = (await bench.get("/sessions/s/trajectories"))["ignored_fields"]
        [listed] = (await bench.get("/sessions"))["data"]
    assert listed["ignored_fields"] == counted
    assert set(counted.values()) == {2}
    assert PATHS_OF_EFFORTS[dialect] < set(counted)
    assert any(path.endswith(f"[].{NEVER_SHOWN}") for path in counted)
    said = [record.getMessage() for record in caplog.records if "no token" in record.getMessage()]
    assert len(said) == 1
    assert all(path in said[0] for path in counted)
    async with endpoint(tokenizer, lambda request: "Hello.", out=tmp_path / "out") as bench:
        assert (await bench.get("/sessions/s/trajectories"))["ignored_fields"] == counted
        await bench.http.delete(f"{bench.url}/sessions/s")
    assert counted == _written(tmp_path / "out")["ignored_fields"]


def _written(folder: Path) -> Any:
    import orjson

    [line] = (folder / "episodes.jsonl").read_bytes().splitlines()
    return orjson.loads(line)["info"]["session"]


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("user", "audio"),
        ("user", "tool_calls"),
        ("assistant", "function_call"),
        ("assistant", "refusal"),
        ("tool", "reasoning_content"),
    ],
)
async def test_a_field_with_content_is_refused(tokenizer: Any, role: str, field: str) -> None:
    messages = [*HISTORY, {"role": "user", "content": "go on"}]
    index = next(at for at, message in enumerate(messages) if message["role"] == role)
    messages[index] = {**messages[index], field: {"name": "look"}}
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        status, answer = await bench.post(PATHS["chat"], {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, f"messages[{index}].{field}")


SHOWS_ID = "{% for m in messages if m.role == 'tool' %}{{ m.id }}{% endfor %}"


@pytest.mark.parametrize(("role", "value", "status"), [
    ("user", "c", 200), ("tool", "c", 400), ("user", {"of": "c"}, 400),
])  # fmt: skip
async def test_a_field_that_the_template_may_show_is_refused(
    tokenizer: Any, role: str, value: Any, status: int
) -> None:
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = SHOWS_ID + tokenizer.chat_template
    messages = [{**each, "id": value} if each["role"] == role else each for each in HISTORY]
    async with endpoint(shown, lambda request: "Hello.") as bench:
        found, _ = await bench.post(PATHS["chat"], {"messages": messages})
    assert found == status


def test_what_is_counted_is_bounded() -> None:
    ignored = IgnoredFields()
    ignored.add_others({"x" * 1000: 1, "known": 1, "null": None}, ["known"], "messages[7]")
    assert ignored.paths == {f"messages[].{'x' * 1000}"[:100]}
    for number in range(100):
        ignored.add(f"field{number}")
    assert len(ignored.paths) == 32
