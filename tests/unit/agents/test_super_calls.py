"""Overridden hooks that call `super()` with the published signatures, and hooks that are called
directly, outside an episode. The bodies are ours; `make test-peers` runs the published files.
"""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from support.episodes import call, judge, serving
from support.listed_environment import ListedWorld
from support.published import qwen
from unit.agents.test_published_bodies import TOOLS, WIKI, Shop, agent_of, look_then_buy

from toolroll.agents.loop.environment_runner import DRAWN
from toolroll.agents.trainable_agents import (
    InteractionResult,
    Status,
    TrainableToolCallingAgent,
    call_to_action_sglang,
)
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.types import Action, EnvironmentOptions, Task
from toolroll.testing import PolicyRequest, Reply, load_embedded_tokenizer


class AsPublished(TrainableToolCallingAgent):
    """Each method is overridden with its published signature, and returns what `super()` does."""

    def __init__(
        self,
        tools_info: list[dict[str, Any]],
        wiki: str,
        model: str,
        provider: str,
        temperature: float = 0.0,
        rollout_args: Any = None,
        sampling_params: Any = None,
    ) -> None:
        super().__init__(
            tools_info=tools_info,
            wiki=wiki,
            model=model,
            provider=provider,
            temperature=temperature,
            rollout_args=rollout_args,
            sampling_params=sampling_params,
        )
        self.used: set[str] = set()

    async def asolve(  # type: ignore[override]
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Any,
        task_index: int | None = None,
        max_num_steps: int = 30,
    ) -> InteractionResult:
        result = await super().asolve(
            env, rollout_args, sampling_params, task_index, max_num_steps=max_num_steps
        )
        self.used.add("asolve")
        return result

    def _reformulate_tool_call(self, text: str) -> str:
        self.used.add("_reformulate_tool_call")
        return super()._reformulate_tool_call(text)

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.used.add("_call_llm")
        output = await super()._call_llm(url, payload)
        assert output["meta_info"]["finish_reason"]["type"] == "stop"
        return output

    def _parse_tool(self, response: str) -> dict[str, Any]:
        self.used.add("_parse_tool")
        parsed = super()._parse_tool(response)
        assert set(parsed["parsed_result"]) == {"normal_text", "calls"}
        return parsed

    async def _execute_tool(self, env: Any, action: Any) -> Any:
        self.used.add("_execute_tool")
        res = await super()._execute_tool(env, action)
        assert isinstance(res.observation, str)
        assert isinstance(res.info.model_dump(), dict)
        res.reward += 0.0
        return res

    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        self.used.add("_initialize_environment")
        obs, info = super()._initialize_environment(env, task_index)
        assert isinstance(obs, str)
        return obs, {**info}

    def _build_initial_messages(self, obs: str) -> list[dict[str, Any]]:
        self.used.add("_build_initial_messages")
        return super()._build_initial_messages(obs)

    def _prepare_prompt_tokens(self, state: Any, messages: Any) -> tuple[str, list[int]]:
        self.used.add("_prepare_prompt_tokens")
        prompt_text, prompt_token_ids = super()._prepare_prompt_tokens(state, messages)
        return prompt_text, prompt_token_ids

    def _get_token_delta(
        self, tokenizer: Any, messages: Any, *, include_generation_prompt: bool = False
    ) -> tuple[list[int], list[int]]:
        self.used.add("_get_token_delta")
        return super()._get_token_delta(
            tokenizer, messages, include_generation_prompt=include_generation_prompt
        )

    def _build_final_result(
        self,
        res: Any,
        total_reward: Any,
        info: Any,
        messages: Any,
        loss_masks: Any,
        prompt_token_ids: Any,
        response_token_ids: Any,
    ) -> InteractionResult:
        self.used.add("_build_final_result")
        return super()._build_final_result(
            res, total_reward, info, messages, loss_masks, prompt_token_ids, response_token_ids
        )


class OtherColor(AsPublished):
    """Plain hooks are async here, and async hooks are plain, if a hook may be either."""

    def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        self.used.add("_call_llm")
        return TrainableToolCallingAgent._call_llm(self, url, payload)

    def _execute_tool(self, env: Any, action: Any) -> Any:
        self.used.add("_execute_tool")
        res = TrainableToolCallingAgent._execute_tool(self, env, action)
        res.reward += 0.0
        return res

    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        self.used.add("_initialize_environment")
        obs, info = await TrainableToolCallingAgent._initialize_environment(self, env, task_index)
        assert isinstance(obs, str)
        return obs, info


