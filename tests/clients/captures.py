"""`python -m clients.captures`: let a program with Claude Code's requests ask this library's
endpoint, slime's adapter and OpenEnv's capture server, and print what they would train.

All have Qwen3.5's chat template, and the same scripted engine. slime must be importable, with
`tests/support/stubs` for its parsers, which are SGLang's. `--openenv` names an interpreter that has
OpenEnv. TOOLROLL_TEST_DATA must name a folder with the template.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from support.episodes import opened_model
from support.http import app_server
from support.processes import serving
from support.qwen import extra_templates, tokenizer_for

from toolroll.endpoint import Endpoint, EndpointServer, EndpointSettings
from toolroll.parsers.infer import infer_parser
from toolroll.parsers.openai import to_openai
from toolroll.parsers.registry import get_parser
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import EmbeddedEngine, PolicyRequest

TURNS, ROLLOUTS = 8, 8
"""Turns of the main conversation, and rollouts."""
HEAD = """\
| capture | sequences | false forks | tokens | sampled | trained |
|---|---|---|---|---|---|"""
PROGRAM = Path(__file__).parents[1] / "support" / "claude_shape.py"
OPENENV = """
import sys, uvicorn
from openenv.core.harness.capture.server import create_app
app = create_app(llm_url=sys.argv[1], model="m")
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""
Sequences = list[tuple[int, int]]
"""The number of tokens and of trained tokens of each sequence."""
Captured = tuple[str, Callable[[str], Awaitable[Sequences]]]
"""The address of a capture, and how to get what it has of a session."""


def reply(request: PolicyRequest) -> str:
    """A long thought, and a call that writes to a file."""
    if "Give a title." in request.text:
        return "\n</think>\n\nA title."
    turn = request.text.count("<|im_start|>assistant")
    thought = f"Step {turn}." + " go" * 1200  # slime may leave out turns below 1,024 tokens
    if turn == TURNS:
        return f"{thought}\n</think>\n\nDone."
    call = f"<function=Bash>\n<parameter=command>\necho {turn} >> a\n</parameter>\n</function>"
    return f"{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


@asynccontextmanager
async def ours(
    tokenizer: Any, url: str, http: aiohttp.ClientSession, history: Any
) -> AsyncIterator[Captured]:
    """This library's endpoint."""
    template, parser = ChatTemplate(tokenizer, history=history), infer_parser(tokenizer, None)
    async with (
        opened_model(url, tokenizer, parser, template=template) as model,
        EndpointServer(Endpoint(model, EndpointSettings(port=0, verify="always"))) as server,
    ):

        async def sequences(session: str) -> Sequences:
            async with http.get(f"{server.url}/sessions/{session}/trajectories") as response:
                parts = (await response.json())["trajectories"]
            return [(len(part["input_ids"]), sum(part["loss_mask"])) for part in parts]

        yield f"{server.url}/sessions/{{session}}", sequences


@asynccontextmanager
async def slime(tokenizer: Any, url: str) -> AsyncIterator[Captured]:
    """slime's adapter, which takes the session from the key."""
    from slime.agent.adapters.anthropic import AnthropicAdapter
    from slime.utils.types import Sample

    adapter = AnthropicAdapter(
        tokenizer=tokenizer, sglang_url=url, tool_parser="qwen3_coder", reasoning_parser="qwen3"
    )

    async def sequences(session: str) -> Sequences:
        sample = Sample(index=0, group_index=0, prompt="")
        samples = await adapter.finish_session(session, base_sample=sample)
        return [(len(each.tokens), sum(each.loss_mask)) for each in samples]

    async with app_server(adapter.app) as address:
        yield address, sequences


