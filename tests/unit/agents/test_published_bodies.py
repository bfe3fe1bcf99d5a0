"""Hook bodies as the published example has them: without `await`, with the observation's text."""

from __future__ import annotations

import json
import threading
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel
from support.episodes import call, judge, serving
from support.patience import PATIENCE
from support.standins import stand_in

from toolroll.agents.environments.tau_bench.package import import_module
from toolroll.agents.loop.adapt import TauAction
from toolroll.agents.trainable_agents import (
    TrainableAgentMixin,
    TrainableToolCallingAgent,
    call_to_action_sglang,
)
from toolroll.parsers.openai import create_openai_adapter
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import InteractionResult, Status, StopReason
from toolroll.testing import PolicyRequest, Reply, load_embedded_tokenizer

types: Any = import_module("support.tau_mini.types")  # without litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("look", "buy")
]
WIKI = "Sell."


class Shop:
    """tau-bench's interface, with its pydantic types. `buy` ends the episode and earns 1."""

    wiki = WIKI
    tools_info = TOOLS
    blocking = True

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.threads: list[threading.Thread] = []

    def reset(self, task_index: int | None = None) -> Any:
        self.threads.append(threading.current_thread())
        task = types.Task(user_id="u", actions=[], instruction="", outputs=[])
        return types.EnvResetResponse(
            observation=f"Task {task_index}.", info=types.EnvInfo(task=task)
        )

    def step(self, action: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.actions.append(action)
        done = action.name == "buy"
        task = types.Task(user_id="u", actions=[], instruction="", outputs=[])
        return types.EnvResponse(
            observation=f"{action.name}!",
            reward=float(done),
            done=done,
            info=types.EnvInfo(task=task, source=action.name),
        )


def look_then_buy(request: PolicyRequest) -> Reply:
    seen = "look!" in request.text or "Mine." in request.text
    return Reply(call("buy" if seen else "look"))


class PublishedAgent(TrainableToolCallingAgent):
    """Each hook is overridden with the body that the published example has."""

    def _reformulate_tool_call(self, text: str) -> str:
        return text.replace(
            "You may call one or more functions to assist with the user query.", "One call."
        )

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(self.model, Model)
        return await self.model.post(url, payload)

    def _parse_tool(self, response: str) -> dict[str, Any]:
        parsed: dict[str, Any] = self.openai_adapter.parse_response_to_openai_format(response)
        return parsed

    async def _execute_tool(self, env: Any, action: Any) -> Any:
        return env.step(action)

    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        env_reset_res = env.reset(task_index=task_index)
        return env_reset_res.observation, env_reset_res.info.model_dump()

    def _build_initial_messages(self, obs: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.wiki}, {"role": "user", "content": obs}]

    def _prepare_prompt_tokens(
        self, state: Any, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[int]]:
        prompt_text = state.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, tools=self.tools_info
        )
        prompt_text = self._reformulate_tool_call(prompt_text)
        prompt_token_ids = state.tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
        return prompt_text, prompt_token_ids

    def _build_final_result(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        res: Any,
        total_reward: Any,
        info: Any,
        messages: Any,
        loss_masks: Any,
        prompt_token_ids: Any,
        response_token_ids: Any,
    ) -> InteractionResult:
        res.reward = total_reward
        res.info = info
        res.messages = messages
        res.loss_mask = loss_masks
        res.tokens = prompt_token_ids + response_token_ids
        res.response = "".join(
            [msg.get("content", "") for msg in messages if msg["role"] == "assistant"]
        )
        res.response_length = len(loss_masks)
        res.judged_by = "nobody"
        final: InteractionResult = res
        return final


def agent_of(
    kind: type[TrainableToolCallingAgent], model: Model, **more: Any
) -> TrainableToolCallingAgent:
    agent = kind(
        TOOLS,
        WIKI,
        rollout_args={"verify": "always"},
        sampling_params={"max_new_tokens": 200},
        model=model,
    )
    for name, value in more.items():
        setattr(agent, name, value)
    return agent


async def played(
    kind: type[TrainableToolCallingAgent],
    policy: Any = look_then_buy,
    env: Any = None,
    **more: Any,
) -> tuple[InteractionResult, Any]:
    """An episode of `kind` on a `Shop`; `more` are attributes of the instance."""
    shop = env or Shop()
    async with serving(load_embedded_tokenizer(), policy) as (engine, model):
        agent = agent_of(kind, model, **more)
        result = await agent.asolve(shop, task_index=3, session_id="s")
        if result.status is Status.COMPLETED:
            keyed = not agent._has("_call_llm")  # a payload has no header to name the session
            judge(result, engine, "s" if keyed else "")
    return result, shop


