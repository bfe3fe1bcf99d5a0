"""Agents as the published example writes them, and hooks that are called outside an episode."""

import asyncio
import threading
import warnings
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from support.episodes import call, serving
from support.hook_agents import (
    HOOKS,
    TASK,
    TOOLS,
    WIKI,
    AsPublished,
    OtherColor,
    PublishedAgent,
    Store,
    agent_of,
    look_then_buy,
    play,
)
from support.listed_environment import ListedWorld
from support.qwen import tokenizer_for, trl_template
from support.standins import stand_in

from toolroll import InteractionResult, Status, TrainableAgentMixin, TrainableToolCallingAgent
from toolroll.agents.loop.adapt import TauAction
from toolroll.agents.loop.environment_runner import DRAWN
from toolroll.agents.loop.published_hooks import episode_arguments
from toolroll.agents.trainable_agents import call_to_action_sglang
from toolroll.parsers.openai import create_openai_adapter
from toolroll.rollout.environment import Action, EnvironmentOptions, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.types import StopReason
from toolroll.testing import PolicyRequest, Reply, load_embedded_tokenizer


async def test_an_agent_exactly_as_published() -> None:
    """It aborted: its text hook got an `Observation`, and its reset a coroutine."""
    adapter = create_openai_adapter(TOOLS, parser_type="qwen25")
    result, store, _ = await play(PublishedAgent, openai_adapter=adapter)
    outcome = (result.status, result.reward, result.info.get("error"))
    assert outcome == (Status.COMPLETED, 1.0, None)
    assert [(action.name, action.kwargs) for action in store.actions] == [("look", {}), ("buy", {})]
    assert [message["content"] for message in result.messages[:2]] == [WIKI, "Task 3."]
    assert (result.info["task"]["user_id"], result.info["source"]) == ("u", "buy")
    assert vars(result)["judged_by"] == "nobody"
    [trajectory] = result.trajectories
    assert result.tokens == trajectory.input_ids.tolist()
    assert result.loss_mask == trajectory.loss_mask[trajectory.prompt_length :].tolist()
    assert len(result.loss_mask) == result.response_length > 0
    assert [name for name in result.metrics if name.startswith("token_mismatches")] == []
    assert result.metrics["trained_tokens"] > 0
    assert len(store.threads) == 3 and threading.main_thread() not in store.threads


def think_first(request: PolicyRequest) -> Reply:
    """A reply with reasoning, one whose call cannot be read, and a farewell."""
    second = 'Again.\n</think>\n\n<tool_call>{"name": "look"'
    replies = f"First.\n</think>\n\n{call('look', at='here')}", second, "Done.\n</think>\n\nBye."
    return Reply(f"<think>\n{replies[request.call]}")