@asynccontextmanager
async def openenv(
    tokenizer: Any, url: str, http: aiohttp.ClientSession, python: str
) -> AsyncIterator[Captured]:
    """OpenEnv's capture server, before an engine that encodes the messages of each request."""
    parser = get_parser(infer_parser(tokenizer, None), ChatTemplate(tokenizer).encoder.control)

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        messages = [as_rendered(message) for message in body["messages"]]
        prompt = tokenizer.apply_chat_template(
            messages, tools=body.get("tools"), add_generation_prompt=True
        )["input_ids"]
        params = {"max_new_tokens": body["max_tokens"]}
        asked = {"input_ids": prompt, "return_logprob": True, "sampling_params": params}
        async with http.post(f"{url}/generate", json=asked) as response:
            logprobs = (await response.json())["meta_info"]["output_token_logprobs"]
        sampled = [entry[1] for entry in logprobs]
        text = tokenizer.decode(sampled).removesuffix("<|im_end|>")
        parsed = parser.parse(text, tools=body.get("tools"), in_reasoning=True)
        message = to_openai(parsed)
        message["reasoning"] = message.pop("reasoning_content", None)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "token_ids": sampled,
            "logprobs": {"content": [{"token": "", "logprob": entry[0]} for entry in logprobs]},
        }
        return web.json_response({"id": "1", "prompt_token_ids": prompt, "choices": [choice]})

    async def sequences(session: str) -> Sequences:
        async with http.get(f"{server.url}/sessions/{session}/rollout") as response:
            rows = (await response.json())["sequences"]
        return [(len(each["input_ids"]), each["n_trainable"]) for each in rows if each["trainable"]]

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", complete)
    async with app_server(app) as engine:
        with tempfile.TemporaryDirectory() as folder:
            command = lambda port: (python, "-c", OPENENV, engine, str(port))
            log = Path(folder) / "log"
            with serving(
                command, ready="/health", environment=os.environ, log=log, name="OpenEnv"
            ) as server:
                yield server.url, sequences


def as_rendered(message: dict[str, Any]) -> dict[str, Any]:
    """A message of vLLM's API as its chat template gets it."""
    calls = [
        {
            "type": "function",
            "function": {**function, "arguments": json.loads(function["arguments"])},
        }
        for function in (each["function"] for each in message.get("tool_calls") or ())
    ]
    thoughts = {"reasoning_content": message["reasoning"]} if message.get("reasoning") else {}
    return {**message, **thoughts, **({"tool_calls": calls} if calls else {})}


async def rollout(address: str, session: str) -> None:
    """Let the program play one rollout."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "INSTRUCTION": "Write the numbers to a.",
            "ANTHROPIC_BASE_URL": address.format(session=session),
            "ANTHROPIC_API_KEY": session,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # as slime starts Claude Code
            "PATH": os.environ["PATH"],
        }
        command = [sys.executable, "-c", PROGRAM.read_text()]
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, env=env, cwd=folder, stdout=silent)
        assert await process.wait() == 0


async def row(name: str, python: str) -> str:
    """The row of the capture `name`."""
    tokenizer = tokenizer_for(extra_templates()["qwen3_5_think"])
    async with (
        aiohttp.ClientSession() as http,
        EmbeddedEngine(tokenizer, reply, context_length=200_000) as engine,
    ):
        url = engine.url
        others = {
            "slime": lambda: slime(tokenizer, url),
            "OpenEnv": lambda: openenv(tokenizer, url, http, python),
        }
        capture = others.get(name, lambda: ours(tokenizer, url, http, name))
        captured: Sequences = []
        async with capture() as (address, sequences):
            for number in range(ROLLOUTS):
                session = f"rollout-{number}"
                if name == "OpenEnv":
                    await http.post(f"{address}/sessions", json={"session_id": session})
                await rollout(address, session)
                captured += await sequences(session)
        sampled = sum(len(entry.output_ids) for entry in engine.log if entry.status == 200)
    tokens, trained = (sum(each[column] for each in captured) for column in (0, 1))
    true = 1 if name == "OpenEnv" else 2  # OpenEnv leaves titles out
    false = len(captured) - ROLLOUTS * true
    label = name if name in others else f"toolroll, `{name}`"
    return (
        f"| {label} | {len(captured)} | {false} | {tokens:,} | {sampled:,} | "
        f"{trained:,} ({trained / sampled:.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["preserve", "fork", "slime", "OpenEnv"])
    parser.add_argument("--openenv", default="python3", help="a Python that has OpenEnv")
    options = parser.parse_args()
    print(HEAD, flush=True)
    for name in options.names:
        print(asyncio.run(row(name, options.openenv)), flush=True)


if __name__ == "__main__":
    main()