HOOKS = {name for name in vars(AsPublished) if not name.startswith("__")}


def desk() -> tuple[Any, Task]:
    factory = load_environment("desk")
    return factory.make(EnvironmentOptions()), factory.tasks("test")[0]


def look_up_an_order(request: PolicyRequest) -> Reply:
    return Reply(call("look", at="here") if request.call == 0 else "Goodbye.")


def think_first(request: PolicyRequest) -> Reply:
    """A reply with reasoning, one whose call cannot be read, and a farewell."""
    return Reply(
        (
            f"<think>\nFirst.\n</think>\n\n{call('look', at='here')}",
            '<think>\nAgain.\n</think>\n\n<tool_call>{"name": "look"',
            "<think>\nDone.\n</think>\n\nGoodbye.",
        )[request.call]
    )


def world(*texts: str) -> tuple[Any, Task]:
    return ListedWorld(tool_texts=texts), Task("3", 3)


WORLDS: dict[str, Any] = {
    "tau-bench": (load_embedded_tokenizer, lambda: (Shop(), Task("3", 3)), look_then_buy),
    "listed": (load_embedded_tokenizer, lambda: world("It is here."), look_up_an_order),
    "reasoning": (lambda: qwen("qwen3"), lambda: world("It is here.", "b"), think_first),
    "desk": (load_embedded_tokenizer, desk, look_up_an_order),
}


async def episode(
    kind: type[TrainableToolCallingAgent], name: str, env: Any = None, **more: Any
) -> tuple[InteractionResult, Any]:
    """An episode of `kind`, played as a run plays it, and the agent."""
    tokenizer, make, policy = WORLDS[name]
    env, task = (env, Task("3", 3)) if env is not None else make()
    async with serving(tokenizer(), policy) as (engine, model):
        agent = kind(TOOLS, WIKI, "m", "p", rollout_args={"verify": "always"})
        agent.model = model
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = await agent.asolve(
                env, None, {"max_new_tokens": 200}, task.index, 4, task=task, seed=7, session_id="s"
            )
        if not agent._has("_call_llm"):  # a payload has no header to name the session
            judge(result, engine, "s")
    return result, agent


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("kind", [AsPublished, OtherColor])
async def test_overrides_that_return_what_super_returns_change_nothing(
    kind: type[AsPublished], name: str
) -> None:
    plain, _ = await episode(TrainableToolCallingAgent, name)
    other, agent = await episode(kind, name)
    assert other.info == plain.info
    assert agent.used == HOOKS
    assert other.messages == [
        {**message, "content": message["content"] or ""} for message in plain.messages
    ]
    assert (other.status, other.reward, other.step_rewards) == (
        plain.status,
        plain.reward,
        plain.step_rewards,
    )
    assert [one.input_ids.tolist() for one in other.trajectories] == [
        one.input_ids.tolist() for one in plain.trajectories
    ]
    assert list(other.tokens) == list(plain.tokens)
    assert list(other.loss_mask) == list(plain.loss_mask)
    counts = [name for name in plain.metrics if not name.endswith("seconds")]
    assert {name: other.metrics[name] for name in counts} == {
        name: plain.metrics[name] for name in counts
    }
    assert plain.metrics["trained_tokens"] > 0
    assert other.metrics.keys() == plain.metrics.keys()


