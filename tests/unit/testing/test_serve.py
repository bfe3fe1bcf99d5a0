"""The embedded engine as a server of its own: in a thread, and as `toolroll engine`."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.embedded import says
from support.patience import PATIENCE
from support.processes import serving

from toolroll.rollout.errors import UsageError
from toolroll.rollout.settings import EmbeddedEngineSettings
from toolroll.testing import EmbeddedEngine, serve_in_thread
from toolroll.testing.serve import _policy, serve


def ask(url: str, key: str = "s") -> str:
    body = json.dumps({"input_ids": [300, 301]}).encode()
    request = urllib.request.Request(
        f"{url}/generate", body, {"x-smg-routing-key": key, "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return str(json.loads(response.read())["text"])


def test_a_program_without_an_event_loop_can_use_it(tokenizer: Any) -> None:
    with serve_in_thread(EmbeddedEngine(tokenizer, says("Fine."))) as engine:
        assert ask(engine.url) == "Fine."
        assert len(engine.log) == 1
    with pytest.raises(OSError):
        ask(engine.url)


SCRIPT = '{"s": ["One.", "Two."], "t": []}'


def test_the_command_serves_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(SCRIPT, encoding="utf-8")
    main = "from toolroll.cli import main; main()"
    start = [sys.executable, "-c", main, "engine", "--script", str(script)]
    command = lambda port: [*start, "--port", str(port)]
    with serving(
        command, ready="/health", environment={}, log=tmp_path / "log", name="the embedded engine"
    ) as server:
        assert [ask(server.url) for _ in range(3)] == ["One.", "Two.", "I am done."]


def test_a_request_without_a_scripted_reply_is_a_warning(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "script.json"
    path.write_text(SCRIPT, encoding="utf-8")
    with serve_in_thread(EmbeddedEngine(tokenizer, _policy(path))) as engine:
        for key in ("S", "x", "s", "s", "s", "s"):
            ask(engine.url, key)
    assert [record.getMessage() for record in caplog.records] == [
        "no replies for 'S', so it gets 'I am done.'; the keys are 's', 't'",
        "all 2 replies of 's' were sent; to send them again, restart this engine",
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"s": "One."}', '{"s": [1]}', '{"s": []}\nhm', "5"]
)
async def test_a_wrong_script_is_told_with_its_shape(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r'script\.json is not a JSON object \{"routing key"'):
        async with asyncio.timeout(PATIENCE):
            await serve(EmbeddedEngineSettings(port=0, script=path))


async def test_what_cannot_be_served_says_why(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="no tokenizer can be loaded from"):
        await serve(EmbeddedEngineSettings(port=0, tokenizer=str(tmp_path / "nothing")))
    with pytest.raises(UsageError, match=r"nothing\.json cannot be read"):
        await serve(EmbeddedEngineSettings(port=0, script=tmp_path / "nothing.json"))
    async with EmbeddedEngine(tokenizer) as engine:
        port = int(engine.url.rpartition(":")[2])
        with pytest.raises(UsageError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            await serve(EmbeddedEngineSettings(port=port))


async def test_a_model_that_cannot_be_served_says_why(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        await serve(EmbeddedEngineSettings(port=0, model=str(tmp_path)))
    with pytest.raises(UsageError, match="the context length is at most 1024, not 1025"):
        await serve(EmbeddedEngineSettings(port=0, model=str(llama), context_length=1025))
    for name, value in {"tokenizer": "embedded", "script": tmp_path, "latency": 0.1}.items():
        with pytest.raises(UsageError, match=f"--{name} cannot be combined with --model"):
            await serve(EmbeddedEngineSettings(port=0, model=str(llama), **{name: value}))
