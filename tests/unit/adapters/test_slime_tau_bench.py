"""slime's tau-bench example: what its agents, episodes and samples are with toolroll's classes.

That the tokens are those that were served and sampled is in `tests/unit/test_invariants.py`.
"""

import dataclasses
import json
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from support.episodes import call, judge, serving
from support.forked_episodes import result_of
from support.listed_environment import ListedWorld
from support.results import trajectory as a_trajectory
from support.slime_trainer import router_of

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.trainable_agents import (
    TrainableToolCallingAgent,
    agent_factory,
    call_to_action_sglang,
)
from toolroll.rollout.environment import StepResult, Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.rollout_args import read_args
from toolroll.rollout.types import Status, StopReason
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply

pytestmark = pytest.mark.tokens


async def episode(
    tokenizer: Any, world: Any, replies: list[Any], *, on_length: str = "stop", **options: Any
) -> tuple[InteractionResult, EmbeddedEngine]:
    """One episode, session "s", in which the model gives `replies`, then says goodbye."""

    def policy(request: PolicyRequest) -> str | Reply:
        return replies[request.call] if request.call < len(replies) else "Goodbye."

    async with serving(tokenizer, policy, context_length=900) as (engine, model):
        first = CallPolicy(parallel_calls="first")
        agent = TrainableToolCallingAgent(model=model, policy=first)
        agent.on_length = on_length  # type: ignore[assignment]
        given = {"sampling_params": {"max_new_tokens": 512}, "max_num_steps": 12, **options}
        result = await agent.asolve(world, task=Task("t", 0), session_id="s", **given)
        return result, engine


def test_the_result_has_lists_of_numbers() -> None:
    """As slime's example gives them to its `Sample`. If a trained token has no logprob, there is no
    list of them.
    """
    result = result_of(1.0, a_trajectory(500, ((4, 300), (310, 422))))
    mask, tokens, logprobs = result.loss_mask, result.tokens, result.logprobs
    assert sum(mask) == 408 and len(mask) == len(logprobs or ()) == result.response_length == 496
    assert tokens + [5] == [*range(100, 600), 5]  # noqa: RUF005 - as users write it
    assert {type(value) for value in [*mask, *tokens]} == {int}
    assert logprobs is not None and logprobs[0] == -0.25 and logprobs[300] == 0.0
    plain = json.loads(json.dumps([mask, tokens, logprobs], allow_nan=False))
    assert plain == [mask, tokens, logprobs]
    empty = result_of(1.0)
    assert (empty.tokens, empty.loss_mask, empty.response_length) == ([], [], 0)
    unknown = a_trajectory()
    unknown.logprobs[11] = np.nan
    assert result_of(1.0, unknown).logprobs is None
    excluded = dataclasses.replace(unknown, loss_mask=np.zeros_like(unknown.loss_mask))
    assert result_of(1.0, excluded).logprobs == [-0.25, -0.5, -0.75, 0.0, 0.0, -0.25, -0.5, 0.0]


@pytest.mark.parametrize("content", [None, ""])
def test_a_message_without_content_is_no_crash(content: Any) -> None:
    messages = [{"role": "assistant", "content": content}, {"role": "assistant", "content": "Bye."}]
    result = InteractionResult("", 0.0, [], {})
    filled = TrainableToolCallingAgent()._build_final_result(
        result, 1.0, {}, messages, [1], [1, 2], [3]
    )
    assert (filled.response, filled.response_length, list(filled.tokens)) == ("Bye.", 1, [1, 2, 3])


@pytest.mark.parametrize("parameters", ["{bad", "[1]", "", "null", None, '"text"', 5])
def test_the_published_rule_never_raises(parameters: Any) -> None:
    action = call_to_action_sglang([{"name": "look", "parameters": parameters}], "text")
    assert (action.name, action.kwargs) == ("respond", {"content": "text"})


async def test_the_default_rollout_args_are_enough(tokenizer: Any) -> None:
    given = Namespace(agent_strategy="tool-calling", model="m", model_provider="p", temperature=0.0)
    agent = agent_factory([], "wiki", given)
    assert read_args(agent.rollout_args).engine == "http://127.0.0.1:30000"
    async with serving(tokenizer, lambda request: "Goodbye.") as (engine, _):
        forms: list[Any] = [dict, Namespace]
        for form in forms:
            args = form(**router_of(engine), hf_checkpoint="embedded")
            agent = agent_factory([], "wiki", given, rollout_args=args)
            world = ListedWorld(tools=())
            result = await agent.asolve(world, agent.rollout_args, agent.sampling_params, 0)
            await agent.aclose()
            assert result.status is Status.COMPLETED
    with pytest.raises(NotImplementedError):
        agent_factory([], "wiki", Namespace(agent_strategy="react"))