async def test_an_agent_exactly_as_published() -> None:
    """It aborted: its text hook got an `Observation`, and its reset a coroutine."""
    adapter = create_openai_adapter(TOOLS, parser_type="qwen25")
    result, shop = await played(PublishedAgent, openai_adapter=adapter)
    assert (result.status, result.reward, result.info.get("error")) == (
        Status.COMPLETED,
        1.0,
        None,
    )
    assert [(action.name, action.kwargs) for action in shop.actions] == [("look", {}), ("buy", {})]
    assert [message["content"] for message in result.messages[:2]] == [WIKI, "Task 3."]
    assert result.info["task"]["user_id"] == "u"
    assert result.info["source"] == "buy"
    assert vars(result)["judged_by"] == "nobody"
    [made] = result.trajectories
    assert result.tokens == made.input_ids.tolist()
    assert result.loss_mask == made.loss_mask[made.prompt_length :].tolist()
    assert len(result.loss_mask) == result.response_length > 0
    assert [name for name in result.metrics if name.startswith("token_mismatches")] == []
    assert result.metrics["trained_tokens"] > 0
    assert len(shop.threads) == 3 and threading.main_thread() not in shop.threads


class NamesLlama(PublishedAgent):
    """Its adapter cannot read the model's calls."""

    openai_adapter: Any = create_openai_adapter(TOOLS, parser_type="llama3")


class NamesNone(NamesLlama):
    openai_adapter = None


@pytest.mark.parametrize(
    ("kind", "parse"),
    [(PublishedAgent, True), (NamesLlama, True), (NamesLlama, False), (NamesNone, False)],
)
async def test_an_adapter_of_none_is_the_model_s(kind: type[PublishedAgent], parse: bool) -> None:
    inherits = {} if parse else {"_parse_tool": TrainableToolCallingAgent._parse_tool}
    more: dict[str, Any] = {} if kind is NamesNone else {"openai_adapter": None}
    result, shop = await played(cast(Any, type("Kind", (kind,), inherits)), **more)
    assert (result.info.get("error"), result.reward) == (None, 1.0)
    assert [action.name for action in shop.actions] == ["look", "buy"]


# --- the task and the info of a response ---------------------------------------------------------


class Draws(Shop):
    """Draws a task if it gets none, as tau-bench does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [4, 1, 5, 2]

    def reset(self, task_index: int | None = None) -> Any:
        self.task_index = self.left.pop() if task_index is None else task_index
        return super().reset(self.task_index)


class Says(Shop):
    """Has one task, and says which one in its info."""

    def reset(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(observation="Task 9.", info={"task_index": 9})


class Single(Shop):
    """Takes no task, and names none."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(7)


class Chooses(TrainableToolCallingAgent):
    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        first = env.reset(task_index=6)
        return first.observation, {}


@pytest.mark.parametrize(
    ("env", "kind", "index", "texts", "named"),
    [
        (Draws, PublishedAgent, None, [2, 5, 1], [2, 5, 1]),
        (Draws, TrainableToolCallingAgent, None, [2, 5, 1], [2, 5, 1]),
        (Draws, TrainableToolCallingAgent, 0, [0, 0], ["-", "-"]),
        (Draws, Chooses, None, [6, 6], [6, 6]),
        (Draws, Chooses, 3, [3], ["-"]),
        (Says, PublishedAgent, None, [9, 9], [9, 9]),
        (Single, PublishedAgent, None, [7, 7], [None, None]),
    ],
)
async def test_the_environment_draws_the_task_if_none_is_chosen(
    env: type[Shop],
    kind: type[TrainableToolCallingAgent],
    index: int | None,
    texts: list[int],
    named: list[Any],
) -> None:
    """It was task 0 for ever, and a `reset` without parameters failed."""
    shop, results = env(), []
    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        for _ in texts:
            results.append(await agent_of(kind, model).asolve(shop, None, None, index))
    assert [result.status for result in results] == [Status.COMPLETED] * len(texts)
    assert [result.messages[1]["content"] for result in results] == [f"Task {n}." for n in texts]
    assert [result.info.get("task_index", "-") for result in results] == named


