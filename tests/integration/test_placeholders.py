"""A policy that samples an image placeholder, on the real server."""

from __future__ import annotations

import json
from pathlib import Path

from support.episodes import opened_model
from support.listed_environment import ListedWorld
from support.processes import Server
from support.qwen import qwen3_tokenizer
from support.wire import Wire

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.types import Status, StopReason, Task

IMAGE = 151_655  # <|image_pad|> of Qwen3's tokenizer


async def test_the_server_stops_there(
    sglang_float32: Server, float32: Wire, tmp_path: Path
) -> None:
    tokenizer = qwen3_tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE}), encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    async with opened_model(sglang_float32.url, tokenizer, "qwen25") as model:
        player = TrainableToolCallingAgent(model=model, rollout_args={"verify": "always"})
        result = await player.asolve(
            ListedWorld(user_texts=["Go."], system="You are an agent."),
            None,
            {"temperature": 1.0, "max_new_tokens": 24, "logit_bias": {str(IMAGE): 300.0}},
            task=Task("t", 0),
            session_id="placeholder",
        )
    assert (result.stop_reason, result.status) == (StopReason.PLACEHOLDER, Status.TRUNCATED)
    assert result.reward is not None and IMAGE not in result.tokens
    assert result.response_length == 0
    assert await float32.running() == 0
