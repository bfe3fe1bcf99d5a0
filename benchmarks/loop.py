"""The whole loop on an engine that answers at once: client CPU per turn, compared with two other
loops.

Requirement: per turn it costs no more than strands-sglang in the same run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.conversations import QWEN, tokenizer, workload
from benchmarks.peers import missing, strands_message, strands_tool
from benchmarks.stub import stub
from benchmarks.tables import Table, number, verdict
from benchmarks.world import Material, RecordedFactory, call_of, material
from toolroll.agents.tool_calling import make_agent
from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.episode_file import EpisodeStore
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status

TURNS = 20
OURS, STRANDS = "toolroll", "strands-sglang"
PARAMS = {"temperature": 1.0, "max_new_tokens": 512}


@dataclass
class Cost:
    """Client CPU in microseconds per turn, and turns per second of wall time."""

    cpu: float
    rate: float


Loop = Callable[[str, Any, Material, int], Awaitable[int]]
"""Plays a number of concurrent episodes against the stub at an address; returns the turns."""


@cache
def warm_template(tok: Any) -> ChatTemplate:
    """Return one template for the whole run, like a process that shares it among episodes."""
    return ChatTemplate(tok)


@cache
def warm_parser(tok: Any) -> ToolCallParser:
    """Return one parser for the whole run, like a process that shares it among episodes."""
    return get_parser("hermes", warm_template(tok).encoder.control)


def served_model(url: str, tok: Any, *, threads: int = 64) -> Model:
    """Return our model on the stub."""
    engine = Engine(EngineConfig(engine=url, context_length=200_000, vocab_size=len(tok)))
    return Model(engine, warm_template(tok), warm_parser(tok), threads=threads)


async def ours(
    url: str,
    tok: Any,
    given: Material,
    episodes: int,
    *,
    verify: str = "sample",
) -> int:
    """Play with the runner, including metrics, verification and the episode file."""
    factory = RecordedFactory(given, turns=TURNS)
    turns = 0
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(Path(folder)) as store:
        async with served_model(url, tok) as served:

            def done(episode: Any) -> None:
                nonlocal turns
                assert episode.result.status is not Status.ABORTED, episode.result.info
                turns += int(episode.result.metrics["turns"])
                store.append(episode)

            agent = lambda: make_agent(served, {"verify": verify, "parallel_calls": "first"})
            settings = RunSettings(sampling_params=PARAMS, concurrency=episodes, max_turns=TURNS)
            await Runner(factory, agent, settings).run(factory.tasks("test")[:episodes], done)
    return turns


async def published(url: str, tok: Any, given: Material, episodes: int) -> int:
    """Play with the published loop, written from its description: text payloads over httpx, full
    renders, deltas by diffs.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def play(http: httpx.AsyncClient, at: int) -> int:
        messages = list(given.first[at % len(given.first)])
        render = lambda generate: tok.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        ids: list[int] = []
        mask: list[int] = []
        for turn in range(TURNS):
            text = tok.apply_chat_template(
                messages, tools=given.tools, tokenize=False, add_generation_prompt=True
            )
            if not turn:
                tok(text, add_special_tokens=False)
            answer = await http.post(
                f"{url}/generate", json={"text": text, "sampling_params": PARAMS}
            )
            said = answer.json()["text"].removesuffix("<|im_end|>")
            call = call_of(said)
            for mine in (True, False):
                before = render(False)
                if mine:
                    messages.append({"role": "assistant", "content": said})
                elif call:
                    messages.append(
                        {
                            "role": "tool",
                            "name": call[0],
                            "content": given.results[(at + turn) % len(given.results)],
                        }
                    )
                else:
                    messages.append(
                        {"role": "user", "content": given.users[(at + turn) % len(given.users)]}
                    )
                new = tok.encode(render(False)[len(before) :], add_special_tokens=False)
                ids += new
                mask += [int(mine)] * len(new)
        return TURNS

    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        return sum(await asyncio.gather(*(play(http, at) for at in range(episodes))))


