"""The rule for several calls in one turn is the environment's, as is the prompt that says so."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.episodes import call, serving
from support.listed_environment import ListedWorld

from toolroll.agents.environments.tau_bench.environment import TauBenchEnvironment
from toolroll.agents.loop.adapt import TauStyleEnvironment
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.text_agent import TextAgent
from toolroll.agents.tool_calling import TrainableToolCallingAgent, make_agent
from toolroll.agents.trainable import TrainableAgentMixin
from toolroll.environments.bfcl.environment import BfclEnvironment
from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.environment import Environment, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import Threads

TWO = call("look", at="a") + call("look", at="b")


class OneCall(ListedWorld):
    """Allows one call in each turn."""

    parallel_calls = "first"


class TwoCalls(TextAgent):
    """Makes two calls, then says that it is done."""

    async def reply(self, messages: Any, *args: Any) -> AssistantTurn:  # pyright: ignore[reportIncompatibleMethodOverride]
        calls = tuple(ToolCall("look", {"at": place}, "", id=place) for place in "ab")
        parsed = ParsedReply("Done.") if len(messages) > 2 else ParsedReply("", tool_calls=calls)
        return AssistantTurn(parsed, {"role": "assistant", "content": parsed.content})


def executed(environment: ListedWorld) -> int:
    return sum(len(action.tool_calls) for action in environment.seen)


@pytest.mark.parametrize("world", [ListedWorld, OneCall])
@pytest.mark.parametrize("given", [None, "all", "first", "refuse"])
async def test_training_and_evaluation_follow_one_rule(
    tokenizer: Any, world: type[ListedWorld], given: Any
) -> None:
    """The environment's, unless the user gives another one, which then holds for both."""
    settings = {} if given is None else {"parallel_calls": given}
    rule = given or world.parallel_calls
    task = Task("t", 0)
    trained, evaluated = world(tool_texts=["1", "2", "3"]), world(tool_texts=["1", "2", "3"])
    async with serving(tokenizer, lambda request: [TWO, "Done."][request.call]) as (_, model):
        agent = make_agent(model, settings)
        result = await agent.asolve(trained, task=task, session_id="s")
        template = agent._template(model.template, agent.policy.under(trained))
    assert result.info.get("error") is None
    await TwoCalls(Threads(1), policy=CallPolicy(**settings)).asolve(evaluated, task=task)
    assert executed(trained) == executed(evaluated) == {"all": 2, "first": 1, "refuse": 0}[rule]
    assert (template is None) is (rule == "all")  # else the prompt asks for one call


def test_what_the_environments_declare() -> None:
    kinds = (Environment, BfclEnvironment, TauBenchEnvironment, TauStyleEnvironment)
    assert [kind.parallel_calls for kind in kinds] == ["all", "all", "first", "first"]


def test_the_published_agents_make_one_call_in_any_environment() -> None:
    for policy in (TrainableAgentMixin.policy, TrainableToolCallingAgent().policy):
        assert policy.under(ListedWorld()).parallel_calls == "first"


@pytest.mark.parametrize("rule", ["First", None, ["all"]])
def test_a_rule_that_is_none_of_the_three_is_refused(rule: Any) -> None:
    class Misspelled(ListedWorld):
        parallel_calls = rule

    with pytest.raises(UsageError, match=r"Misspelled\.parallel_calls must be one of"):
        CallPolicy().under(Misspelled())
    if rule is not None:
        with pytest.raises(UsageError, match="parallel_calls must be one of"):
            CallPolicy(parallel_calls=rule)


def _agent(
    model: Any, kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent
) -> TrainableToolCallingAgent:
    return kind(model=model, sampling_params={"max_new_tokens": 64})


@pytest.mark.tokens
async def test_all_agents_share_the_template_for_one_call_a_turn(tokenizer: Any) -> None:
    """One of its own for each episode would encode everything again."""
    async with serving(tokenizer, lambda request: "Goodbye.") as (_, model):
        agents = [_agent(model) for _ in range(3)]
        for agent in agents:
            await agent.asolve(ListedWorld(), task=Task("t", 0))
        templates = [agent._template(model.template, agent.policy) for agent in agents]
        template = templates[0]
        assert all(each is template for each in templates) and template is not model.template
        assert template is not None and template.encoder is model.template.encoder


class Polite(TrainableToolCallingAgent):
    """Rewrites the head in its own way."""

    def _reformulate_tool_call(self, text: str) -> str:
        return text.replace("Be helpful.", f"Be polite, {self.provider or 'please'}.")


@pytest.mark.tokens
async def test_an_overridden_rewriting_goes_with_its_agent(tokenizer: Any) -> None:
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
