"""The rewards of an episode's turns: they add up to the episode's reward."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
from support.episodes import agent, call, serving
from support.listed_environment import LOOK
from support.qwen import tokenizer_for, trl_template

from toolroll import Action, Environment, InteractionResult, Observation, Status, StepResult, Task
from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.testing import PolicyRequest, Reply
from toolroll.trainers.advantages import turn_rewards


class Walk(Environment):
    """Each step earns its number; the third ends the episode. Text is answered by the user."""

    def __init__(self, mode: str, *, ends: int = 3, truncated: float | None = None) -> None:
        self.reward_mode = mode  # type: ignore[assignment]
        self.steps, self.ends, self.truncated = 0, ends, truncated

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "Walk."}], [LOOK])

    def step(self, action: Action) -> StepResult:
        self.steps += 1
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": "Seen."}
            for c in action.tool_calls
        ]
        messages = answers or [{"role": "user", "content": "And now?"}]
        return StepResult(messages, float(self.steps), self.steps == self.ends)

    def truncated_reward(self) -> float | None:
        return self.truncated


async def played(
    tokenizer: Any, env: Walk, replies: list[str], *, turns: int = 10, **policy: Any
) -> InteractionResult:
    """The `replies` in turn, the last one again and again."""

    def next_reply(request: PolicyRequest) -> Reply:
        return Reply(replies[min(request.call, len(replies) - 1)])

    async with serving(tokenizer, next_reply) as (_, model):
        return await agent(model, **policy).asolve(
            env, task=Task("t", 0), max_num_steps=turns, session_id="s"
        )


def rewards_of(result: InteractionResult) -> list[list[float]]:
    rewards = [turn_rewards(trajectory).tolist() for trajectory in result.trajectories]
    if result.reward is not None:
        assert math.fsum(chain.from_iterable(rewards)) == pytest.approx(result.reward)
    for trajectory in result.trajectories:
        assert from_json(to_json(trajectory)).turns == trajectory.turns
    return rewards


async def test_text_that_looks_like_a_call_is_counted(tokenizer: Any) -> None:
    """It is invalid only by the policy."""
    text = '<tools>{"name": "look", "arguments": {}}</tools>'
    result = await played(tokenizer, Walk("sum"), [text, call()])
    assert result.metrics["lookalike_calls"] == 1 and "invalid_calls" not in result.metrics
    assert [message["content"] for message in result.messages[1:3]] == [text, "And now?"]
    assert "lookalike_calls" not in (await played(tokenizer, Walk("sum"), [call()])).metrics

    rules: Any = {"on_lookalike": "invalid", "invalid_penalty": -0.5}
    strict = await played(tokenizer, Walk("sum"), [text, call()], **rules)
    assert (strict.metrics["lookalike_calls"], strict.metrics["invalid_replies"]) == (1, 1)
    assert strict.messages[2]["role"] == "user"
    assert "looks like a tool call of look" in str(strict.messages[2]["content"])
    assert rewards_of(strict) == [[-0.5, 1.0, 2.0, 3.0]]


INVALID = '<tool_call>{"name": "look"</tool_call>'


@pytest.mark.parametrize(
    ("mode", "truncated", "turns", "invalid", "expected"),
    [
        ("sum", None, 10, [], [1.0, 2.0, 3.0]),
        ("final", None, 10, [], [0.0, 0.0, 3.0]),
        ("sum", None, 10, [INVALID], [1.0, -0.5, 2.0, 3.0]),
        ("sum", None, 2, [], [1.0, 2.0]),
        ("sum", 10.0, 2, [], [1.0, 9.0]),  # cut short, with a verdict
        ("final", None, 2, [], [0.0, 0.0]),
        ("final", 0.25, 2, [], [0.0, 0.25]),
    ],
)
async def test_the_rewards_of_the_turns(
    tokenizer: Any, mode: str, truncated: Any, turns: int, invalid: list[str], expected: list[float]
) -> None:
    """The last step's reward belongs to the last turn, a penalty to the turn that was invalid."""
    replies = [call(), *invalid, call()]
    env = Walk(mode, truncated=truncated)
    result = await played(tokenizer, env, replies, turns=turns, invalid_penalty=-0.5)
    assert result.status is (Status.TRUNCATED if turns == 2 else Status.COMPLETED)
    assert result.reward == sum(expected)
    assert rewards_of(result) == [expected]


async def test_a_fork_counts_each_turn_once() -> None:
    """Qwen3's template drops a thought once the user speaks again: the episode forks."""
    tokenizer = tokenizer_for(trl_template("qwen3"))
    replies = ["<think>\nHm.\n</think>\n\nHello.", "<think>\nSo.\n</think>\n\nBye.", "Well."]
    result = await played(tokenizer, Walk("sum"), replies)
    assert len(result.trajectories) > 1
    assert result.reward == 6.0
    assert sorted(filter(None, chain.from_iterable(rewards_of(result)))) == [1.0, 2.0, 3.0]


async def test_an_aborted_episode_has_none(tokenizer: Any) -> None:
    class Fails(Walk):
        def step(self, action: Action) -> StepResult:
            if self.steps == 1:
                raise ValueError("out of order")
            return super().step(action)

    result = await played(tokenizer, Fails("sum"), [call()])
    assert result.reward is None
    assert rewards_of(result) == [[0.0, 0.0]]
