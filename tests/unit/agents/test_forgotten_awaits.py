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
from toolroll.rollout.types import InteractionResult, Status, StepResult, StopReason
from toolroll.testing import Reply, load_embedded_tokenizer

LOOK = Reply(call("look", at="here"))


async def lookup(text: str = "Found.") -> str:
    return text


async def step_that_is_never_executed(env: Any, action: Any) -> Any:
    env.step(action)
    return StepResult(done=True, reward=1.0)


async def text_that_is_nested(env: Any, action: Any) -> Any:
    """The model would read "<coroutine object ...>"."""
    await env.step(action)
    return SimpleNamespace(observation=lookup(), reward=1.0, done=True, info={})


async def text_in_a_message(env: Any, action: Any) -> Any:
    await env.step(action)
    return StepResult([{"role": "user", "content": lookup()}])


async def step_as_a_field(env: Any, action: Any) -> Any:
    return SimpleNamespace(observation="", reward=env.step(action), done=True, info={})


async def coroutine_of_a_coroutine(*_: Any) -> Any:
    async def inner() -> Any:
        return lookup()

    return inner()


async def first_text(env: Any, task_index: int | None) -> Any:
    await env.reset(task_index)
    return lookup(), {}


async def coroutine(*_: Any) -> Any:
    return None


class UnreadBase(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        super()._execute_tool(env, action)
        return StepResult(done=True, reward=1.0)


class Engine(TrainableToolCallingAgent):
    async def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        assert isinstance(self.model, Model)
        return self.model.post(url, payload)


async def played(kind: type[TrainableToolCallingAgent], **hooks: Any) -> InteractionResult:
    """An episode of `kind` with two turns. A coroutine that is dropped is an error."""
    async with serving(
        load_embedded_tokenizer(), lambda request: LOOK if request.call == 0 else Reply("Bye.")
    ) as (_, model):
        own = kind(model=model, policy=agent(model).policy, sampling_params=PARAMS)
        vars(own).update(hooks)
        gc.collect()  # what other tests left, such as loops
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = await own.asolve(ListedWorld(tool_texts=("It is here.",)), task_index=0)
            gc.collect()
    return result


PARAMS = {"max_new_tokens": 200}


UNREAD, AN_OBJECT, A_COROUTINE = (
    "neither awaited env.step(...) nor",
    "returned an object",
    "returned a coroutine",
)


@pytest.mark.parametrize(
    ("hook", "body", "words"),
    [
        ("_execute_tool", step_that_is_never_executed, UNREAD),
        ("_execute_tool", UnreadBase, UNREAD),
        ("_execute_tool", text_that_is_nested, AN_OBJECT),
        ("_execute_tool", text_in_a_message, AN_OBJECT),
        ("_execute_tool", step_as_a_field, AN_OBJECT),
        ("_execute_tool", coroutine_of_a_coroutine, A_COROUTINE),
        ("_initialize_environment", first_text, AN_OBJECT),
        ("_call_llm", Engine, A_COROUTINE),
        ("_parse_tool", coroutine, A_COROUTINE),
        ("_build_initial_messages", coroutine, A_COROUTINE),
        ("_prepare_prompt_tokens", coroutine, A_COROUTINE),
        ("_prepare_prompt_tokens", lambda *_: ("", lookup()), AN_OBJECT),
        ("_get_token_delta", coroutine, A_COROUTINE),
        ("_reformulate_tool_call", coroutine, A_COROUTINE),
        ("_build_final_result", coroutine, A_COROUTINE),
    ],
)
async def test_the_episode_fails_and_names_the_hook(hook: str, body: Any, words: str) -> None:
    result = (
        await played(body)
        if isinstance(body, type)
        else await played(TrainableToolCallingAgent, **{hook: body})
    )
    error = result.info["error"]
    assert (error["type"], result.stop_reason) == (
        "EnvironmentFailure",
        StopReason.ENVIRONMENT_ERROR,
    )
    assert error["message"].startswith(f"{hook} {words}")
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
