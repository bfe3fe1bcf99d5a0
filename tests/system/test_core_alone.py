"""The core without the packages around it: it imports, and plays an episode."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from support.processes import printed
from support.source import AROUND, ROOT

_CODE = '''
import asyncio, importlib, pkgutil, sys

import orjson
from aiohttp import web

import toolroll
from toolroll import Model, RolloutArgs, TrainableToolCallingAgent, tool_environment
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.types import EnvironmentOptions

assert toolroll.__file__.startswith(sys.argv[1]), toolroll.__file__
for module in pkgutil.walk_packages(toolroll.__path__, "toolroll."):
    if module.name != "toolroll.__main__":  # starts the command
        importlib.import_module(module.name)

CALL = """<tool_call>
{"name": "look", "arguments": {"key": "door"}}
</tool_call>"""


def look(key: str) -> str:
    """Look at something.

    Args:
        key: Its name.
    """
    return f"the {key} is open"


async def main() -> None:
    tokenizer = load_tokenizer("embedded")
    stop = tokenizer.eos_token_id
    said, prompts = [CALL, "It is open."], []

    async def generate(request):
        body = await request.json(loads=orjson.loads)
        prompts.append(body["input_ids"])
        ids = [*tokenizer.encode(said[len(prompts) - 1], add_special_tokens=False), stop]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": stop},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    environment = tool_environment(
        tools=[look],
        tasks=[{"prompt": "Is the door open?"}],
        reward=lambda final: float("open" in final),
    )
    args = RolloutArgs(engine=f"http://127.0.0.1:{port}", model="embedded", parser="hermes")
    async with Model.from_args(args) as model:
        agent = TrainableToolCallingAgent(model=model)
        [task] = environment.tasks("test")
        result = await agent.asolve(environment.make(EnvironmentOptions()), task=task)
    await runner.cleanup()
    assert (result.status.value, result.reward) == ("completed", 1.0), result
    [trajectory] = result.trajectories
    assert trajectory.input_ids[: len(prompts[1])].tolist() == prompts[1]
    assert [turn.stop - turn.start for turn in trajectory.turns] == [
        trajectory.loss_mask[turn.start : turn.stop].sum() for turn in trajectory.turns
    ]
    assert len(prompts) == 2
    mismatches = [name for name in result.metrics if name.startswith("token_mismatches")]
    assert not mismatches, mismatches


asyncio.run(main())
'''


def test_the_core_plays_alone(tmp_path: Path) -> None:
    copy = tmp_path / "toolroll"
    shutil.copytree(
        ROOT / "src" / "toolroll", copy, ignore=lambda _, names: {"__pycache__"} & {*names}
    )
    for package in AROUND:
        shutil.rmtree(copy / package)
    printed("-c", _CODE, tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
