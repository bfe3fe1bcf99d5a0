"""What an episode's border keeps in: one episode's failure is its own (I7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest
from support.episodes import serving
from support.listed_environment import LOOK
from support.loop_clock import skip

from toolroll import Action, Environment, InteractionResult, Message, Observation, Status
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.text_agent import TextAgent
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.environment import StepResult, Task
from toolroll.rollout.errors import ActionError, ContextOverflowError, UsageError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.types import StopReason
from toolroll.testing import PolicyRequest

TASK = Task("t", 0)


class Talk(Environment):
    """Says `more` until told to be done after `turns` turns; what `fails` names raises."""

    def __init__(self, *, turns: int = 2, fails: str = "", more: Any = "More?") -> None:
        self.turns, self.fails, self.more = turns, fails, more

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "Begin."}], tools=[LOOK])

    def step(self, action: Action) -> StepResult:
        self.turns -= 1
        done = self.turns <= 0
        return StepResult(
            [] if done else [{"role": "user", "content": self.more}], done=done, reward=1.0
        )

    def truncated_reward(self) -> float | None:
        return self._or_fail("truncated_reward", 0.5)

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
    tokenizer: Any,
    env: Environment,
    kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent,
    *,
    context_length: int = 4096,
    **fields: Any,
) -> InteractionResult:
    """An episode of at most 50 turns on a model of its own."""
    async with serving(tokenizer, fine, context_length=context_length) as (_, model):
        return await agent(model, kind, **fields).asolve(env, task=TASK, max_num_steps=50)


# --- failures -------------------------------------------------------------------------------------


async def test_a_template_that_refuses_a_conversation_ends_it(tokenizer: Any) -> None:
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


async def test_a_content_that_is_no_text_ends_the_episode_in_words(tokenizer: Any) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    result = await play(tokenizer, Talk(turns=3, more=image))
    assert result.stop_reason is StopReason.TEMPLATE_ERROR


@pytest.mark.parametrize("method", ["close", "metrics"])
async def test_a_failure_of_close_or_metrics_keeps_the_reward(tokenizer: Any, method: str) -> None:
    result = await play(tokenizer, Talk(fails=method))
    assert (result.status, result.reward) == (Status.COMPLETED, 1.0)
    assert result.trajectories[-1].trained_tokens
    assert f"{method} is broken" in result.info[f"{method}_error"]["message"]


async def test_a_verdict_that_fails_is_the_environments_failure(tokenizer: Any) -> None:
    env = Talk(turns=50, fails="truncated_reward")
    result = await play(tokenizer, env, context_length=220)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert (result.status, result.reward) == (Status.ABORTED, None)
    assert "truncated_reward is broken" in result.info["error"]["message"]
    assert sum(part.trained_tokens for part in result.trajectories) > 0
    assert result.metrics["trained_tokens"] == 0, "no trainer gets them"


class Sleeper(Talk):
    """Its steps block until the test ends; `blocked` is set from then on."""

    def __init__(self, release: Any) -> None:
        super().__init__(turns=5)
        self.release = release
        self.blocked = Event()

    def step(self, action: Action) -> StepResult:
        self.blocked.set()
        self.release.wait()
        return super().step(action)


async def test_a_step_that_holds_every_thread_holds_no_episode(tokenizer: Any) -> None:
    release = Event()
    sleeper = Sleeper(release)
    try:
        async with serving(tokenizer, fine, threads=1) as (_, model):
            playing = asyncio.create_task(agent(model, step_timeout=600).asolve(sleeper, task=TASK))
            while not sleeper.blocked.is_set():
                await asyncio.sleep(0.001)
            skip(601)
            result = await playing
            release.set()
    finally:
        release.set()
    assert result.stop_reason is StopReason.TIME_LIMIT
    assert result.info.keys() == {"error"}, "metrics and close have a thread all the same"


class Refused(TextAgent):
    """An endpoint that refuses the first prompt."""

    async def reply(self, *args: Any) -> AssistantTurn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ContextOverflowError("too long")


@pytest.mark.parametrize(("truncated_reward", "reward"), [(0.5, 0.5), (None, 0.0)])
async def test_a_first_prompt_that_does_not_fit_is_a_full_context(
    tokenizer: Any, truncated_reward: float | None, reward: float
) -> None:
    class Judged(Talk):
        def truncated_reward(self) -> float | None:
            return truncated_reward

    async with serving(tokenizer, fine, context_length=16) as (_, model):
        trained = await agent(model).asolve(Judged(), task=TASK)
        plain = await Refused(model).asolve(Judged(), task=TASK)
    for result in (trained, plain):
        assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_FULL)
        assert (result.reward, result.metrics.get("turns", 0)) == (reward, 0)
        assert result.info["error"]["type"] == "ContextOverflowError"
    assert sum(trajectory.trained_tokens for trajectory in trained.trajectories) == 0


class OtherPrompt(TrainableToolCallingAgent):
    """Serves another prompt than the template's."""

    def _prepare_prompt_tokens(
        self, state: Any, messages: Sequence[Message]
    ) -> tuple[str, list[int]]:
        text, ids = super()._prepare_prompt_tokens(state, messages)
        return text, [*ids, ids[-1]]