async def strands(url: str, tok: Any, given: Material, episodes: int) -> int:
    """Play with strands-sglang's model and client, without the Agent loop of strands."""
    import strands_sglang

    logging.getLogger("strands_sglang").setLevel(logging.ERROR)
    specs: Any = [strands_tool(tool) for tool in given.tools]

    async def play(client: Any, at: int) -> int:
        first = given.first[at % len(given.first)]
        model = strands_sglang.SGLangModel(
            client=client, tokenizer=tok, enable_thinking=False, sampling_params=PARAMS
        )
        messages: list[Any] = [strands_message(message) for message in first[1:]]
        for turn in range(TURNS):
            calls, said = [], ""
            async for event in model.stream(messages, specs, first[0]["content"]):
                delta = event.get("contentBlockDelta", {}).get("delta", {})
                said += delta.get("text", "")
                start = event.get("contentBlockStart", {}).get("start", {})
                calls += [start["toolUse"]] if start.get("toolUse") else []
            messages.append({"role": "assistant", "content": [{"text": said}]})
            if calls:
                result = {
                    "role": "tool",
                    "content": given.results[(at + turn) % len(given.results)],
                }
                messages.append(strands_message({**result, "tool_call_id": calls[0]["toolUseId"]}))
            else:
                messages.append(
                    strands_message(
                        {"role": "user", "content": given.users[(at + turn) % len(given.users)]}
                    )
                )
        return TURNS

    async with strands_sglang.SGLangClient(url, max_connections=2048) as client:
        client._is_multimodal = False
        return sum(await asyncio.gather(*(play(client, at) for at in range(episodes))))


async def measured(loop: Loop, url: str, tok: Any, given: Material, episodes: int) -> Cost:
    """Return the cost of one run of `loop`."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    turns = await loop(url, tok, given, episodes)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(cpu / turns * 1e6, turns / wall)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, load = tokenizer(), workload()
    given = material(load, tok)
    loops: dict[tuple[str, int], Loop] = {
        (OURS, 64): ours,
        ('toolroll, verify="off"', 64): partial(ours, verify="off"),
        ("published loop (httpx)", 64): published,
    }
    why = missing("strands-sglang 0.4.3", "strands_sglang")
    if why is None:
        loops[STRANDS, 64] = strands
    loops[OURS, 1024] = ours
    found: dict[tuple[str, int], list[Cost]] = {name: [] for name in loops}
    with stub(given.replies) as url:
        asyncio.run(measured(ours, url, tok, given, 64))  # imports and caches
        for _ in range(1 if quick else 3):
            for name, loop in loops.items():
                found[name].append(asyncio.run(measured(loop, url, tok, given, name[1])))
    return table(found, load.source, why)


def table(found: dict[tuple[str, int], list[Cost]], source: str, why: str | None) -> Table:
    """Tabulate the medians."""
    cpu = {name: statistics.median(cost.cpu for cost in costs) for name, costs in found.items()}
    made = Table(
        f"The whole loop on an engine without latency, {TURNS} turns per episode",
        ["loop", "episodes at once", "us of CPU per turn", "turns/s", "over toolroll at 64"],
    )
    base = cpu[OURS, 64]
    for name, value in cpu.items():
        rate = number(statistics.median(cost.rate for cost in found[name]))
        made.rows.append([name[0], f"{name[1]:,}", number(value), rate, f"{value / base:.2f}"])
    if (STRANDS, 64) in cpu:
        held = verdict(held=base <= cpu[STRANDS, 64])
        made.notes.append(f"Required: no more CPU per turn than {STRANDS}: {held}.")
    made.notes.append(
        f"{source}; template {QWEN}. toolroll also writes metrics and the episode file."
    )
    made.notes += [f"Skipped: {why}."] if why else []
    return made
