"""The whole loop on an engine that answers at once: CPU of whole live episodes, 64 at once, for
toolroll, a tight loop, and the loops of other projects.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import tight
from benchmarks.clock import cpu
from benchmarks.conversations import tokenizer, workload
from benchmarks.peers import (
    missing,
    published_delta,
    published_payload,
    strands_message,
    strands_tool,
)
from benchmarks.stub import stub
from benchmarks.tables import Required, Table, number, spread
from benchmarks.world import TURNS, Material, RecordedFactory, call_of, material, replies
from toolroll.agents.tool_calling import make_agent
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import ToolCall
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.environment import Action, EnvironmentOptions
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.episode_file import EpisodeStore
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.verifier_pool import POOL
from toolroll.rollout.types import Message, Status

OURS, UNVERIFIED, TIGHT = "toolroll", 'toolroll, verify="off"', "tight loop"
STRANDS, AIOHTTP, HTTPX = "strands-sglang", "published loop, aiohttp", "published loop, httpx"
OTHERS = {"tight": TIGHT, "strands": STRANDS, "aiohttp": AIOHTTP, "httpx": HTTPX}
LIMITS = (
    (UNVERIFIED, STRANDS, 1.0),
    (OURS, AIOHTTP, 1.0),
    (OURS, HTTPX, 0.5),
)
"""The required ratios: CPU per turn of the first over that of the second, and the limit."""
AT_ONCE = 64
PARAMS = tight.PARAMS
STRANDS_PACKAGE = ("strands-sglang 0.6.2", "strands_sglang")

Loop = Callable[[str, Any, Material, int], Awaitable[None]]
"""Plays a number of concurrent episodes against the stub at an address."""


@cache
def warm_template(tok: Any) -> ChatTemplate:
    """Return one template for the whole run, like a process that shares it among episodes."""
    return ChatTemplate(tok)


def served_model(url: str, tok: Any, engine: type[Engine] = Engine) -> Model:
    """Return our model on the stub."""
    template = warm_template(tok)
    config = EngineConfig(engine=url, context_length=200_000, vocab_size=len(tok))
    return Model(engine(config), template, get_parser("hermes", template.encoder.control))


# --- the loops ------------------------------------------------------------------------------------


async def ours(
    url: str, tok: Any, given: Material, episodes: int, *, verify: str = "sample"
) -> None:
    """Play with the runner, including metrics, verification and the episode file."""
    factory = RecordedFactory(given)
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(Path(folder)) as store:
        async with served_model(url, tok) as served:

            def done(episode: Any) -> None:
                assert episode.result.status is not Status.ABORTED, episode.result.info
                assert episode.result.metrics["turns"] == TURNS
                store.append(episode)

            agent = lambda: make_agent(served, {"verify": verify, "parallel_calls": "first"})
            settings = RunSettings(sampling_params=PARAMS, concurrency=episodes, max_turns=TURNS)
            await Runner(factory, agent, settings).run(factory.tasks("test")[:episodes], done)


async def tight_loop(url: str, tok: Any, given: Material, episodes: int) -> None:
    """Play with the tight loop."""
    factory = RecordedFactory(given)
    await tight.run(url, tok, factory, factory.tasks("test")[:episodes], episodes)


Post = Callable[[str, Any], Awaitable[Any]]


async def published_with_httpx(url: str, tok: Any, given: Material, episodes: int) -> None:
    """Play the published loop with the client of slime's `init_http_client` and `_post`."""
    import httpx

    limits = httpx.Limits(max_connections=episodes)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:

        async def post(address: str, payload: Any) -> Any:
            response = await http.post(address, json=payload)
            response.raise_for_status()
            return json.loads(await response.aread())

        await published(url, tok, given, post, episodes)


async def published_with_aiohttp(url: str, tok: Any, given: Material, episodes: int) -> None:
    """Play the published loop with aiohttp as its client."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def post(address: str, payload: Any) -> Any:
            async with http.post(address, json=payload) as response:
                return json.loads(await response.read())

        await published(url, tok, given, post, episodes)


async def published(url: str, tok: Any, given: Material, post: Post, episodes: int) -> None:
    """Play with the loop of slime's tau-bench example: text payloads, and ids by differences of
    renders. Its parser, which costs little, is replaced by a search.
    """
    factory = RecordedFactory(given)

    async def play(task: Any) -> None:
        env = factory.make(EnvironmentOptions())
        observation = await env.reset(task, 0)
        messages: list[Message] = list(observation.messages)
        text = published_payload(tok, messages, given.tools)
        ids: list[int] = []
        mask: list[int] = []
        tok(text, add_special_tokens=False)
        done = False
        while not done:
            text = published_payload(tok, messages, given.tools)
            answer = await post(f"{url}/generate", {"text": text, "sampling_params": PARAMS})
            said = answer["text"].removesuffix("<|im_end|>")
            messages.append({"role": "assistant", "content": said})
            new = published_delta(tok, messages)
            ids += new
            mask += [1] * len(new)
            call = call_of(said)
            calls = (ToolCall(*call, "", id="call"),) if call else ()
            result = await env.step(Action(said, calls))
            done = result.done
            for message in result.messages:
                messages.append(message)
                new = published_delta(tok, messages)
                ids += new
                mask += [0] * len(new)

    await asyncio.gather(*map(play, factory.tasks("test")[:episodes]))


async def strands(url: str, tok: Any, given: Material, episodes: int) -> None:
    """Play with strands-sglang's model and client, without the Agent loop of strands."""
    import strands_sglang

    logging.getLogger("strands_sglang").setLevel(logging.ERROR)
    specs: Any = [strands_tool(tool) for tool in given.tools]
    factory = RecordedFactory(given)

    async def play(client: Any, task: Any) -> None:
        env = factory.make(EnvironmentOptions())
        first = list((await env.reset(task, 0)).messages)
        model = strands_sglang.SGLangModel(
            client=client, tokenizer=tok, enable_thinking=False, sampling_params=PARAMS
        )
        messages: list[Any] = [strands_message(message) for message in first[1:]]
        done = False
        while not done:
            uses, said = [], ""
            async for event in model.stream(messages, specs, first[0]["content"]):
                delta = event.get("contentBlockDelta", {}).get("delta", {})
                said += delta.get("text", "")
                start = event.get("contentBlockStart", {}).get("start", {})
                uses += [start["toolUse"]] if start.get("toolUse") else []
            messages.append({"role": "assistant", "content": [{"text": said}]})
            calls = tuple(ToolCall(use["name"], {}, "", id=use["toolUseId"]) for use in uses[:1])
            result = await env.step(Action(said, calls))
            messages += map(strands_message, result.messages)
            done = result.done

    async with strands_sglang.SGLangClient(url, max_connections=2048) as client:
        client._is_multimodal = False
        await asyncio.gather(*(play(client, task) for task in factory.tasks("test")[:episodes]))