@pytest.mark.parametrize("on_length", ["stop", "continue"])
async def test_a_call_that_was_cut_is_not_said_to_the_user(tokenizer: Any, on_length: str) -> None:
    ids = tokenizer.encode('Let me look. <tool_call>{"name": "lo', add_special_tokens=False)
    world = ListedWorld(user_texts=["When?", "What?"])
    replies = [Reply(output_ids=ids, stop=False), "Never."]
    result, _ = await episode(tokenizer, world, replies, on_length=on_length)
    assert "tool_call" not in " ".join(action.content for action in world.seen)
    if on_length == "stop":
        assert world.seen == []
        assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.LENGTH)
    else:
        assert result.messages[3]["role"] == "tool"
        assert result.messages[3]["content"].startswith("Error: ")


BAD = {
    "bad JSON": '<tool_call>{"name": "look", "arguments": {"at": </tool_call>',
    "list arguments": '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    "missing argument": call(),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
async def test_an_unreadable_reply_is_corrected(tokenizer: Any, reply: str) -> None:
    world = ListedWorld(user_texts=["Look."], tool_texts=["R1"])
    result, engine = await episode(tokenizer, world, [reply, call(at="a"), "Done."])
    actions = [(action.content, len(action.tool_calls)) for action in world.seen]
    assert actions == [("", 1), ("Done.", 0)]
    answer = result.messages[3]
    assert answer["role"] == "tool" and answer["content"].startswith("Error: ")
    assert answer["content"] in tokenizer.decode(engine.log[1].input_ids)
    assert result.metrics["invalid_calls"] == 1.0 and result.reward == 1.0
    judge(result, engine, "s")


class Seeded(ListedWorld):
    """Keeps its seed."""

    def reset(self, task: Task, seed: int) -> Any:
        self.seed = seed
        return super().reset(task, seed)


async def test_an_episode_counts_what_it_took_at_one_worker(tokenizer: Any) -> None:
    world = Seeded(user_texts=["Hi", "Yes?"], tool_texts=["R"])
    given = {"max_new_tokens": 4096, "temperature": 0.5}
    params = dict(given)
    replies = ["Hello.", call(at="x"), call("fly")]
    result, engine = await episode(tokenizer, world, replies, sampling_params=params, seed=7)
    assert {entry.routing_key for entry in engine.log} == {"s"} and len(engine.log) > 3
    assert world.seed == 7
    metrics = result.metrics
    counts = {
        "turns": len(engine.log),
        "completion_tokens": sum(len(entry.output_ids) for entry in engine.log),
        "prompt_tokens": sum(len(entry.input_ids) for entry in engine.log),
        "tool_calls": 2.0,
        "invalid_calls": 1.0,
        "invalid_calls/unknown_tool": 1.0,
    }
    assert {name: metrics[name] for name in counts} == counts
    assert 0 < metrics["cached_tokens"] < metrics["prompt_tokens"]
    assert metrics["seconds"] > metrics["engine_seconds"] > 0 and metrics["env_seconds"] >= 0
    sent = [dict(entry.sampling_params) for entry in engine.log]
    assert [dict(turn.sampling_params) for turn in result.trajectories[0].turns] == sent
    limits = [params["max_new_tokens"] for params in sent]
    assert sorted(set(limits), reverse=True) == limits, "each turn is told what room is left"
    assert params == given, "what the trainer passes is shared by all its episodes"


async def test_the_limit_of_steps_may_be_none_and_wipes_no_info(tokenizer: Any) -> None:
    result, engine = await episode(tokenizer, ListedWorld(), [], max_num_steps=0)
    assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert (result.reward, engine.log) == (0.0, [])
    looked = {"source": "look", "reward_info": {"r": 1}}
    infos: Any = iter([looked, {"source": "user", "reward_info": None, "cost": None}])
    answers = lambda action: StepResult([{"role": "user", "content": "x"}], info=next(infos))
    world = ListedWorld(on_step=answers)
    result, _ = await episode(tokenizer, world, ["1", "2"], max_num_steps=2)
    assert result.info == {"source": "user", "reward_info": {"r": 1}, "cost": None}
