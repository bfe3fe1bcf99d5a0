"""`toolroll serve`: what is refused at its start."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
from support.client import StartingEngine
from support.commands import toolroll

from toolroll.cli.app import main
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.http.serve import serve
from toolroll.rollout.errors import UsageError
from toolroll.rollout.settings import RolloutArgs


def test_another_address_needs_a_key() -> None:
    with pytest.raises(UsageError, match="--api-key-env"):
        toolroll("serve", "--model", "embedded", "--host", "0.0.0.0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--sampling-params", '{"temprature": 1}'],
            ["--sampling-params", "temprature", "did you mean 'temperature'"],
        ),
        (["--sampling-params", '{"n": 2}'], ["--sampling-params", "n is set by each request"]),
        (["--history", "forget"], ["--history", "fork", "preserve"]),
        (["--server-tools", "never"], ["--server-tools", "refuse", "drop"]),
        (["--max-body", "5"], ["--max-body"]),
        (["--max-text", "5"], ["--max-text"]),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start_under_its_flag(
    flags: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["toolroll", "serve", "--model", "embedded", "--engine", "http://127.0.0.1:9", *flags],
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert "127.0.0.1:9" not in said


def test_an_engine_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:9"):
        toolroll("serve", "--model", "embedded", "--engine", "http://127.0.0.1:9", "--port", "0")


async def test_the_start_waits_for_an_engine_that_is_starting(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ready: list[str] = []

    def stop(url: str) -> None:
        ready.append(url)
        signal.raise_signal(signal.SIGTERM)

    engine = StartingEngine(tokenizer)
    async with engine:
        args = RolloutArgs(model="embedded", engine=engine.url, engine_timeout=0.05)
        await serve(args, EndpointSettings(port=0), stop)
        assert engine.checks == 3  # down, up, and once more before the start
    [waiting, _] = [record.getMessage() for record in caplog.records if "engine" in record.name]
    assert "/health answers 503" in waiting and waiting.endswith("up to 0.05 s")
    assert len(ready) == 1


async def test_a_signal_ends_the_wait_for_the_engine(tokenizer: Any) -> None:
    class Down(StartingEngine):
        @property
        def healthy(self) -> bool:
            signal.raise_signal(signal.SIGTERM)
            return False

        @healthy.setter
        def healthy(self, value: bool) -> None:
            pass

    ready: list[str] = []
    async with Down(tokenizer) as engine:
        args = RolloutArgs(model="embedded", engine=engine.url, engine_timeout=600)
        await serve(args, EndpointSettings(port=0), ready.append)
    assert ready == []


@pytest.mark.parametrize(
    ("flags", "found"),
    [([], (0.0, True)), (["--no-pace-gc", "--engine-timeout", "60"], (60.0, False))],
)
def test_the_flags_of_the_engine_and_the_collector_reach_the_model(
    flags: list[str], found: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[RolloutArgs] = []

    async def serve(args: RolloutArgs, *others: object) -> None:
        given.append(args)

    monkeypatch.setattr("toolroll.endpoint.http.serve.serve", serve)
    assert toolroll("serve", "--model", "embedded", *flags).exit_code == 0
    assert [(args.engine_timeout, args.pace_gc) for args in given] == [found]