class Shaping(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        res = await super()._execute_tool(env, action)
        res.reward += 0.5
        res.observation += " Yes."
        res.info = {**res.info.model_dump(), "seen": res.done}
        return res


class ShapingPlainly(TrainableToolCallingAgent):
    def _execute_tool(self, env: Any, action: Any) -> Any:
        res = super()._execute_tool(env, action)
        res.reward += 0.5
        res.observation += " Yes."
        res.info = {**res.info.model_dump(), "seen": res.done}
        return res


@pytest.mark.parametrize("kind", [Shaping, ShapingPlainly])
@pytest.mark.parametrize(
    ("name", "rewards", "text"),
    [("tau-bench", (0.5, 1.5), "look! Yes."), ("listed", (0.5, 1.5), "It is here. Yes.")],
)
async def test_the_result_of_super_can_be_read_and_changed(
    kind: type[TrainableToolCallingAgent], name: str, rewards: tuple[float, ...], text: str
) -> None:
    """A step of `ListedWorld` has no reward before the last: `+=` counts from 0."""
    result, _ = await episode(kind, name)
    assert (result.info.get("error"), result.step_rewards) == (None, rewards)
    assert result.info["seen"] is True
    assert text in [message["content"] for message in result.messages]


class Reset(TrainableToolCallingAgent):
    """The forms in which an override may use what `super()` returns."""

    form = ""

    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        first = super()._initialize_environment(env, task_index)
        if self.form == "returned":
            return first
        if self.form == "indexed":
            await first
            return first[0], first[1]
        obs, info = await first
        return f"{obs}!", info


@pytest.mark.parametrize("form", ["returned", "indexed", "changed"])
async def test_an_async_reset_uses_super(form: str) -> None:
    kind = type("Form", (Reset,), {"form": form})
    result, _ = await episode(kind, "tau-bench")
    assert result.messages[1]["content"] == ("Task 3.!" if form == "changed" else "Task 3.")
    assert result.info["source"] == "buy"


async def test_a_reset_that_is_read_without_await_warns_where_it_is_read() -> None:
    class Unawaited(TrainableToolCallingAgent):
        async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
            obs, info = super()._initialize_environment(env, task_index)
            return obs, info

    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        with pytest.warns(RuntimeWarning, match="an async hook reads") as caught:
            result = await agent_of(Unawaited, model).asolve(Shop(), task_index=3)
    assert result.reward == 1.0
    assert [one.filename for one in caught] == [__file__]


# --- asolve ---------------------------------------------------------------------------------------


class Listed(ListedWorld):
    """Records the task and the seed of its reset."""

    def reset(self, task: Task, seed: int) -> Any:
        self.asked = task, seed
        return super().reset(task, seed)


class Signature(TrainableToolCallingAgent):
    async def asolve(  # type: ignore[override]
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Any,
        task_index: Any = None,
        steps: int = 30,
    ) -> InteractionResult:
        return await super().asolve(env, rollout_args, sampling_params, task_index, steps)


class Again(Signature):
    """Two overrides on top of each other."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        return await super().asolve(*args)


class Published:
    """Another mixin, which knows nothing of toolroll."""

    async def asolve(
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Any,
        task_index: Any = None,
        steps: int = 30,
    ) -> InteractionResult:
        parent: Any = super()
        return await parent.asolve(env, rollout_args, sampling_params, task_index, steps)


class Mixed(Published, TrainableToolCallingAgent):  # type: ignore[misc]
    """The mixin's `asolve` comes first."""


class MixedAgain(Mixed):
    """Inherits an `asolve` that was wrapped already."""


class NextTask(Signature):
    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        env, rollout_args, sampling_params, task_index, steps = args
        return await super().asolve(env, rollout_args, sampling_params, task_index + 1, steps)


class WithPartner(Signature):
    """Plays another agent first, which has its own task."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        partner = agent_of(TrainableToolCallingAgent, self.model)  # type: ignore[arg-type]
        self.other = Listed()
        await partner.asolve(self.other, None, args[2])
        return await super().asolve(*args)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (Signature, (Task("3", 3), 7)),
        (Again, (Task("3", 3), 7)),
        (Mixed, (Task("3", 3), 7)),
        (MixedAgain, (Task("3", 3), 7)),
        (WithPartner, (Task("3", 3), 7)),
        (NextTask, (Task("4", 4), 7)),
    ],
)
async def test_asolve_with_the_published_signature_plays_the_task_of_the_run(
    kind: type[TrainableToolCallingAgent], asked: tuple[Task, int]
) -> None:
    env = Listed(tool_texts=("It is here.",))
    result, agent = await episode(kind, "listed", env)
    assert (result.status, env.asked) == (Status.COMPLETED, asked)
    if kind is WithPartner:
        assert agent.other.asked == (DRAWN, 0)


class BestOfTwo(Signature):
    """Plays the task twice, the second time with another seed."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        await super().asolve(*args)
        return await TrainableToolCallingAgent.asolve(self, *args, seed=0)


async def test_only_the_first_of_two_episodes_in_asolve_has_the_session_of_the_run() -> None:
    env, agent = Listed(tool_texts=("It is here.",)), BestOfTwo(TOOLS, WIKI)
    async with serving(load_embedded_tokenizer(), lambda _: Reply("Bye.")) as (engine, model):
        agent.model = model
        params = {"max_new_tokens": 200}
        run: Any = agent.asolve
        await run(env, None, params, 3, 1, task=Task("3", 3), seed=7, session_id="s")
        first, second = [entry.routing_key for entry in engine.log]
    assert (first, second not in ("s", "", None)) == ("s", True)
    assert env.asked == (Task("3", 3), 0)


# --- outside an episode ---------------------------------------------------------------------------


class OwnLoop(AsPublished):
    """Plays the episode itself, by calling the hooks as the published `asolve` does."""

    tokenizer: Any
    url: str

    async def asolve(self, env: Any, *args: Any) -> InteractionResult:  # type: ignore[override]
        self.used.add("asolve")
        state = SimpleNamespace(tokenizer=self.tokenizer)
        obs, info = self._initialize_environment(env, 3)
        messages = self._build_initial_messages(obs)
        prompt, prompt_ids = self._prepare_prompt_tokens(state, messages)
        res = InteractionResult(prompt=prompt, reward=0, messages=[], info={})
        self.ids: list[int] = []
        self.mask: list[int] = []
        reward = 0.0
        for _ in range(4):
            prompt_now = self._prepare_prompt_tokens(state, messages)[1]
            payload = {"input_ids": prompt_now, "sampling_params": {"max_new_tokens": 200}}
            output = await self._call_llm(f"{self.url}/generate", payload)
            reply = output["text"].removesuffix("<|im_end|>")
            parsed = self._parse_tool(reply)["parsed_result"]
            messages.append({"role": "assistant", "content": reply})
            self._add(messages, include_generation_prompt=bool(self.ids))
            action = call_to_action_sglang(parsed["calls"], parsed["normal_text"])
            step = await self._execute_tool(env, action)
            messages.append({"role": "tool", "name": action.name, "content": step.observation})
            self._add(messages)
            reward, info = step.reward, {**info, **step.info.model_dump()}
            if step.done:
                break
        return self._build_final_result(
            res, reward, info, messages, self.mask, prompt_ids, self.ids
        )

    def _add(self, messages: Any, **options: bool) -> None:
        ids, mask = self._get_token_delta(self.tokenizer, messages, **options)
        self.ids += ids
        self.mask += mask


@pytest.mark.parametrize("opened", [True, False])
async def test_hooks_called_directly_are_the_published_ones(opened: bool) -> None:
    tokenizer, shop = load_embedded_tokenizer(), Shop()
    async with serving(tokenizer, look_then_buy) as (engine, model):
        agent = OwnLoop(TOOLS, WIKI, "m", "p", rollout_args={"engine": model.url})
        agent.tokenizer, agent.url = tokenizer, model.url
        if opened:
            agent.model = model
        result = await agent.asolve(shop, None, None, 3)
        log = list(engine.log)
    assert agent.used == HOOKS
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert (result.reward, result.info["source"]) == (1.0, "buy")
    assert [message["content"] for message in result.messages[:2]] == [WIKI, "Task 3."]
    first, second = log
    assert result.tokens[: len(first.input_ids)] == first.input_ids.tolist()
    response = result.tokens[len(first.input_ids) :]
    trained = [i for i, m in zip(response, result.loss_mask, strict=True) if m]
    assert trained == [*first.output_ids, *second.output_ids]
    assert second.input_ids.tolist() == result.tokens[: len(second.input_ids)]


async def test_direct_calls_of_the_environment_s_hooks() -> None:
    agent = TrainableToolCallingAgent(TOOLS, WIKI, "m", "p")
    obs, info = await agent._initialize_environment(Shop(), 3)
    assert (obs, info["task"]["user_id"]) == ("Task 3.", "u")
    world = ListedWorld(tool_texts=("It is here.", "b"))
    obs, info = agent._initialize_environment(world, 3)
    assert (obs, info) == ("Hello.", {})
    task = asyncio.create_task(agent._execute_tool(world, Action("Hi.")))
    assert isinstance((await task).observation, str)

    class Async(ListedWorld):
        async def reset(self, task: Task, seed: int) -> Any:  # type: ignore[override]
            return super().reset(task, seed)

    first = agent._initialize_environment(Async(), 3)
    with pytest.raises(UsageError, match="write `await`"):
        _, _ = first
    assert await first == ("Hello.", {})
