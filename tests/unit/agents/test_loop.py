"""What an episode's border keeps in: one episode's failure is its own (I7). The rewards of its
turns add up to its reward.
"""

import asyncio
import json
import math
from itertools import chain
from typing import Any

import pytest
from support.episodes import call, serving
from support.listed_environment import LOOK
from support.qwen import tokenizer_for, trl_template

from toolroll import Action, Environment, InteractionResult, Message, Model, Observation, Status
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.text_agent import TextAgent
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.environment import StepResult, Task
from toolroll.rollout.errors import ActionError, ContextOverflowError, UsageError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.rollout.types import StopReason
from toolroll.testing import PolicyRequest
from toolroll.trainers.advantages import turn_rewards

TASK = Task("t", 0)


class Talk(Environment):
    """Says `more` until told to be done after `turns` turns; what `fails` names raises."""

    def __init__(
        self, *, turns: int = 2, fails: str = "", more: Any = "More?", verdict: float | None = 0.5
    ) -> None:
        self.turns, self.fails, self.more, self.verdict = turns, fails, more, verdict

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "Begin."}], tools=[LOOK])

    def step(self, action: Action) -> StepResult:
        self.turns -= 1
        done = self.turns <= 0
        return StepResult(
            [] if done else [{"role": "user", "content": self.more}], done=done, reward=1.0
        )

    def truncated_reward(self) -> float | None:
        return self._or_fail("truncated_reward", self.verdict)

    def metrics(self) -> dict[str, float]:
        return self._or_fail("metrics", {"seen": 1.0})

    def close(self) -> None:
        self._or_fail("close", None)

    def _or_fail(self, method: str, value: Any) -> Any:
        if self.fails == method:
            raise RuntimeError(f"{method} is broken")
        return value


def fine(request: PolicyRequest) -> str:
    return "Fine."


def agent(
    model: Model, kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent, **fields: Any
) -> TrainableToolCallingAgent:
    player = kind(model=model, sampling_params={"max_new_tokens": 64})
    vars(player).update(fields)
    return player


async def play(
    tokenizer: Any, env: Environment, *, context_length: int = 4096, **fields: Any
) -> InteractionResult:
    """An episode of at most 50 turns on a model of its own."""
    async with serving(tokenizer, fine, context_length=context_length) as (_, model):
        return await agent(model, **fields).asolve(env, task=TASK, max_num_steps=50)


async def test_what_a_template_cannot_render_ends_the_episode(tokenizer: Any) -> None:
    refuse = "{% if messages | length > 3 %}{{ raise_exception('no more than three') }}{% endif %}"
    refusing = refuse + tokenizer.chat_template
    async with serving(tokenizer, fine, chat_template=refusing) as (_, model):
        refused, other = await asyncio.gather(
            agent(model).asolve(Talk(turns=4), task=TASK, session_id="refused"),
            agent(model).asolve(Talk(turns=1), task=TASK, session_id="other"),
        )
    assert refused.stop_reason is StopReason.TEMPLATE_ERROR
    assert (refused.status, refused.reward) == (Status.ABORTED, None)
    assert "no more than three" in refused.info["error"]["message"]
    assert (other.status, other.reward) == (Status.COMPLETED, 1.0)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    no_text = await play(tokenizer, Talk(turns=3, more=image))
    assert no_text.stop_reason is StopReason.TEMPLATE_ERROR


async def test_a_verdict_that_fails_is_the_environments_failure(tokenizer: Any) -> None:
    env = Talk(turns=50, fails="truncated_reward")
    result = await play(tokenizer, env, context_length=220)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert (result.status, result.reward) == (Status.ABORTED, None)
    assert "truncated_reward is broken" in result.info["error"]["message"]
    assert sum(part.trained_tokens for part in result.trajectories) > 0
    assert result.metrics["trained_tokens"] == 0, "no trainer gets them"


@pytest.mark.parametrize(("verdict", "reward"), [(0.5, 0.5), (None, 0.0)])
async def test_a_first_prompt_without_room(tokenizer: Any, verdict: Any, reward: float) -> None:
    class Refused(TextAgent):
        """An endpoint that refuses the first prompt."""

        async def reply(self, *args: Any) -> AssistantTurn:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise ContextOverflowError("too long")

    async with serving(tokenizer, fine, context_length=16) as (_, model):
        trained = await agent(model).asolve(Talk(verdict=verdict), task=TASK)
        plain = await Refused(model).asolve(Talk(verdict=verdict), task=TASK)
    for result in (trained, plain):
        assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_FULL)
        assert (result.reward, result.metrics.get("turns", 0)) == (reward, 0)
        assert result.info["error"]["type"] == "ContextOverflowError"
    assert sum(trajectory.trained_tokens for trajectory in trained.trajectories) == 0


async def test_rollout_args_of_asolve_set_verify_and_reach_hooks(tokenizer: Any) -> None:
    seen: list[Any] = []

    class Watcher(TrainableToolCallingAgent):
        async def _begin(self, *args: Any) -> Conversation:  # pyright: ignore[reportIncompatibleMethodOverride]
            conversation = await super()._begin(*args)
            seen.append(conversation._verify)
            return conversation

        def _prepare_prompt_tokens(self, state: Any, messages: Any) -> tuple[str, list[int]]:
            seen.append(state.args)
            return super()._prepare_prompt_tokens(state, messages)

    async with serving(tokenizer, fine) as (_, model):
        await agent(model, Watcher).asolve(Talk(), {"verify": "off"}, task=TASK)
    assert seen == ["off", {"verify": "off"}]


