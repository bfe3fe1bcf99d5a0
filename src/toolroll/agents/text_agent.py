"""`TextAgent`: an agent without tokens: it plays and is scored like any other, and nothing of it can be trained on.

Invariants: the loop, the policy for unreadable calls and the rewards are those of `TrainableAgentMixin`; there is no trajectory, and
`info["trainable"]` is False.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolroll.agents.environments.adapt import as_environment
from toolroll.agents.loop.call_policy import CallPolicy, order_by_call, told
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.episode_tracker import EpisodeTracker
from toolroll.agents.loop.validation import MOST_BYTES
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import ActionError, EngineUnreachableError, UsageError, message_of
from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Action, InteractionResult, Message, StepResult, StopReason, Task, Tool, status_of

logger = logging.getLogger(__name__)


DEFAULT_POLICY = CallPolicy()


@dataclass(frozen=True, slots=True)
class PlainReply:
    """One turn: what was said, taken apart, and the message that stands for it. `counts`: prompt_tokens, completion_tokens,
    cached_tokens, engine_retries, where they are known. `seconds`: how long it took."""

    parsed: ParsedReply
    message: Message
    finish_reason: str = "stop"
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class TextAgent(ABC):
    """`step_timeout`: seconds that one call of the environment may take; `max_observation_bytes`:
    of all that one call of it returns.

    Serves any number of episodes at once.
    """

    def __init__(
        self,
        threads: BlockingRunner,
        *,
        policy: CallPolicy = DEFAULT_POLICY,
        step_timeout: float | None = None,
        max_observation_bytes: int = MOST_BYTES,
    ) -> None:
        self._most_bytes = max_observation_bytes
        self._threads = threads
        self._policy = policy
        self._step_timeout = step_timeout

    @abstractmethod
    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling_params: Mapping[str, Any], session_id: str
    ) -> PlainReply:
        """The next turn."""

    async def asolve(
        self,
        env: Any,
        rollout_args: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        task_index: int | None = None,
        max_num_steps: int = 30,
        *,
        task: Task | None = None,
        seed: int = 0,
        session_id: str | None = None,
    ) -> InteractionResult:
        """Play one episode. Raises `UsageError` and `CancelledError`; everything else becomes the result's status."""
        task = task or Task(str(task_index), task_index or 0)
        runner = EnvironmentRunner(
            as_environment(env),
            task,
            seed,
            self._threads.run_in_thread,
            self._step_timeout,
            max_observation_bytes=self._most_bytes,
        )
        tracker = EpisodeTracker()
        messages: list[Message] = []
        tools: list[Tool] = []
        try:
            with guarded():  # `reply` may be code of others
                first = await runner.reset(task.index)
                messages += [dict(message) for message in first.messages]
                tools += first.tools
                tracker.info.update(first.info)
                how = (sampling_params or {}, max_num_steps, session_id or task.id)
                reason = await self._interact(runner, tracker, messages, tools, how)
                reward = await tracker.reward(reason, runner, self._policy.invalid_penalty)
        except (UsageError, EngineUnreachableError):
            raise
        except Exception as error:  # noqa: BLE001 - the episode's border: a bad rollout is data (I7)
            reason = tracker.fail(error)
            logger.warning("episode %s ended with %s: %s", session_id, reason, message_of(error))
            reason, reward = await tracker.cut_short(reason, runner, self._policy.invalid_penalty)
        finally:
            await asyncio.shield(tracker.close(runner))
        return _result(runner, tracker, messages, tools, reason, reward)

    async def _interact(
        self,
        runner: EnvironmentRunner,
        tracker: EpisodeTracker,
        messages: list[Message],
        tools: list[Tool],
        how: tuple[Mapping[str, Any], int, str],
    ) -> StopReason:
        sampling_params, max_num_steps, session_id = how
        for _ in range(max_num_steps):
            reply = await self.reply(messages, tools, sampling_params, session_id)
            _count(tracker, reply)
            messages.append(reply.message)
            if reply.finish_reason == "length":
                return StopReason.LENGTH
            decision = self._policy.decide(reply.parsed, invalid_before=tracker.invalid_in_a_row)
            if decision.invalid:
                tracker.invalid_reply()
            if decision.stop:
                return StopReason.INVALID_CALLS
            step = StepResult() if decision.action is None else await self._act(runner, tracker, decision.action)
            if not decision.invalid and not step.info.get("invalid_action"):
                tracker.invalid_in_a_row = 0
            messages += order_by_call(reply.parsed.tool_calls, decision.answers, step.messages)
            if step.tools is not None:
                tools[:] = step.tools
            if step.done:
                return StopReason.DONE
            if tracker.invalid_in_a_row >= self._policy.max_invalid_in_a_row:
                return StopReason.INVALID_CALLS
        return StopReason.MAX_STEPS

    async def _act(self, runner: EnvironmentRunner, tracker: EpisodeTracker, action: Action) -> StepResult:
        tracker.executed(action.tool_calls)
        try:
            step = await runner.step(action)
        except ActionError as error:
            tracker.invalid_reply()
            return StepResult(messages=told(action, str(error)), info={"invalid_action": True})
        tracker.step(step)
        return step


def _count(tracker: EpisodeTracker, reply: PlainReply) -> None:
    tracker.counts["turns"] += 1
    tracker.counts["tool_calls"] += len(reply.parsed.tool_calls)
    for name, count in reply.counts.items():
        tracker.counts[name] += count
    for call in reply.parsed.bad_calls:
        tracker.counts["invalid_calls"] += 1
        tracker.counts[f"invalid_calls/{call.status}"] += 1
    tracker.engine_seconds += reply.seconds


def _result(
    runner: EnvironmentRunner,
    tracker: EpisodeTracker,
    messages: list[Message],
    tools: list[Tool],
    reason: StopReason,
    reward: float | None,
) -> InteractionResult:
    empty = np.zeros(0, dtype=np.int32)
    return InteractionResult(
        prompt="",
        reward=reward,
        messages=messages,
        info=tracker.info | {"trainable": False},
        response="".join(str(m.get("content") or "") for m in messages if m.get("role") == "assistant"),
        loss_mask=empty,
        tokens=empty,
        logprobs=np.zeros(0, dtype=np.float32),
        status=status_of(reason),
        stop_reason=reason,
        metrics=tracker.metrics(runner.metrics()),
        step_rewards=tuple(tracker.rewards),
        tools=tools,
    )


class DoNothingAgent(TextAgent):
    """Says goodbye, and calls nothing: what it scores is a benchmark's floor."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling_params: Mapping[str, Any], session_id: str
    ) -> PlainReply:
        """A farewell."""
        return PlainReply(ParsedReply(FAREWELL), {"role": "assistant", "content": FAREWELL})


FAREWELL = "Goodbye."


def make_do_nothing(threads: BlockingRunner, settings: Mapping[str, Any]) -> DoNothingAgent:
    """Return the agent `do-nothing` of the group `toolroll.agents`.

    `settings`: step_timeout, max_observation_bytes.
    """
    most_bytes = settings.get("max_observation_bytes", MOST_BYTES)
    return DoNothingAgent(threads, step_timeout=settings.get("step_timeout"), max_observation_bytes=most_bytes)