# --- measurement ----------------------------------------------------------------------------------


@dataclass
class Cost:
    """CPU in microseconds per turn, of all processes and of the event loop's process, and turns per
    second of wall time.
    """

    cpu: float
    own: float
    rate: float


async def measured(loop: Loop, url: str, tok: Any, given: Material, episodes: int) -> Cost:
    """Return the cost of one run of `loop`."""
    gc.collect()
    turns = episodes * TURNS
    wall, own, used = time.perf_counter(), time.process_time(), cpu()
    await loop(url, tok, given, episodes)
    wall, own, used = time.perf_counter() - wall, time.process_time() - own, cpu() - used
    return Cost(used / turns * 1e6, own / turns * 1e6, turns / wall)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, talks = tokenizer(), workload()
    given = material(talks)
    loops: dict[str, Loop] = {
        TIGHT: tight_loop,
        UNVERIFIED: partial(ours, verify="off"),
        OURS: ours,
        AIOHTTP: published_with_aiohttp,
        HTTPX: published_with_httpx,
    }
    why = missing(*STRANDS_PACKAGE)
    if why is None:
        loops[STRANDS] = strands
    costs: dict[str, list[Cost]] = {name: [] for name in loops}
    names = list(loops)
    with stub(replies(talks, tok)) as url:
        for loop in loops.values():
            asyncio.run(measured(loop, url, tok, given, 4))  # imports and caches
        asyncio.run(measured(ours, url, tok, given, POOL.after))
        POOL.ready.wait(60)  # its start would be part of one round
        episodes, rounds = (32, 2) if quick else (AT_ONCE, 5)
        for number_of_round in range(rounds):
            shift = number_of_round % len(names)
            for name in names[shift:] + names[:shift]:
                costs[name].append(asyncio.run(measured(loops[name], url, tok, given, episodes)))
    return table(costs, episodes, why)


def table(costs: dict[str, list[Cost]], episodes: int, why: str | None) -> Table:
    """Tabulate medians and ranges."""
    made = Table(
        f"Whole episodes on an engine without latency: {episodes} at once, {TURNS} turns each",
        [
            "loop",
            "us of CPU per turn",
            "in all rounds",
            "in the event loop's process",
            "turns/s",
            "toolroll costs, times this",
        ],
    )
    for name, runs in costs.items():
        amounts = [cost.cpu for cost in runs]
        ratio = toolroll_over(name, costs)
        rate = number(statistics.median(cost.rate for cost in runs))
        own = number(statistics.median(cost.own for cost in runs))
        row = [name, number(statistics.median(amounts)), spread(amounts), own, rate, number(ratio)]
        made.rows.append(row)
    made.figures["loop.cpu"] = statistics.median(cost.cpu for cost in costs[OURS]) / 1000
    unverified = statistics.median(cost.cpu for cost in costs[UNVERIFIED]) / 1000
    made.figures["loop.verify_share"] = 100 * (1 - unverified / made.figures["loop.cpu"])
    made.figures["loop.own"] = statistics.median(cost.own for cost in costs[OURS]) / 1000
    made.figures["loop.rate"] = statistics.median(cost.rate for cost in costs[OURS])
    for key, name in OTHERS.items():
        if name in costs:
            made.figures[f"loop.over_{key}"] = toolroll_over(name, costs)
            made.figures[f"loop.unverified_over_{key}"] = toolroll_over(name, costs, UNVERIFIED)
    made.required += [
        Required(f"CPU per turn, {mine} over {other}", toolroll_over(other, costs, mine), limit)
        for mine, other, limit in LIMITS
        if other in costs
    ]
    made.notes += [
        f"Medians of {len(costs[OURS])} rounds with all rows in each.",
        "toolroll also validates calls against their schemas, and writes metrics and the episode "
        "file. The tight loop has no checks, traces or files.",
        "The published loop is that of slime's tau-bench example, which renders the whole "
        "conversation six times per turn. slime's client is httpx.",
    ]
    made.notes += [f"Skipped: {why}."] if why else []
    return made


def toolroll_over(name: str, costs: dict[str, list[Cost]], ours: str = OURS) -> float:
    """Return the CPU of `ours` over that of `name`: the median of the ratios in each round."""
    pairs = zip(costs[ours], costs[name], strict=True)
    return statistics.median(mine.cpu / other.cpu for mine, other in pairs)
