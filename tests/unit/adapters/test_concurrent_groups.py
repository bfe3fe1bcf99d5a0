"""Eight groups of four samples at once through each adapter that takes an SGLang server's address.

The oracle is the engine's log alone: each session's requests give one sample, and no other.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from support import framework_engines as engines
from support import miles_mirror, slime_mirror, verl_mirror
from support.desk_episodes import DESK, TASKS, known_tasks, openings
from support.slime_trainer import arguments, reference_lines
from support.trl_mirror import a_trainer

from toolroll.agents.text_agent import TextAgent
from toolroll.parsers.openai import from_openai
from toolroll.rollout.adapters import slime
from toolroll.rollout.adapters.atropos import ManagedServers
from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.adapters.miles import generate
from toolroll.rollout.adapters.skyrl import ToolrollGenerator
from toolroll.rollout.adapters.trl import make_rollout_func
from toolroll.rollout.adapters.verl import ToolrollAgentLoop, agent_loop
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    load_embedded_tokenizer,
)
from toolroll.rollout.types import EnvironmentOptions

GROUPS = known_tasks()[:8]
SAMPLES = 4
ASKED = [index for index in GROUPS for _ in range(SAMPLES)]
SETTINGS: dict[str, Any] = {"env": "desk", "parser": "hermes", "verify": "always"}
PARAMS = {"max_new_tokens": 256, "temperature": 1.0}
OPENINGS = {index: openings()[TASKS[index].id] for index in GROUPS}


@dataclass(frozen=True)
class Tokens:
    """One sequence. `trained`: position -> (id, logprob) of the tokens with mask 1."""

    ids: tuple[int, ...]
    trained: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, prompt: Any, response: Any, mask: Any, logprobs: Any) -> Tokens:
        before = len(prompt)
        return cls(
            (*prompt, *response),
            tuple(
                (before + at, logprob)
                for at, (one, logprob) in enumerate(zip(mask, logprobs, strict=True))
                if one
            ),
        )


def task_of(text: str) -> int:
    return max(
        (index for index, opening in OPENINGS.items() if opening in text),
        key=lambda index: len(OPENINGS[index]),
    )


def policy(request: PolicyRequest) -> str:
    """Play the reference; each session says something of its own, and some give up early."""
    mind = random.Random(f"{zlib.crc32(request.routing_key.encode())}/{request.call}")
    lines = reference_lines(task_of(request.text))
    if mind.random() < 0.15:
        return f"I give up {mind.random()}. Goodbye."
    line = lines[request.call] if request.call < len(lines) else "Goodbye."
    return f"Word {mind.random()}. {line}"


def faults(request: PolicyRequest) -> Fault | None:
    """A server that is busy now and then, and changes its weights within some turns."""
    mind = random.Random(f"fault/{request.index}")
    if mind.random() < 0.1:
        return Fault(status=503)
    if mind.random() < 0.1:
        return Fault(weight_version="2", switch_after=2)
    return None


def oracle(engine: EmbeddedEngine, tokenizer: Any) -> dict[int, Counter[Tokens]]:
    """The sequences by task, from the engine's log."""
    sessions: dict[str, list[Any]] = defaultdict(list)
    for entry in sorted(engine.log, key=lambda one: one.arrival):
        if entry.status == 200:
            sessions[entry.routing_key].append(entry)
    found: dict[int, Counter[Tokens]] = defaultdict(Counter)
    for requests in sessions.values():
        ids: list[int] = []
        trained: list[tuple[int, float]] = []
        for entry in requests:
            prompt = entry.input_ids.tolist()
            assert prompt[: len(ids)] == ids, "a prompt is not what was served before"
            trained += [(len(prompt) + at, value) for at, value in enumerate(entry.logprobs)]
            ids = [*prompt, *entry.output_ids]
        index = task_of(tokenizer.decode(requests[0].input_ids))
        found[index][Tokens(tuple(ids), tuple(trained))] += 1
    return found


# --- adapters: the sequence of each of ASKED, in order --------------------------------------------


def slime_args(engine: EmbeddedEngine) -> Namespace:
    ip, port = engine.url.removeprefix("http://").split(":")
    return arguments(sglang_router_ip=ip, sglang_router_port=int(port))


def of_sample(sample: Any) -> Tokens:
    cut = len(sample.tokens) - sample.response_length
    return Tokens.of(
        sample.tokens[:cut], sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs
    )


async def with_slime(engine: EmbeddedEngine) -> list[Tokens]:
    args = slime_args(engine)
    samples = [miles_mirror.Sample(index=at, prompt=one) for at, one in enumerate(ASKED)]
    made = await asyncio.gather(*(slime.generate(args, one, dict(PARAMS)) for one in samples))
    return [of_sample(one) for one in made]


async def with_slime_rollout(engine: EmbeddedEngine) -> list[Tokens]:
    args = slime_args(engine)
    args.rollout_batch_size = args.over_sampling_batch_size = len(GROUPS)
    rows = [{"prompt": index} for index in GROUPS]
    source = slime_mirror.DataSource(slime_mirror.Sample, rows, n=SAMPLES)
    output = await asyncio.to_thread(slime.generate_rollout, args, 0, source)
    await asyncio.to_thread(slime.close_rollout)
    assert [len(group) for group in output.samples] == [SAMPLES] * len(GROUPS)
    return [of_sample(one) for group in output.samples for one in group]


