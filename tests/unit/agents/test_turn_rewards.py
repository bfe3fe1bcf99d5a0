"""The rewards of an episode's turns: they add up to the episode's reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.episodes import agent, call, serving
from support.qwen import tokenizer_for, trl_template

from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.rollout.types import (
    Action,
    Environment,
    InteractionResult,
    Observation,
    Status,
    StepResult,
    Task,
)
from toolroll.testing import PolicyRequest, Reply
from toolroll.trainers.advantages import turn_rewards

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


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
            {"role": "tool", "tool_call_id": one.id, "name": one.name, "content": "Seen."}
            for one in action.tool_calls
        ]
        messages = answers or [{"role": "user", "content": "And now?"}]
        return StepResult(messages, float(self.steps), self.steps == self.ends)

    def truncated_reward(self) -> float | None:
        return self.truncated


async def played(
    tokenizer: Any, env: Walk, said: list[str], *, turns: int = 10, **policy: Any
) -> InteractionResult:
    """`said` in turn, the last one again and again."""

    def speak(request: PolicyRequest) -> Reply:
        return Reply(said[min(request.call, len(said) - 1)])

    async with serving(tokenizer, speak) as (_, model):
        return await agent(model, **policy).asolve(
            env, task=Task("t", 0), max_num_steps=turns, session_id="s"
        )


def rewards_of(result: InteractionResult) -> list[list[float]]:
    found = [turn_rewards(trajectory).tolist() for trajectory in result.trajectories]
    if result.reward is not None:
        assert math.fsum(value for one in found for value in one) == pytest.approx(result.reward)
    for trajectory in result.trajectories:
        assert from_json(to_json(trajectory)).turns == trajectory.turns
    return found


async def test_text_that_looks_like_a_call_is_counted_and_invalid_only_by_the_policy(
    tokenizer: Any,
) -> None:
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


async def test_step_rewards_that_are_summed(tokenizer: Any) -> None:
    result = await played(tokenizer, Walk("sum"), [call()])
    assert result.reward == 6.0
    assert rewards_of(result) == [[1.0, 2.0, 3.0]]


async def test_the_last_step_reward_belongs_to_the_last_turn(tokenizer: Any) -> None:
    result = await played(tokenizer, Walk("final"), [call()])
    assert result.reward == 3.0
    assert rewards_of(result) == [[0.0, 0.0, 3.0]]


async def test_a_penalty_belongs_to_the_turn_that_was_invalid(tokenizer: Any) -> None:
    said = [call(), '<tool_call>{"name": "look"</tool_call>', call()]
    result = await played(tokenizer, Walk("sum"), said, invalid_penalty=-0.5)
    assert result.reward == 5.5
    assert rewards_of(result) == [[1.0, -0.5, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("mode", "truncated", "expected"),
    [
        ("sum", None, [1.0, 2.0]),
        ("sum", 10.0, [1.0, 9.0]),
        ("final", None, [0.0, 0.0]),
        ("final", 0.25, [0.0, 0.25]),
    ],
)
async def test_an_episode_that_is_cut_short(
    tokenizer: Any, mode: str, truncated: float | None, expected: list[float]
) -> None:
    result = await played(tokenizer, Walk(mode, truncated=truncated), [call()], turns=2)
    assert result.status is Status.TRUNCATED
    assert rewards_of(result) == [expected]


async def test_a_fork_counts_each_turn_once() -> None:
    """Qwen3's template drops a thought once the user speaks again: the episode forks."""
    tokenizer = tokenizer_for(trl_template("qwen3"))
    said = ["<think>\nHm.\n</think>\n\nHello.", "<think>\nSo.\n</think>\n\nBye.", "Well."]
    result = await played(tokenizer, Walk("sum"), said)
    assert len(result.trajectories) > 1
    assert result.reward == 6.0
    found = rewards_of(result)
    assert sorted(value for one in found for value in one if value) == [1.0, 2.0, 3.0]


async def test_an_aborted_episode_has_none(tokenizer: Any) -> None:
    class Fails(Walk):
        def step(self, action: Action) -> StepResult:
            if self.steps == 1:
                raise ValueError("out of order")
            return super().step(action)

    result = await played(tokenizer, Fails("sum"), [call()])
    assert result.reward is None
    assert rewards_of(result) == [[0.0, 0.0]]
