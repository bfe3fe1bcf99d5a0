"""The public types as a user's type checker sees them; checked by `make check`, never run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

from toolroll import (
    Action,
    ChatTemplate,
    Environment,
    EnvironmentFactory,
    EnvironmentOptions,
    Episode,
    InteractionResult,
    Model,
    Observation,
    ParsedReply,
    RolloutArgs,
    Runner,
    RunSettings,
    Status,
    StepResult,
    StopReason,
    Task,
    TrainableToolCallingAgent,
    Trajectory,
    get_parser,
    load_environment,
    read_episodes,
    tool_environment,
)


class Adder(Environment):
    def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "2 + 3?"}])

    def step(self, action: Action) -> StepResult:
        return StepResult(reward=float("5" in action.content), done=True)


async def play(tokenizer: Any, folder: Path) -> None:
    args = RolloutArgs(engine="http://127.0.0.1:30000", model="embedded")
    async with Model.from_args(args) as model:
        assert_type(model, Model)
        assert_type(model.template, ChatTemplate)
        agent = TrainableToolCallingAgent(model=model, sampling_params={"max_new_tokens": 256})
        result = await agent.asolve(Adder(), task=Task("sum", 0), session_id="s")
        short = tool_environment(tools=[], tasks=[{"prompt": "?"}], reward=lambda final: 1.0)
        await Runner(short, lambda: agent, RunSettings()).run(short.tasks("test"), show)
        factory = load_environment("desk")
        assert_type(factory, EnvironmentFactory)
        tasks = factory.tasks("test")
        assert_type(tasks, Sequence[Task])
        runner = Runner(factory, lambda: agent, RunSettings(concurrency=4), EnvironmentOptions())
        await runner.run(tasks, show)
    assert_type(result, InteractionResult)
    assert_type(result.status, Status)
    assert_type(result.stop_reason, StopReason)
    assert_type(result.reward, float | None)
    assert_type(result.tokens, list[int])
    assert_type(result.loss_mask, list[int])
    assert_type(result.logprobs, list[float] | None)
    assert_type(result.trajectories, tuple[Trajectory, ...])
    [trajectory] = result.trajectories
    assert_type(trajectory.input_ids, npt.NDArray[np.int32])
    assert_type(trajectory.loss_mask, npt.NDArray[np.int32])
    assert_type(trajectory.logprobs, npt.NDArray[np.float32])
    for episode in read_episodes(folder):
        assert_type(episode, Episode)
    template = ChatTemplate(tokenizer)
    assert_type(template.prompt([], None), list[int])
    reply = get_parser("hermes").parse("Hello.")
    assert_type(reply, ParsedReply)


def show(episode: Episode) -> None:
    assert_type(episode.result, InteractionResult)