async def with_miles(engine: EmbeddedEngine) -> list[Tokens]:
    state = miles_mirror.GenerateState(slime_args(engine))
    samples = [miles_mirror.Sample(index=at, prompt=one) for at, one in enumerate(ASKED)]
    given = [miles_mirror.GenerateFnInput(state, one, dict(PARAMS), False) for one in samples]
    made = await asyncio.gather(*map(generate, given))
    return [of_sample(one.samples) for one in made]


async def with_trl(engine: EmbeddedEngine) -> list[Tokens]:
    rollout = make_rollout_func(dict(SETTINGS), engine=engine.url)
    output = await asyncio.to_thread(rollout, [str(one) for one in ASKED], a_trainer())
    await asyncio.to_thread(rollout.close)
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    return [Tokens.of(*one) for one in zip(*(output[name] for name in names), strict=True)]


class Program(TextAgent):
    def __init__(self, create: Any) -> None:
        super().__init__(Threads(1))
        self._create = create

    async def reply(
        self, messages: Any, tools: Any, sampling_params: Any, session_id: str
    ) -> AssistantTurn:
        found = await self._create(messages=list(messages), tools=list(tools), max_tokens=256)
        message = found.choices[0].message.model_dump(exclude_none=True)
        return AssistantTurn(from_openai(message), message)


async def with_atropos(engine: EmbeddedEngine) -> list[Tokens]:
    server = SimpleNamespace(
        config=SimpleNamespace(
            base_url=f"{engine.url}/v1", api_key="x", timeout=60, server_type="sglang",
            model_name="embedded", tokenizer_name="none",
        ),
        sem=asyncio.Semaphore(16), eval_sem=asyncio.Semaphore(4), server_healthy=True,
    )  # fmt: skip
    manager = SimpleNamespace(servers=[server], use_proxy=False, tool_parser="hermes")
    servers, tokenizer = ManagedServers(manager), load_embedded_tokenizer()

    async def one(index: int) -> Tokens:
        async with servers.managed_server(tokenizer=tokenizer) as managed:
            create: Any = managed.chat_completion
            await Program(create).asolve(DESK.make(EnvironmentOptions()), task=TASKS[index])
            (node,) = managed.get_state()["nodes"]
        return Tokens.of(
            [], node.tokens, [one != -100 for one in node.masked_tokens], node.logprobs
        )

    return await asyncio.gather(*map(one, ASKED))


async def with_skyrl(engine: EmbeddedEngine) -> list[Tokens]:
    config = engines.GeneratorConfig(max_turns=30)
    config.sampling_params.max_generate_length = 256
    client = engines.SkyrlClient(engine.url)
    own = ToolrollGenerator(config, load_embedded_tokenizer(), client, EpisodeSettings(**SETTINGS))
    ids = [engines.TrajectoryID(str(one), at % SAMPLES) for at, one in enumerate(ASKED)]
    prompts = [[{"role": "user", "content": str(one)}] for one in ASKED]
    output = await own.generate({"prompts": prompts, "trajectory_ids": ids})
    await own.aclose()
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return [Tokens.of(*one) for one in zip(*(output[name] for name in names), strict=True)]


async def with_verl(engine: EmbeddedEngine) -> list[Tokens]:
    async with aiohttp.ClientSession() as http:
        given = verl_mirror.loop_arguments(
            verl_mirror.Servers(engine.url, http), load_embedded_tokenizer()
        )

        async def one(index: int) -> Tokens:
            loop = ToolrollAgentLoop(**given, settings=dict(SETTINGS))
            made = await loop.run(
                {"temperature": 1.0, "logprobs": True}, extra_info={"index": index}, raw_prompt=[]
            )
            return Tokens.of(
                made.prompt_ids, made.response_ids, made.response_mask, made.response_logprobs
            )

        found = await asyncio.gather(*map(one, ASKED))
        for player in agent_loop._players.pop():
            await player.aclose()
    return found


ADAPTERS: dict[str, Callable[[EmbeddedEngine], Awaitable[list[Tokens]]]] = {
    "slime": with_slime,
    "slime rollout": with_slime_rollout,
    "miles": with_miles,
    "trl": with_trl,
    "atropos": with_atropos,
    "skyrl": with_skyrl,
    "verl": with_verl,
}
pytestmark = pytest.mark.slow
OWN_HTTP = {"skyrl", "verl"}
"""Their mirrors post to the engine themselves, without retries."""


@pytest.mark.parametrize("name", ADAPTERS)
async def test_each_sample_is_one_session_of_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    miles_mirror.install(monkeypatch)
    slime_mirror.install(monkeypatch)
    verl_mirror.install(monkeypatch)
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(
        tokenizer, policy, faults=None if name in OWN_HTTP else faults, split="random"
    ) as engine:
        made = await ADAPTERS[name](engine)
        await slime.aclose()
        known = oracle(engine, tokenizer)
        refused = [entry for entry in engine.log if entry.status == 503]
    assert bool(refused) == (name not in OWN_HTTP) and len(made) == len(ASKED)
    for index in GROUPS:
        mine = Counter(one for one, task in zip(made, ASKED, strict=True) if task == index)
        assert mine == known[index] and mine.total() == SAMPLES
