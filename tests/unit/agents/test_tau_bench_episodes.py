"""tau-bench's tasks as whole episodes: agent, tokens, engine, parser, environment, and a model
that plays the user.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from support.episodes import judge, serving
from support.tau import STOP, TauBench

from toolroll.agents.environments.tau_bench import TauBenchFactory
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.agents.users import OpenAIUsers, UserConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import EnvironmentOptions, InteractionResult, Task
from toolroll.testing import (
    EmbeddedEngine,
    PolicyRequest,
    play_references,
    reference_policy,
)


def _user(request: PolicyRequest) -> str:
    """Speaks once, and is content with whatever it then hears."""
    return STOP if request.text.count("<|turn|>assistant") > 1 else "I need help."


async def _played(
    factory: TauBenchFactory, task: Task, model: Model, users: OpenAIUsers
) -> InteractionResult:
    agent = TrainableToolCallingAgent(
        model=model,
        rollout_args={"verify": "off"},
        sampling_params={"max_new_tokens": 2048, "temperature": 0.0},
    )
    env = factory.make(EnvironmentOptions(user=users.make))
    return await agent.asolve(
        env, task=task, session_id=f"{factory.name}/{task.id}#0", max_num_steps=40
    )


@pytest.mark.parametrize(("domain", "split"), [("retail", "test"), ("airline", "test")])
async def test_reference_actions_pass_as_tokens(
    tau: TauBench, tokenizer: Any, domain: str, split: str, record_property: Any
) -> None:
    """What a model would have to write is read as the calls that the benchmark means, and every
    token is as served.
    """
    factory = tau.factory(domain)
    tasks = factory.tasks(split)
    policy = reference_policy(play_references(factory, tasks, samples=1))
    async with (
        EmbeddedEngine(tokenizer, _user) as user,
        serving(tokenizer, policy) as (engine, model),
        OpenAIUsers(UserConfig(base_url=f"{user.url}/v1", model="u")) as users,
    ):
        results = await asyncio.gather(*(_played(factory, task, model, users) for task in tasks))
    failed = {
        task.id: (r.reward, r.stop_reason, r.metrics)
        for task, r in zip(tasks, results, strict=True)
        if r.reward != 1.0
    }
    assert failed == {}
    for task, result in zip(tasks, results, strict=True):
        judge(result, engine, f"{factory.name}/{task.id}#0")
        assert STOP not in tokenizer.decode(result.tokens), (
            "the last word of the user's is sampled from by nobody"
        )
    record_property(
        "figure",
        f"{domain}/{split}: reference as tokens "
        f"{Counter(r.reward for r in results)[1.0]}/{len(tasks)}",
    )
