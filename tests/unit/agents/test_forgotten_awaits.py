"""Overridden hooks that forget an `await`, or that are `async` though they must not be."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from support.episodes import agent, call, serving
from support.listed_environment import ListedWorld

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.testing import Reply, load_embedded_tokenizer
from toolroll.rollout.types import InteractionResult, Status, StepResult, StopReason

LOOK = Reply(call("look", at="here"))


async def lookup(text: str = "Found.") -> str:
    return text


class Unread(TrainableToolCallingAgent):
    """The step is never executed."""

    async def _execute_tool(self, env: Any, action: Any) -> Any:
        env.step(action)
        return StepResult(done=True, reward=1.0)


class UnreadBase(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        super()._execute_tool(env, action)
        return StepResult(done=True, reward=1.0)


class Nested(TrainableToolCallingAgent):
    """The model would read "<coroutine object ...>"."""

    async def _execute_tool(self, env: Any, action: Any) -> Any:
        await env.step(action)
        return SimpleNamespace(observation=lookup(), reward=1.0, done=True, info={})


class InMessage(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        await env.step(action)
        return StepResult([{"role": "user", "content": lookup()}])


class StepAsField(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        return SimpleNamespace(observation="", reward=env.step(action), done=True, info={})


class Twice(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        async def inner() -> Any:
            return lookup()

        return inner()


class First(TrainableToolCallingAgent):
    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        await env.reset(task_index)
        return lookup(), {}


class Engine(TrainableToolCallingAgent):
    async def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        assert isinstance(self.model, Model)
        return self.model.post(url, payload)


class Parser(TrainableToolCallingAgent):
    async def _parse_tool(self, response: str) -> Any:  # type: ignore[override]
        return {}


class Messages(TrainableToolCallingAgent):
    async def _build_initial_messages(self, obs: str) -> Any:  # type: ignore[override]
        return []


class Prompt(TrainableToolCallingAgent):
    async def _prepare_prompt_tokens(self, state: Any, messages: Any) -> Any:  # type: ignore[override]
        return "", []


class PromptIds(TrainableToolCallingAgent):
    def _prepare_prompt_tokens(self, state: Any, messages: Any) -> Any:
        return "", lookup()


class Delta(TrainableToolCallingAgent):
    async def _get_token_delta(self, tokenizer: Any, messages: Any) -> Any:  # type: ignore[override]
        return [], []


class Head(TrainableToolCallingAgent):
    async def _reformulate_tool_call(self, text: str) -> Any:  # type: ignore[override]
        return text


class Final(TrainableToolCallingAgent):
    async def _build_final_result(self, *args: Any) -> Any:  # type: ignore[override]
        return args[0]


async def played(kind: type[TrainableToolCallingAgent]) -> InteractionResult:
    """An episode of `kind` with two turns. A coroutine that is dropped is an error."""
    async with serving(
        load_embedded_tokenizer(), lambda request: LOOK if request.call == 0 else Reply("Bye.")
    ) as (_, model):
        own = kind(model=model, policy=agent(model).policy, sampling_params=PARAMS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = await own.asolve(ListedWorld(tool_texts=("It is here.",)), task_index=0)
            gc.collect()
    return result


PARAMS = {"max_new_tokens": 200}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unread, "_execute_tool neither awaited env.step(...) nor"),
        (UnreadBase, "_execute_tool neither awaited env.step(...) nor"),
        (Nested, "_execute_tool returned an object"),
        (InMessage, "_execute_tool returned an object"),
        (StepAsField, "_execute_tool returned an object"),
        (Twice, "_execute_tool returned a coroutine"),
        (First, "_initialize_environment returned an object"),
        (Engine, "_call_llm returned a coroutine"),
        (Parser, "_parse_tool returned a coroutine"),
        (Messages, "_build_initial_messages returned a coroutine"),
        (Prompt, "_prepare_prompt_tokens returned a coroutine"),
        (PromptIds, "_prepare_prompt_tokens returned an object"),
        (Delta, "_get_token_delta returned a coroutine"),
        (Head, "_reformulate_tool_call returned a coroutine"),
        (Final, "_build_final_result returned a coroutine"),
    ],
)
async def test_the_episode_fails_and_names_the_hook(
    kind: type[TrainableToolCallingAgent], words: str
) -> None:
    result = await played(kind)
    error = result.info["error"]
    assert (error["type"], result.stop_reason) == (
        "EnvironmentFailure",
        StopReason.ENVIRONMENT_ERROR,
    )
    assert error["message"].startswith(words)
    assert (result.reward, result.status) == (None, Status.ABORTED)


async def test_a_plain_step_that_returns_a_coroutine_must_be_awaited() -> None:
    class Wrapped(ListedWorld):
        blocking = False

        async def later(self) -> StepResult:
            return StepResult(done=True, reward=1.0)

        def step(self, action: Any) -> Any:
            return self.later()

    class Reads(TrainableToolCallingAgent):
        async def _execute_tool(self, env: Any, action: Any) -> Any:
            response = env.step(action)
            response.reward += 1.0
            return response

    async with serving(load_embedded_tokenizer(), lambda request: LOOK) as (_, model):
        own = Reads(model=model, sampling_params=PARAMS)
        with pytest.raises(UsageError, match=r"Wrapped.step is async.*`await env.step`"):
            await own.asolve(Wrapped(), task_index=0)
        gc.collect()