async def test_an_environment_that_needs_an_index_does_not_play_task_0() -> None:
    class Needs(Shop):
        def reset(self, task_index: int) -> Any:  # type: ignore[override]
            return super().reset(task_index)

    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        result = await agent_of(PublishedAgent, model).asolve(Needs(), None, None)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert result.info["error"]["message"].endswith("no task was chosen: pass task or task_index")
    assert result.info["task_index"] is None


class Dumps:
    """What `model_dump` returns."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def model_dump(self) -> Any:
        return self.data


class DumpsWith(Dumps):
    def model_dump(self, **options: Any) -> Any:
        return self.data


class Informs(Shop):
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


@dataclass
class Record:
    a: int = 1


@pytest.mark.parametrize("kind", [PublishedAgent, TrainableToolCallingAgent])
@pytest.mark.parametrize(
    ("fields", "info"),
    [
        ({}, {}),
        ({"info": None}, {}),
        ({"info": {"a": 1}}, {"a": 1}),
        ({"info": Dumps({"a": 1})}, {"a": 1}),
        ({"info": Dumps({"at": date(2026, 1, 2)})}, {"at": "2026-01-02"}),
        ({"info": DumpsWith({"a": 1})}, {"a": 1}),
        ({"info": Record()}, "the info Record(a=1)"),
        ({"info": SimpleNamespace(dict=lambda: {"a": 1})}, "the info namespace(dict="),
        ({"info": Dumps([1])}, "must be None, a mapping, or an object whose model_dump() returns"),
    ],
)
async def test_the_info_of_a_response(
    kind: type[TrainableToolCallingAgent], fields: dict[str, Any], info: Any
) -> None:
    result, _ = await played(kind, env=Informs(**fields))
    if isinstance(info, str):
        assert info in result.info["error"]["message"]
        assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    else:
        assert (result.info, result.reward) == (info, 1.0)


# --- the forms of a hook that executes a step ---------------------------------------------------


async def read_without_await(env: Any, action: Any) -> Any:
    step = env.step(action)
    step.reward += 0.5
    if action.name == "look":
        assert action.kwargs == {}
        step.observation = step.observation + " " + env.wiki
    return step


def plain(env: Any, action: Any) -> Any:
    step = env.step(action)
    step.reward += 0.5
    return step


def plain_that_raises_the_reward_to_nan(env: Any, action: Any) -> Any:
    step = env.step(action)
    step.reward = float("nan")
    return step


async def another_object(env: Any, action: Any) -> Any:
    step = await env.step(action)
    return SimpleNamespace(observation="Mine.", reward=step.reward + 0.5, done=step.done, info=None)


async def awaited_and_returned(env: Any, action: Any) -> Any:
    call = env.step(action)
    await call
    return call


async def awaited_and_read(env: Any, action: Any) -> Any:
    call = env.step(action)
    await call
    call.reward += 0.5
    return call


def awaited_by_a_plain_hook(env: Any, action: Any) -> Any:
    call = env.step(action)

    async def result() -> Any:
        return await call

    return result()


def executed_twice(env: Any, action: Any) -> Any:
    env.step(action)
    return env.step(action)


@pytest.mark.parametrize(
    ("execute", "rewards", "executed"),
    [
        (plain, (0.5, 1.5), ["look", "buy"]),
        (another_object, (0.5, 1.5), ["look", "buy"]),
        (awaited_and_returned, (0.0, 1.0), ["look", "buy"]),
        (awaited_and_read, (0.5, 1.5), ["look", "buy"]),
        (awaited_by_a_plain_hook, (0.0, 1.0), ["look", "buy"]),
        (executed_twice, (0.0,), ["look", "look", "buy"]),  # the third call is after the end
    ],
)
async def test_a_step_is_executed_as_often_as_it_is_called(
    execute: Any, rewards: tuple[float, ...], executed: list[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, shop = await played(TrainableToolCallingAgent, _execute_tool=execute)
    assert result.step_rewards == rewards
    assert [action.name for action in shop.actions] == executed
    assert threading.main_thread() not in shop.threads


async def test_a_response_that_is_changed_in_an_async_hook() -> None:
    with pytest.warns(RuntimeWarning, match=r"write `await env.step\(action\)`"):
        result, _ = await played(TrainableToolCallingAgent, _execute_tool=read_without_await)
    assert result.reward == 1.5
    assert result.step_rewards == (0.5, 1.5)
    contents = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert contents == ["look! Sell.", "buy!"]


# --- hooks that fail ----------------------------------------------------------------------------


def changed(**fields: Any) -> Any:
    """A hook that returns the result of the environment with other `fields`."""

    async def execute(env: Any, action: Any) -> Any:
        return replace(await env.step(action), **fields)

    return execute


def returned(value: Any) -> Any:
    return lambda *_: value


def raised(error: BaseException) -> Any:
    def hook(*_: Any) -> Any:
        raise error

    return hook


def object_with(**fields: Any) -> Any:
    step = {"observation": "Mine.", "reward": 0.0, "done": False, "info": None}
    return returned(SimpleNamespace(**(step | fields)))


def with_reward_nan(result: Any, *_: Any) -> Any:
    result.reward = float("nan")
    return result


INTERNAL, ENVIRONMENT = StopReason.INTERNAL_ERROR, StopReason.ENVIRONMENT_ERROR
FAILURES: list[tuple[str, Any, StopReason, str]] = [
    ("_build_final_result", raised(KeyError("mine")), INTERNAL, "mine"),
    ("_build_final_result", raised(SystemExit(3)), INTERNAL, "SystemExit"),
    ("_build_final_result", returned(None), ENVIRONMENT, "_build_final_result returned NoneType"),
    ("_build_final_result", with_reward_nan, ENVIRONMENT, "_build_final_result gave the reward"),
    ("_execute_tool", returned({}), ENVIRONMENT, "returned dict: return the result of env.step"),
    ("_execute_tool", changed(done="false"), ENVIRONMENT, "done must be True or False"),
    ("_execute_tool", changed(reward=float("nan")), ENVIRONMENT, "gave the reward nan"),
    ("_execute_tool", changed(messages="text"), ENVIRONMENT, "messages must be a list"),
    ("_execute_tool", changed(info=None), ENVIRONMENT, "info must be a mapping"),
    ("_execute_tool", plain_that_raises_the_reward_to_nan, ENVIRONMENT, "gave the reward nan"),
    ("_execute_tool", object_with(done="no"), ENVIRONMENT, "done must be True"),
    ("_execute_tool", object_with(reward="1.0"), ENVIRONMENT, "gave the reward '1"),
    ("_initialize_environment", returned(None), ENVIRONMENT, "_initialize_environment"),
    ("_initialize_environment", returned(("text", None)), ENVIRONMENT, "_initialize_environment"),
    ("_build_initial_messages", returned("text"), ENVIRONMENT, "_build_initial_messages"),
    ("_build_initial_messages", returned([1]), ENVIRONMENT, "_build_initial_messages"),
    ("_prepare_prompt_tokens", returned(None), ENVIRONMENT, "_prepare_prompt_tokens"),
    ("_prepare_prompt_tokens", returned(("text", ["a"])), ENVIRONMENT, "_prepare_prompt_tokens"),
    ("_prepare_prompt_tokens", returned(("text", [1.7])), ENVIRONMENT, "_prepare_prompt_tokens"),
    ("_get_token_delta", returned(None), ENVIRONMENT, "_get_token_delta"),
    ("_parse_tool", returned(None), ENVIRONMENT, "_parse_tool"),
    ("_parse_tool", returned({"parsed_result": {"calls": "x"}}), ENVIRONMENT, "_parse_tool"),
    ("_reformulate_tool_call", returned(None), ENVIRONMENT, "_reformulate_tool_call"),
]


@pytest.mark.parametrize(("hook", "body", "reason", "words"), FAILURES)
async def test_a_hook_that_fails_aborts_its_episode_and_is_named(
    hook: str, body: Any, reason: StopReason, words: str
) -> None:
    result, _ = await played(TrainableToolCallingAgent, **{hook: body})
    assert (result.status, result.stop_reason, result.reward) == (Status.ABORTED, reason, None)
    message = result.info["error"]["message"]
    assert words in message
    assert reason is INTERNAL or hook in message
    rewards = [turn.reward for trajectory in result.trajectories for turn in trajectory.turns]
    assert set(rewards) <= {0.0}


@pytest.mark.parametrize("execute", [plain, read_without_await])
@pytest.mark.filterwarnings("ignore:an async hook reads")
async def test_an_environment_that_fails_in_a_hook(execute: Any) -> None:
    class Broken(Shop):
        def step(self, action: Any) -> Any:
            raise ValueError("out of order")

    result, _ = await played(TrainableToolCallingAgent, env=Broken(), _execute_tool=execute)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "out of order" in result.info["error"]["message"]


# --- other hooks --------------------------------------------------------------------------------


async def test_the_adapter_that_is_set_parses() -> None:
    """It was ignored: the text of a call went to the user as speech, and was trained."""

    def llama(request: PolicyRequest) -> Reply:
        name = "buy" if "look!" in request.text else "look"
        return Reply('<|python_tag|>{"name": "' + name + '", "parameters": {}}')

    adapter = create_openai_adapter(TOOLS, parser_type="llama3")
    result, shop = await played(TrainableToolCallingAgent, llama, openai_adapter=adapter)
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert result.reward == 1.0


async def test_an_attribute_that_info_lacks() -> None:
    class Reads(TrainableToolCallingAgent):
        def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
            first = env.reset()
            with pytest.raises(AttributeError, match="info has no 'nothing'"):
                _ = first.info.nothing
            with pytest.raises(AttributeError, match="has 'nothing'"):
                _ = env.nothing
            return first.observation + "!", first.info

    result, _ = await played(Reads)
    assert [one["content"] for one in result.messages[:2]] == [WIKI, "Task 3.!"]
    assert result.info["task"]["user_id"] == "u"


def test_an_action_is_tau_benchs_own_if_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Action(BaseModel):
        name: str
        kwargs: dict[str, Any]

    assert isinstance(call_to_action_sglang([], "Hi."), TauAction)
    stand_in(monkeypatch, {"tau_bench.types": {"Action": Action}})
    found = call_to_action_sglang([{"name": "look", "parameters": '{"a": 1}'}], "")
    assert isinstance(found, Action)
    assert (found.name, found.kwargs) == ("look", {"a": 1})


async def test_a_bare_mixin_makes_one_call_a_turn() -> None:
    class Bare(TrainableAgentMixin):
        tools_info = TOOLS
        wiki = WIKI

    shop = Shop()
    async with serving(
        load_embedded_tokenizer(),
        lambda request: Reply(call("buy") if "!" in request.text else call("look") + call("buy")),
    ) as (_, model):
        agent = Bare()
        agent.model = model
        result = await agent.asolve(shop, rollout_args={"verify": "always"}, task_index=0)
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert result.reward == 1.0


class BlockingRequest(TrainableToolCallingAgent):
    """On the event loop, this request would wait for the engine of this process forever."""

    def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            url, json.dumps(payload).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)


class ReturnsAwaitable(TrainableToolCallingAgent):
    def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        assert isinstance(self.model, Model)
        return self.model.post(url, payload)


@pytest.mark.parametrize("kind", [BlockingRequest, ReturnsAwaitable])
async def test_a_plain_request_hook(kind: type[TrainableToolCallingAgent]) -> None:
    result, _ = await played(kind)
    assert (result.reward, result.info.get("error")) == (1.0, None)


async def test_a_hook_reads_what_it_has_set() -> None:
    """The runner has a `seed` of its own, and `env` of an environment need not be one."""
    seen: list[Any] = []

    class Sets(TrainableToolCallingAgent):
        async def _execute_tool(self, env: Any, action: Any) -> Any:
            env.seed, env.mark = "mine", 1
            seen.append((env.seed, env.mark))
            return await env.step(action)

    result, shop = await played(Sets)
    assert (result.reward, seen) == (1.0, [("mine", 1)] * 2)
    assert (shop.seed, shop.mark) == ("mine", 1)


async def test_the_token_hooks_get_the_arguments_of_the_call() -> None:
    seen: list[Any] = []

    class Reads(TrainableToolCallingAgent):
        def _prepare_prompt_tokens(self, state: Any, messages: Any) -> Any:
            seen.append(state.args)
            return super()._prepare_prompt_tokens(state, messages)

    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, model):
        await agent_of(Reads, model).asolve(Shop(), {"verify": "off"}, task_index=0)
    assert seen == [{"verify": "off"}]


async def test_an_agent_closes_only_a_model_that_it_opened() -> None:
    async with serving(load_embedded_tokenizer(), look_then_buy) as (engine, model):
        agent = agent_of(TrainableToolCallingAgent, model)
        await agent.aclose()
        assert agent.model is model
        own = TrainableToolCallingAgent(rollout_args={"engine": engine.url, "model": "embedded"})
        await own.asolve(Shop(), task_index=0, max_num_steps=1)
        assert own._opened is not None
        await own.aclose()
        assert own._opened is None
