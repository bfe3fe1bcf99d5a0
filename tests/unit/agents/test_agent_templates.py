"""Which chat template an agent renders with, and what an episode's info keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.episodes import serving
from support.listed_environment import ListedWorld

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.types import Task

pytestmark = pytest.mark.tokens


def _agent(
    model: Any, kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent
) -> TrainableToolCallingAgent:
    return kind(model=model, sampling_params={"max_new_tokens": 64})


async def test_all_agents_share_the_template_that_asks_for_one_call_a_turn(tokenizer: Any) -> None:
    """One of its own for each episode would encode everything again."""
    async with serving(tokenizer, lambda request: "Goodbye.") as (_, model):
        agents = [_agent(model) for _ in range(3)]
        for agent in agents:
            await agent.asolve(ListedWorld(), task=Task("t", 0))
        templates = {id(agent._template(model.template, agent.policy)) for agent in agents}
        assert len(templates) == 1 and model.template is not agents[0]._template(
            model.template, agents[0].policy
        )
        template = agents[0]._template(model.template, agents[0].policy)
        assert template is not None and template.encoder is model.template.encoder


class Polite(TrainableToolCallingAgent):
    """Rewrites the head in its own way."""

    def _reformulate_tool_call(self, text: str) -> str:
        return text.replace("Be helpful.", f"Be polite, {self.provider or 'please'}.")


async def test_an_overridden_rewriting_is_its_agent_s_own_and_goes_with_it(tokenizer: Any) -> None:
    async with serving(tokenizer, lambda request: "Goodbye.") as (engine, model):
        agent = _agent(model, Polite)
        agent.provider = "you"
        result = await agent.asolve(ListedWorld(), task=Task("t", 0))
        other = await _agent(model, Polite).asolve(ListedWorld(), task=Task("t", 0))
        assert "Be polite, you." in result.prompt and "Be polite, please." in other.prompt
        assert "Be polite, you." in tokenizer.decode(engine.log[0].input_ids)
        gone = weakref.ref(agent)
        del agent
        gc.collect()
        assert gone() is None, "an episode's agent is kept for ever"
