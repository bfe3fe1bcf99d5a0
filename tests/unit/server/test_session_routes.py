"""The routes about the whole server: its sessions, their export, its metrics, its documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import Bench, endpoint

from toolroll.endpoint.http.access import session_key
from toolroll.endpoint.metrics import Metrics
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.testing import PolicyRequest

USER: Any = {"role": "user", "content": "Hi"}
BODY = {"messages": [USER]}
KEY = "a-secret-key"
ROUTES = (
    ("GET", "/sessions"),
    ("GET", "/metrics"),
    ("POST", "/sessions/s/export"),
)


def policy(request: PolicyRequest) -> str:
    return "Hello."


async def status(bench: Bench, method: str, path: str, **headers: str) -> tuple[int, str]:
    async with bench.http.request(method, bench.url + path, headers=headers) as response:
        return response.status, await response.text()


async def chat(bench: Bench, session: str = "s", **more: Any) -> tuple[int, Any]:
    return await bench.post(f"/sessions/{session}/v1/chat/completions", {**BODY, **more})


async def metrics(bench: Bench) -> dict[str, float]:
    code, text = await status(bench, "GET", "/metrics")
    assert code == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_the_list_has_live_and_finished_sessions(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        for name in ("a", "b"):
            await chat(bench, name)
            await chat(bench, name, messages=[USER, USER])
        await bench.post("/sessions/b/reward", {"reward": 1.0})
        code, made = await bench.post("/sessions/a/export", {})
        assert (code, made["turns"], made["file"]) == (200, 2, str(tmp_path / "episodes.jsonl"))
        assert await bench.post("/sessions/a/export", {}) == (200, made)  # a retry
        live, finished = (await bench.get("/sessions"))["data"]
    assert finished == {"session_id": "a", "sample": 0, "finished": True, "turns": 2}
    assert (live["session_id"], live["finished"], live["turns"], live["reward"]) == (
        "b",
        False,
        2,
        1.0,
    )
    [reason] = live["forks"]
    assert reason.endswith("message 1 (assistant) of the served history is missing")
    assert [one.task_id for one in read_episodes(tmp_path)] == ["a"]
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        assert (await bench.get("/sessions"))["data"] == [live, finished]


async def test_forks_that_drop_the_last_message_of_a_prompt_get_an_advice_once(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that appends a message for one request only, as OpenClaw 2026.9 does."""
    talk: list[Any] = [USER]
    advice = None
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        for number in range(4):
            asked = [*talk, {"role": "user", "content": f"context {number}"}]
            code, answer = await chat(bench, messages=asked)
            assert code == 200
            advice = (await bench.get("/sessions"))["data"][0]["fork_advice"]
            forks = f"{number} of {number} forks drop the last message of the prompt: use the R"
            assert (advice or "").startswith(forks) == (number >= 2)
            talk += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        await bench.post("/sessions/s/export", {})
    assert sum("drop the last message" in entry.getMessage() for entry in caplog.records) == 1
    [episode] = read_episodes(tmp_path)
    assert episode.result.info["session"]["fork_advice"] == advice


async def test_an_export_that_cannot_be_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy) as bench:
        await chat(bench)
        code, answer = await bench.post("/sessions/s/export", {})
        assert (code, answer["error"]["code"]) == (409, "no_folder")
        assert "--out" in answer["error"]["message"]
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await bench.post("/sessions", {"session_id": "s"})
        for name, wanted in (("s", (409, "session_empty")), ("x", (404, "session_not_found"))):
            code, answer = await bench.post(f"/sessions/{name}/export", {})
            assert (code, answer["error"]["code"]) == wanted


async def test_the_metrics_count_turns_tokens_errors_and_requests(tokenizer: Any) -> None:
    async with endpoint(tokenizer, policy) as bench:
        _, answer = await chat(bench, n=2)
        assert (await chat(bench, unknown=1))[0] == 400
        assert (await chat(bench, stream=True, temperature=-1))[0] == 400
        await status(bench, "PROPFIND", "/coffee")
        found = await metrics(bench)
    usage = answer["usage"]
    assert found["toolroll_turns_total"] == 2
    assert found["toolroll_sampled_tokens_total"] == usage["completion_tokens"]
    assert found["toolroll_prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["toolroll_sessions"] == 1
    assert found["toolroll_requests_in_flight"] == 0
    route = "/sessions/{session}/v1/chat/completions"
    assert found['toolroll_errors_total{code="unsupported_parameter"}'] == 1
    assert found['toolroll_errors_total{code="invalid_value"}'] == 1
    of_route = f'{{method="POST",route="{route}",status='
    assert found[f'toolroll_http_requests_total{of_route}"200"}}'] == 1
    assert found[f'toolroll_http_requests_total{of_route}"400"}}'] == 2
    assert found[f'toolroll_http_request_seconds_count{{route="{route}"}}'] == 3
    assert found[f'toolroll_http_request_seconds_bucket{{route="{route}",le="+Inf"}}'] == 3
    assert found['toolroll_http_requests_total{method="other",route="other",status="404"}'] == 1


def test_the_histogram_is_cumulative() -> None:
    made = Metrics()
    for seconds in (0.05, 0.06, 7.0, 1000.0):
        made.request("GET", "/x", 200, seconds)
    text = made.text({"sessions": ("Live sessions.", 3)})
    counts = [int(found) for found in re.findall(r'le="[^"]+"\} (\d+)', text)]
    assert counts == [1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4]
    assert "# TYPE toolroll_sessions gauge\ntoolroll_sessions 3\n" in text
    assert 'toolroll_http_request_seconds_sum{route="/x"} 1007.11' in text


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_the_new_routes_need_the_servers_key(
    tokenizer: Any, tmp_path: Path, method: str, path: str
) -> None:
    settings = {"api_key": KEY}
    async with endpoint(tokenizer, policy, out=tmp_path, settings=settings) as bench:
        own = {"Authorization": f"Bearer {KEY}"}
        await bench.post("/sessions/s/v1/chat/completions", BODY, **own)
        await bench.post("/sessions/other/v1/chat/completions", BODY, **own)
        other = {"Authorization": f"Bearer {session_key(KEY, 'other')}"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, other):
            assert (await status(bench, method, path, **headers))[0] == 401
        if path in ("/sessions", "/metrics"):  # a session's key with its name opens no others
            assert (await status(bench, method, path, **other, **{"x-session-id": "other"}))[
                0
            ] == 401
        assert (await status(bench, method, path, **own))[0] == 200
        assert read_names(tmp_path) == (["s"] if path.endswith("export") else [])


def read_names(folder: Path) -> list[str]:
    return [one.task_id for one in read_episodes(folder)]


async def test_a_sessions_key_exports_that_session(tokenizer: Any, tmp_path: Path) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path, settings={"api_key": KEY}) as bench:
        key = {"Authorization": f"Bearer {session_key(KEY, 's')}"}
        await bench.post("/sessions/s/v1/chat/completions", BODY, **key)
        assert (await status(bench, "POST", "/sessions/s/export", **key))[0] == 200
    assert read_names(tmp_path) == ["s"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_key_a_foreign_page_gets_nothing(
    tokenizer: Any, tmp_path: Path, method: str, path: str
) -> None:
    async with endpoint(tokenizer, policy, out=tmp_path) as bench:
        await chat(bench)
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            assert (await status(bench, method, path, **headers))[0] == 403
        assert read_names(tmp_path) == []