async def test_a_known_mismatch_is_never_trained(tokenizer: Any) -> None:
    result = await play(tokenizer, Talk(turns=50), OtherPrompt, context_length=220)
    assert result.stop_reason is StopReason.CONTEXT_FULL
    assert result.metrics["token_mismatches/prompt_hook"] == 1
    assert result.metrics["turns"] > 1
    assert sum(trajectory.trained_tokens for trajectory in result.trajectories) == 0


async def test_rollout_args_of_asolve_set_verify(tokenizer: Any) -> None:
    verified: list[str] = []

    class Watcher(TrainableToolCallingAgent):
        async def _begin(self, *args: Any) -> Conversation:  # pyright: ignore[reportIncompatibleMethodOverride]
            conversation = await super()._begin(*args)
            verified.append(conversation._verify)
            return conversation

    async with serving(tokenizer, fine) as (_, model):
        await agent(model, Watcher).asolve(Talk(), {"verify": "off"}, task=TASK)
    assert verified == ["off"]


async def test_prompts_of_a_template_that_measures_text_are_right(tokenizer: Any) -> None:
    measure = "{% if messages[0].content | wordcount > 3 %}LONG{% endif %}"
    measuring = measure + tokenizer.chat_template
    async with serving(tokenizer, fine, chat_template=measuring) as (_, model):
        for words in ["one", "two", "a question of many words", "another question of many words"]:
            user: Message = {"role": "user", "content": words}
            conversation = Conversation(model, [user], [], session_id=words, verify="always")
            await conversation.reply({"max_new_tokens": 8})
            await conversation.settle()
            text = tokenizer.apply_chat_template(
                [user], chat_template=measuring, add_generation_prompt=True, tokenize=False
            )
            assert text.startswith("LONG") == (len(words) > 3)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            trajectory = conversation.session.trajectories()[0]
            assert trajectory.input_ids.tolist()[: len(prompt)] == prompt
            assert conversation.mismatches == {} and trajectory.trained_tokens > 0


# --- environments ---------------------------------------------------------------------------------


class Reusing(Environment):
    """Changes the messages and the tools that it has returned."""

    def __init__(self) -> None:
        self.tool = json.loads(json.dumps(LOOK))
        self.message: Message = {"role": "user", "content": [{"type": "text", "text": "0"}]}

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([self.message], [self.tool])

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


async def test_an_observation_may_have_its_own_constructor(tokenizer: Any) -> None:
    class OwnObservation(Observation):
        def __init__(self, text: str) -> None:
            super().__init__([{"role": "user", "content": text}], [LOOK])

    class Observes(Talk):
        def reset(self, task: Task, seed: int) -> Observation:
            return OwnObservation("0")

    result = await play(tokenizer, Observes())
    assert (result.status, result.reward) == (Status.COMPLETED, 1.0)


async def test_an_unknown_reward_mode_is_refused(tokenizer: Any) -> None:
    class Mean(Talk):
        reward_mode: Any = "mean"

    with pytest.raises(UsageError, match=r"Mean\.reward_mode must be 'final' or 'sum'"):
        await play(tokenizer, Mean())


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