look_up_an_order = lambda request: call("look", at="here") if request.call == 0 else "Goodbye."
here = lambda: ListedWorld(tool_texts=("It is here.", "b"))
DESK = load_environment("desk")
WORLDS: dict[str, Any] = {
    "tau-bench": (load_embedded_tokenizer, Store, look_then_buy, TASK),
    "listed": (load_embedded_tokenizer, here, look_up_an_order, TASK),
    "reasoning": (lambda: tokenizer_for(trl_template("qwen3")), here, think_first, TASK),
    "desk": (load_embedded_tokenizer, lambda: DESK.make(EnvironmentOptions()), look_up_an_order,
             DESK.tasks("test")[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("kind", [AsPublished, OtherColor])
async def test_overrides_that_return_super_s_do_nothing(kind: type[AsPublished], name: str) -> None:
    tokenizer, make, policy, task = WORLDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, _, _ = await play(env=make(), policy=policy, tokenizer=tokenizer(), task=task)
        result, _, agent = await play(kind, make(), policy, tokenizer=tokenizer(), task=task)
    assert agent.used == HOOKS

    def outcome(result: InteractionResult) -> dict[str, Any]:
        counts = {name for name in result.metrics if not name.endswith("seconds")}
        return {
            "info": result.info,
            "messages": [{**m, "content": m["content"] or ""} for m in result.messages],
            "end": (result.status, result.reward, result.step_rewards),
            "trajectories": [trajectory.input_ids.tolist() for trajectory in result.trajectories],
            "tokens": (list(result.tokens), list(result.loss_mask)),
            "metrics": (set(result.metrics), {name: result.metrics[name] for name in counts}),
        }

    assert outcome(result) == outcome(plain)
    assert [message["content"] for message in result.messages].count(None) == 0
    assert plain.metrics["trained_tokens"] > 0


class Listed(ListedWorld):
    """Records the task and the seed of its reset."""

    def reset(self, task: Task, seed: int) -> Any:
        self.begun = task, seed
        return super().reset(task, seed)


class Signature(TrainableToolCallingAgent):
    async def asolve(  # type: ignore[override]
        self, env: Any, rollout_args: Any, sampling_params: Any, task_index: Any = None, n: int = 30
    ) -> InteractionResult:
        return await super().asolve(env, rollout_args, sampling_params, task_index, n)


class Again(Signature):
    """Two overrides on top of each other."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        return await super().asolve(*args)


class Published:
    """Another mixin, which knows nothing of toolroll."""

    async def asolve(self, *args: Any) -> InteractionResult:
        parent: Any = super()
        return await parent.asolve(*args)


class Mixed(Published, TrainableToolCallingAgent):  # type: ignore[misc]
    """The mixin's `asolve` comes first."""


class NextTask(Signature):
    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        parent: Any = super()
        return await parent.asolve(*args[:3], args[3] + 1, *args[4:])


class WithPartner(Signature):
    """Plays another agent first, which has its own task."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        partner = agent_of(TrainableToolCallingAgent, self.model)  # type: ignore[arg-type]
        self.other = Listed()
        await partner.asolve(self.other, None, args[2])
        return await super().asolve(*args)


class BestOfTwo(Signature):
    """Plays the task twice, the second time with another seed."""

    async def asolve(self, *args: Any) -> InteractionResult:  # type: ignore[override]
        await super().asolve(*args)
        return await TrainableToolCallingAgent.asolve(self, *args, seed=0)


@pytest.mark.parametrize("kind", [Signature, Again, Mixed, WithPartner, NextTask])
async def test_a_published_signature_plays_the_task(kind: type[TrainableToolCallingAgent]) -> None:
    env = Listed(tool_texts=("It is here.",))
    result, _, agent = await play(kind, env, look_up_an_order)
    begun = (Task("4", 4), 7) if kind is NextTask else (TASK, 7)
    assert (result.status, env.begun) == (Status.COMPLETED, begun)
    if kind is WithPartner:
        assert agent.other.begun == (DRAWN, 0)


async def test_the_first_episode_has_the_task_and_the_session() -> None:
    env = Listed(tool_texts=("It is here.",))
    async with serving(load_embedded_tokenizer(), lambda _: Reply("Bye.")) as (engine, model):
        run: Any = agent_of(BestOfTwo, model).asolve
        await run(env, None, {"max_new_tokens": 200}, 3, 1, task=TASK, seed=7, session_id="s")
        first, second = [entry.routing_key for entry in engine.log]
    assert (first, second not in ("s", "", None)) == ("s", True)
    assert env.begun == (TASK, 0)
    with pytest.raises(UsageError, match="task=99 is no Task: a number is the argument task_index"):
        episode_arguments(object(), None, 99, None, None)  # type: ignore[arg-type]


class Draws(Store):
    """Draws a task if it gets none, as tau-bench does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [4, 1, 5, 2]

    def reset(self, task_index: int | None = None) -> Any:
        self.task_index = self.left.pop() if task_index is None else task_index
        return super().reset(self.task_index)


class Says(Store):
    """Has one task, and says which one in its info."""

    def reset(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(observation="Task 9.", info={"task_index": 9})


class Single(Store):
    """Takes no task, and names none."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(7)


class Chooses(TrainableToolCallingAgent):
    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        first = env.reset(task_index=6)
        return first.observation, {}


@pytest.mark.parametrize(
    ("env", "kind", "index", "played", "named"),
    [
        (Draws, TrainableToolCallingAgent, None, [2, 5, 1], [2, 5, 1]),
        (Draws, TrainableToolCallingAgent, 0, [0, 0], ["-", "-"]),
        (Draws, Chooses, None, [6, 6], [6, 6]),
        (Draws, Chooses, 3, [3], ["-"]),
        (Says, PublishedAgent, None, [9, 9], [9, 9]),
        (Single, PublishedAgent, None, [7, 7], [None, None]),
    ],
)
async def test_an_environment_draws_its_task(
    env: Any, kind: Any, index: int | None, played: list[int], named: list[Any]
) -> None:
    """It was task 0 for ever, and a `reset` without parameters failed."""
    store = env()
    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        results = [await agent_of(kind, model).asolve(store, None, None, index) for _ in played]
    assert [result.status for result in results] == [Status.COMPLETED] * len(played)
    assert [result.messages[1]["content"] for result in results] == [f"Task {n}." for n in played]
    assert [result.info.get("task_index", "-") for result in results] == named


async def test_an_environment_that_needs_an_index_plays_no_task_0() -> None:
    class Needs(Store):
        def reset(self, task_index: int) -> Any:  # type: ignore[override]
            return super().reset(task_index)

    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        result = await agent_of(PublishedAgent, model).asolve(Needs(), None, None)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert result.info["error"]["message"].endswith("no task was chosen: pass task or task_index")
    assert result.info["task_index"] is None


def dumping(data: Any) -> Any:
    return SimpleNamespace(model_dump=lambda: data)


class Informs(Store):
    """Its responses have these fields besides the usual ones."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def reset(self, task_index: int | None = None) -> Any:
        return SimpleNamespace(observation=f"Task {task_index}.", **self.fields)

    def step(self, action: Any) -> Any:
        step = super().step(action)
        given = {"observation": step.observation, "reward": step.reward, "done": step.done}
        return SimpleNamespace(**given, **self.fields)


@pytest.mark.parametrize("kind", [PublishedAgent, TrainableToolCallingAgent])
@pytest.mark.parametrize(
    ("fields", "info"),
    [
        ({}, {}),
        ({"info": {"a": 1}}, {"a": 1}),
        ({"info": dumping({"at": date(2026, 1, 2)})}, {"at": "2026-01-02"}),
        ({"info": TASK}, "the info Task("),
        ({"info": dumping([1])}, "must be None, a mapping, or an object whose model_dump()"),
    ],
)
async def test_the_info_of_a_response(kind: Any, fields: dict[str, Any], info: Any) -> None:
    result, _, _ = await play(kind, Informs(**fields))
    if isinstance(info, str):
        assert info in result.info["error"]["message"]
        assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    else:
        assert (result.info, result.reward) == (info, 1.0)


def test_an_action_is_tau_benchs_own_if_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class TauBenchAction(BaseModel):
        name: str
        kwargs: dict[str, Any]

    assert isinstance(call_to_action_sglang([], "Hi."), TauAction)
    stand_in(monkeypatch, {"tau_bench.types": {"Action": TauBenchAction}})
    action = call_to_action_sglang([{"name": "look", "parameters": '{"a": 1}'}], "")
    assert isinstance(action, TauBenchAction)
    assert (action.name, action.kwargs) == ("look", {"a": 1})


async def test_a_bare_mixin_makes_one_call_a_turn() -> None:
    class Bare(TrainableAgentMixin):
        tools_info = TOOLS
        wiki = WIKI

    def both_calls(request: PolicyRequest) -> Reply:
        return Reply(call("buy") if "!" in request.text else call("look") + call("buy"))

    store = Store()
    async with serving(load_embedded_tokenizer(), both_calls) as (_, model):
        agent = Bare()
        agent.model = model
        result = await agent.asolve(store, rollout_args={"verify": "always"}, task_index=0)
    assert [action.name for action in store.actions] == ["look", "buy"]
    assert result.reward == 1.0


async def test_an_agent_closes_only_a_model_that_it_opened() -> None:
    async with serving(load_embedded_tokenizer(), look_then_buy) as (engine, model):
        agent = agent_of(TrainableToolCallingAgent, model)
        await agent.aclose()
        assert agent.model is model
        own = TrainableToolCallingAgent(rollout_args={"engine": engine.url, "model": "embedded"})
        await own.asolve(Store(), task_index=0, max_num_steps=1)
        assert own._opened is not None
        await own.aclose()
        assert own._opened is None


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
        ids: list[int] = []
        mask: list[int] = []

        def add(role: str, content: str, **more: Any) -> None:
            messages.append({"role": role, "content": content, **more})
            first_reply = role == "assistant" and not ids
            options = {} if role == "tool" else {"include_generation_prompt": not first_reply}
            new_ids, new_mask = self._get_token_delta(self.tokenizer, messages, **options)
            ids.extend(new_ids)
            mask.extend(new_mask)

        reward = 0.0
        for _ in range(4):
            prompt_now = self._prepare_prompt_tokens(state, messages)[1]
            payload = {"input_ids": prompt_now, "sampling_params": {"max_new_tokens": 200}}
            output = await self._call_llm(f"{self.url}/generate", payload)
            reply = output["text"].removesuffix("<|im_end|>")
            parsed = self._parse_tool(reply)["parsed_result"]
            add("assistant", reply)
            action = call_to_action_sglang(parsed["calls"], parsed["normal_text"])
            step = await self._execute_tool(env, action)
            add("tool", step.observation, name=action.name)
            reward, info = step.reward, {**info, **step.info.model_dump()}
            if step.done:
                break
        return self._build_final_result(res, reward, info, messages, mask, prompt_ids, ids)


@pytest.mark.parametrize("opened", [True, False])
async def test_hooks_called_directly_are_the_published_ones(opened: bool) -> None:
    tokenizer, store = load_embedded_tokenizer(), Store()
    async with serving(tokenizer, look_then_buy) as (engine, model):
        agent = agent_of(OwnLoop, model if opened else None, rollout_args={"engine": model.url})
        vars(agent).update(tokenizer=tokenizer, url=model.url)
        result = await agent.asolve(store, None, None, 3)
        log = list(engine.log)
    assert vars(agent)["used"] == HOOKS
    assert [action.name for action in store.actions] == ["look", "buy"]
    assert (result.reward, result.info["source"]) == (1.0, "buy")
    assert [message["content"] for message in result.messages[:2]] == [WIKI, "Task 3."]
    first, second = log
    assert result.tokens[: len(first.input_ids)] == first.input_ids.tolist()
    response = result.tokens[len(first.input_ids) :]
    trained = [i for i, m in zip(response, result.loss_mask, strict=True) if m]
    assert trained == [*first.output_ids, *second.output_ids]
    assert second.input_ids.tolist() == result.tokens[: len(second.input_ids)]


async def test_direct_calls_of_the_environment_s_hooks() -> None:
    agent = agent_of(TrainableToolCallingAgent)
    obs, info = await agent._initialize_environment(Store(), 3)
    assert (obs, info["task"]["user_id"]) == ("Task 3.", "u")
    world = ListedWorld(tool_texts=("It is here.", "b"))
    obs, info = agent._initialize_environment(world, 3)
    assert (obs, info) == ("Hello.", {})
    stepping = asyncio.create_task(agent._execute_tool(world, Action("Hi.")))
    assert isinstance((await stepping).observation, str)

    class Async(ListedWorld):
        async def reset(self, task: Task, seed: int) -> Any:  # type: ignore[override]
            return super().reset(task, seed)

    first = agent._initialize_environment(Async(), 3)
    with pytest.raises(UsageError, match="write `await`"):
        _, _ = first
    assert await first == ("Hello.", {})