class OwnObservation(Observation):
    """Has its own constructor."""

    def __init__(self, message: Message, tool: Any) -> None:
        super().__init__([message], [tool])


class Reusing(Environment):
    """Changes the messages and the tools that it has returned."""

    def __init__(self) -> None:
        self.tool = json.loads(json.dumps(LOOK))
        self.message: Message = {"role": "user", "content": [{"type": "text", "text": "0"}]}

    def reset(self, task: Task, seed: int) -> Observation:
        return OwnObservation(self.message, self.tool)

    def step(self, action: Action) -> StepResult:
        self.tool["function"]["description"] = "Look."
        part = self.message["content"][0]
        part["text"] = str(int(part["text"]) + 1)
        return StepResult([self.message], 1.0, done=part["text"] == "3")


async def test_an_environment_may_change_what_it_has_returned(tokenizer: Any) -> None:
    result = await play(tokenizer, Reusing(), rollout_args={"verify": "always"})
    users = [m["content"][0]["text"] for m in result.messages if m["role"] == "user"]
    assert users == ["0", "1", "2", "3"]
    assert result.tools == [LOOK]
    assert not [name for name in result.metrics if name.startswith("token_mismatches")]
    assert [trajectory.trained_tokens > 0 for trajectory in result.trajectories] == [True]


async def test_the_environment_s_own_info_makes_no_reply_invalid(tokenizer: Any) -> None:
    class Strict(Talk):
        """Refuses every second reply."""

        def step(self, action: Action) -> StepResult:
            step = super().step(action)
            if self.turns % 2:
                raise ActionError("say it again")
            return StepResult(step.messages, done=step.done, info={"invalid_action": True})

    result = await play(tokenizer, Strict(turns=6), policy=CallPolicy(max_invalid_in_a_row=2))
    assert result.stop_reason is StopReason.DONE
    assert result.metrics["invalid_replies"] == 3.0


# --- the rewards of turns -------------------------------------------------------------------------


class Walk(Talk):
    """Each step earns its number; the third ends the episode. Text is answered by the user."""

    def __init__(self, mode: str, verdict: float | None = None) -> None:
        super().__init__(turns=3, verdict=verdict)
        self.reward_mode = mode  # type: ignore[assignment]

    def step(self, action: Action) -> StepResult:
        step = super().step(action)
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": "Seen."}
            for c in action.tool_calls
        ]
        return StepResult(answers or step.messages, 3.0 - self.turns, step.done)


async def played(
    tokenizer: Any, env: Walk, replies: list[str], *, turns: int = 10, **policy: Any
) -> InteractionResult:
    """The `replies` in turn, the last one again and again."""

    def next_reply(request: PolicyRequest) -> str:
        return replies[min(request.call, len(replies) - 1)]

    async with serving(tokenizer, next_reply) as (_, model):
        player = agent(model, policy=CallPolicy(**policy), rollout_args={"verify": "always"})
        return await player.asolve(env, task=TASK, max_num_steps=turns, session_id="s")


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
    assert [message["content"] for message in result.messages[1:3]] == [text, "More?"]
    assert "lookalike_calls" not in (await played(tokenizer, Walk("sum"), [call()])).metrics

    rules: Any = {"on_lookalike": "invalid", "invalid_penalty": -0.5}
    strict = await played(tokenizer, Walk("sum"), [text, call()], **rules)
    assert (strict.metrics["lookalike_calls"], strict.metrics["invalid_replies"]) == (1, 1)
    assert strict.messages[2]["role"] == "user"
    assert "looks like a tool call of look" in str(strict.messages[2]["content"])
    assert rewards_of(strict) == [[-0.5, 1.0, 2.0, 3.0]]


INVALID = '<tool_call>{"name": "look"</tool_call>'


@pytest.mark.parametrize(
    ("mode", "verdict", "turns", "invalid", "expected"),
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
    tokenizer: Any, mode: str, verdict: Any, turns: int, invalid: list[str], expected: list[float]
) -> None:
    """The last step's reward belongs to the last turn, a penalty to the turn that was invalid."""
    replies = [call(), *invalid, call()]
    result = await played(
        tokenizer, Walk(mode, verdict), replies, turns=turns, invalid_penalty=-0.5
    )
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


async def test_an_aborted_episode_and_an_unknown_mode_have_none(tokenizer: Any) -> None:
    class Fails(Walk):
        def step(self, action: Action) -> StepResult:
            if self.turns == 2:
                raise ValueError("out of order")
            return super().step(action)

    result = await played(tokenizer, Fails("sum"), [call()])
    assert result.reward is None
    assert rewards_of(result) == [[0.0, 0.0]]
    with pytest.raises(UsageError, match=r"Walk\.reward_mode must be 'final' or 'sum'"):
        await played(tokenizer, Walk("mean"), [call()])
