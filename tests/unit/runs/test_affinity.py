"""Which samples of a task a router sends to one worker."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.client import client, request
from support.episodes import agent
from support.http import router_over
from support.toy_environment import PondFactory, look

from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import ROUTING_KEY, Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import EmbeddedEngine, Reply

SAMPLES = 6


async def keys_of_a_run(tokenizer: Any, engine: EmbeddedEngine, url: str, affinity: int) -> Any:
    """The routing keys of a run of one task with one turn, each with the number of its requests."""
    template, factory = ChatTemplate(tokenizer), PondFactory(1)
    calls = Engine(EngineConfig(engine=url, vocab_size=len(tokenizer)))
    settings = RunSettings(samples=SAMPLES, affinity=affinity, sampling_params={"temperature": 1.0})
    async with Model(calls, template, get_parser("hermes", template.encoder.control)) as model:
        runner = Runner(factory, lambda: agent(model, verify="off"), settings)
        await runner.run(factory.tasks("test"), lambda episode: None)
    return Counter(entry.routing_key for entry in engine.log)


@pytest.mark.parametrize("affinity", [1, 4])
async def test_samples_of_a_task_share_a_key_behind_a_router(tokenizer: Any, affinity: int) -> None:
    async with EmbeddedEngine(tokenizer, look) as engine, router_over(engine.url) as url:
        keys = await keys_of_a_run(tokenizer, engine, url, affinity)
    first = [sample - sample % affinity for sample in range(SAMPLES)]
    assert keys == Counter(f"pond/t-0#{sample}" for sample in first)


async def test_without_a_router_each_episode_keeps_its_own_key(tokenizer: Any) -> None:
    async with EmbeddedEngine(tokenizer, look) as engine:
        keys = await keys_of_a_run(tokenizer, engine, engine.url, 4)
    assert keys == Counter(f"pond/t-0#{sample}" for sample in range(SAMPLES))


async def test_other_sessions_keep_their_own_key(tokenizer: Any) -> None:
    """A server that one episode starts would send the requests of all to its worker."""
    ROUTING_KEY.set(("first", "group"))
    async with (
        EmbeddedEngine(tokenizer, lambda seen: Reply("Hi.")) as engine,
        router_over(engine.url) as url,
        client(url, model_info=None, context_length=1000, vocab_size=5000) as calls,
    ):
        for session in ("first", "second"):
            await calls.generate(request(session=session))
    assert [entry.routing_key for entry in engine.log] == ["group", "second"]
