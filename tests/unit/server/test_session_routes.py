"""The routes about sessions and the whole server: lists, exports, traces, metrics, the log."""

import logging
import re
from pathlib import Path

import pytest
from support.recorded import finished
from support.served import CHAT, TEXT, USER, Message, ServedBench, in_session, numbered, serve, user
from yarl import URL

from toolroll.endpoint.metrics import Metrics
from toolroll.rollout.runs.episode_file import read_episodes

KEY = "a-secret-key"
EXPORT = "/sessions/s/export"


async def metrics(bench: ServedBench) -> dict[str, float]:
    async with bench.http.get(f"{bench.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in values}


async def test_the_list_has_live_and_finished_sessions(tmp_path: Path) -> None:
    async with serve(out=tmp_path) as bench:
        for name in ("s", "t"):
            await bench.ask(USER, session=name)
            await bench.ask(USER, USER, session=name)
        rewarded = await bench.send("/sessions/t/reward", {"reward": 1.0})
        assert rewarded == {"session_id": "t", "reward": 1.0}
        assert (await bench.get("/sessions/t/trajectories"))["reward"] == 1.0
        exported = await bench.send(EXPORT, {})
        assert (exported["turns"], exported["file"]) == (2, str(tmp_path / "episodes.jsonl"))
        assert await bench.send(EXPORT, {}) == exported  # a retry
        trajectories = await bench.get("/sessions/s/trajectories")
        assert trajectories["error"]["code"] == "session_not_found"
        file = re.escape(str(tmp_path / "episodes.jsonl"))
        message = rf"the session 's' is finished, or is being finished: see {file}"
        assert re.fullmatch(message, trajectories["error"]["message"])
        live, ended = (await bench.get("/sessions"))["data"]
    assert ended == {"session_id": "s", "sample": 0, "finished": True, "turns": 2}
    expected = {"session_id": "t", "finished": False, "turns": 2, "reward": 1.0}
    assert live == {**live, **expected}
    [reason] = live["forks"]
    assert reason.endswith("message 1 (assistant) of the served history is missing")
    assert finished(tmp_path) == ["s"]
    async with serve(out=tmp_path) as bench:
        assert (await bench.get("/sessions"))["data"] == [live, ended]


async def test_forks_get_one_advice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An agent that appends a message for one request only, as OpenClaw 2026.9 does."""
    talk: list[Message] = [USER]
    advice = None
    async with serve(out=tmp_path) as bench:
        for number in range(4):
            talk += [await bench.chat(*talk, user(f"context {number}"), tools=[]), user("more")]
            advice = (await bench.get("/sessions"))["data"][0]["fork_advice"]
            forks = f"{number} of {number} forks drop the last message of the prompt: use the R"
            assert (advice or "").startswith(forks) == (number >= 2)
        await bench.send(EXPORT, {})
    assert sum("drop the last message" in entry.getMessage() for entry in caplog.records) == 1
    [episode] = read_episodes(tmp_path)
    assert episode.result.info["session"]["fork_advice"] == advice


async def test_an_export_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with serve() as bench:
        await bench.ask(USER)
        status, answer = await bench.post(EXPORT, {})
        assert (status, answer["error"]["code"]) == (409, "no_folder")
        assert "--out" in answer["error"]["message"]
        missing = (await bench.get("/sessions/x/trajectories"))["error"]["message"]
        assert missing == "there is no unfinished session 'x': GET /sessions lists them"
    async with serve(out=tmp_path) as bench:
        await bench.create()
        assert (await bench.refusal(EXPORT, {}))[:2] == (409, "session_empty")
        status, answer = await bench.post("/sessions/x/export", {})
        assert (status, answer["error"]["code"]) == (404, "session_not_found")
        assert (
            answer["error"]["message"]
            == "there is no session 'x': GET /sessions lists the sessions"
        )


async def test_the_metrics_count_turns_tokens_errors_and_requests() -> None:
    async with serve() as bench:
        usage = (await bench.ask(USER, n=2))["usage"]
        for fields in ({"unknown": 1}, {"stream": True, "temperature": -1}):
            await bench.refusal(in_session(CHAT), {"messages": [USER], **fields})
        async with bench.http.request("PROPFIND", f"{bench.url}/coffee"):
            values = await metrics(bench)
    route = "/sessions/{session}" + CHAT
    of_route = f'{{method="POST",route="{route}",status='
    expected = {
        "toolroll_turns_total": 2,
        "toolroll_sampled_tokens_total": usage["completion_tokens"],
        "toolroll_prompt_tokens_total": usage["prompt_tokens"],
        "toolroll_sessions": 1,
        "toolroll_requests_in_flight": 0,
        'toolroll_errors_total{code="unsupported_parameter"}': 1,
        'toolroll_errors_total{code="invalid_value"}': 1,
        f'toolroll_http_requests_total{of_route}"200"}}': 1,
        f'toolroll_http_requests_total{of_route}"400"}}': 2,
        f'toolroll_http_request_seconds_count{{route="{route}"}}': 3,
        f'toolroll_http_request_seconds_bucket{{route="{route}",le="+Inf"}}': 3,
        'toolroll_http_requests_total{method="other",route="other",status="404"}': 1,
    }
    assert {name: values[name] for name in expected} == expected


def test_the_histogram_is_cumulative() -> None:
    counted = Metrics()
    for seconds in (0.05, 0.06, 7.0, 1000.0):
        counted.request("GET", "/x", 200, seconds)
    text = counted.text({"sessions": ("Live sessions.", 3)})
    counts = [int(count) for count in re.findall(r'le="[^"]+"\} (\d+)', text)]
    assert counts == [1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4]
    assert "# TYPE toolroll_sessions gauge\ntoolroll_sessions 3\n" in text
    assert 'toolroll_http_request_seconds_sum{route="/x"} 1007.11' in text


async def test_each_request_is_one_line_without_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolroll.endpoint")
    owner = {"Authorization": f"Bearer {KEY}"}
    async with serve(settings={"api_key": KEY}) as bench:
        body = {"messages": [user("a-private-word")]}
        await bench.send(f"{in_session(CHAT)}?token=a-query", body, **owner)
        await bench.send(CHAT, {**body, "session_id": "in-the-body"}, **owner)
        await bench.send(CHAT, body, **owner)
        unnamed = bench.endpoint.sessions.all()[-1].id
        await bench.refusal("/sessions/s/reward", {"reward": 1})
        for path in ("/sessions/s/trajectories", "/a%0Ab"):
            async with bench.http.get(URL(bench.url + path, encoded=True), headers=owner):
                pass
    records = [each for each in caplog.records if each.name == "toolroll.endpoint.http.app"]
    lines = [record.getMessage() for record in records]
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines] == [
        "POST /sessions/s/v1/chat/completions 200 session=s",
        "POST /v1/chat/completions 200 session=in-the-body",
        f"POST /v1/chat/completions 200 session={unnamed}",
        "POST /sessions/s/reward 401 invalid_api_key session=s",
        "GET /sessions/s/trajectories 200 session=s",
        "GET /a%0Ab 404 not_found session=-",
    ]
    secrets = (KEY, "a-private-word", "a-query")
    assert not any(secret in line for line in lines for secret in secrets)


async def test_the_trace_is_what_was_served_in_order() -> None:
    async with serve(numbered) as bench:
        await bench.ask(USER)
        await bench.send(in_session(TEXT), {"prompt": "One two", "max_tokens": 20})
        trace = (await bench.get("/sessions/s/trace"))["trace"]
        assert [entry["object"] for entry in trace] == ["chat.completion", "text_completion"]
        for entry, sent in zip(trace, bench.engine.log, strict=True):
            assert entry["prompt_token_ids"] == sent.input_ids.tolist()
            assert entry["completion_token_ids"] == sent.output_ids
