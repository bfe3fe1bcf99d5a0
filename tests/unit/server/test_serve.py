"""`toolroll serve`, as a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import Any

import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app, main
from toolroll.rollout.errors import UsageError
from toolroll.rollout.testing import EmbeddedEngine


async def test_it_serves_until_it_is_told_to_stop(tokenizer: Any) -> None:
    async with EmbeddedEngine(tokenizer, lambda request: "Hello.") as engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from toolroll.rollout.cli import main; main()",
            "serve", "--model", "embedded", "--engine", engine.url, "--port", "0",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url, line
            async with AsyncOpenAI(base_url=f"{url.group()}/sessions/s/v1", api_key="unused") as client:
                reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
            assert reply.choices[0].message.content == "Hello."
        finally:
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 60)
        assert code == 0


def test_another_address_needs_a_key() -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "embedded", "--host", "0.0.0.0"])
    assert isinstance(result.exception, UsageError)
    assert "--api-key-env" in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sampling-params", '{"temprature": 1}'], ["--sampling-params", "temprature", "did you mean 'temperature'"]),
        (["--sampling-params", '{"n": 2}'], ["--sampling-params", "n is each request's own"]),
        (["--history", "forget"], ["--history", "fork", "preserve"]),
        (["--seed", "never"], ["--seed", "refuse", "best_effort"]),
        (["--max-tokens", "0"], ["--max-tokens"]),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start_under_its_flag(
    flags: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["toolroll", "serve", "--model", "embedded", "--engine", "http://127.0.0.1:9", *flags])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert "127.0.0.1:9" not in said


def test_an_engine_that_is_not_there_is_said_at_once() -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "embedded", "--engine", "http://127.0.0.1:9", "--port", "0"])
    assert isinstance(result.exception, UsageError)
    assert "http://127.0.0.1:9" in str(result.exception)
