"""Hook bodies as the published example has them: without `await`, with the observation's text."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from support.episodes import call, judge, serving
from support.patience import PATIENCE

from toolroll.agents.environments.tau_actions import TauAction
from toolroll.agents.environments.tau_bench.package import import_module
from toolroll.agents.trainable_agents import (
    TrainableAgentMixin,
    TrainableToolCallingAgent,
    call_to_action_sglang,
)
from toolroll.parsers.openai import create_openai_adapter
from toolroll.rollout.model.model import Model
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.testing import PolicyRequest, Reply, load_embedded_tokenizer
from toolroll.rollout.types import InteractionResult, Status, StopReason

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
        assert self.served is not None
        return await self.served.post(url, payload)

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
    kind: type[TrainableToolCallingAgent], served: Model, **more: Any
) -> TrainableToolCallingAgent:
    agent = kind(
        TOOLS,
        WIKI,
        rollout_args={"verify": "always"},
        sampling_params={"max_new_tokens": 200},
        served=served,
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
    async with serving(load_embedded_tokenizer(), policy) as (engine, served):
        agent = agent_of(kind, served, **more)
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


class Raising(TrainableToolCallingAgent):
    def _build_final_result(self, res: Any, *args: Any, **named: Any) -> Any:
        raise KeyError("mine")


class Leaving(TrainableToolCallingAgent):
    def _build_final_result(self, res: Any, *args: Any, **named: Any) -> Any:
        raise SystemExit(3)


class Nothing(TrainableToolCallingAgent):
    def _build_final_result(self, res: Any, *args: Any, **named: Any) -> Any:
        res.judged_by = "nobody"


class NotANumber(TrainableToolCallingAgent):
    def _build_final_result(self, res: Any, *args: Any, **named: Any) -> Any:
        res.reward = float("nan")
        return res


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        (Raising, StopReason.INTERNAL_ERROR, "mine"),
        (Leaving, StopReason.INTERNAL_ERROR, "SystemExit"),
        (Nothing, StopReason.ENVIRONMENT_ERROR, "_build_final_result returned NoneType"),
        (NotANumber, StopReason.ENVIRONMENT_ERROR, "_build_final_result gave the reward nan"),
    ],
)
async def test_a_final_result_that_fails(
    kind: type[TrainableToolCallingAgent], reason: StopReason, words: str
) -> None:
    result, _ = await played(kind)
    assert (result.status, result.stop_reason, result.reward) == (Status.ABORTED, reason, None)
    assert words in result.info["error"]["message"]
    assert [turn.reward for one in result.trajectories for turn in one.turns] == [0.0, 0.0]


class NamesLlama(PublishedAgent):
    """Its adapter cannot read the model's calls."""

    openai_adapter: Any = create_openai_adapter(TOOLS, parser_type="llama3")


class NamesNone(NamesLlama):
    openai_adapter = None


@pytest.mark.parametrize("parse", [PublishedAgent._parse_tool, None])
@pytest.mark.parametrize("kind", [PublishedAgent, NamesLlama, NamesNone])
async def test_an_adapter_of_none_is_the_model_s(kind: type[PublishedAgent], parse: Any) -> None:
    inherits = {} if parse else {"_parse_tool": TrainableToolCallingAgent._parse_tool}
    more: dict[str, Any] = {} if kind is NamesNone else {"openai_adapter": None}
    result, shop = await played(cast(Any, type("Kind", (kind,), inherits)), **more)
    assert (result.info.get("error"), result.reward) == (None, 1.0)
    assert [action.name for action in shop.actions] == ["look", "buy"]


async def test_blocking_calls_of_plain_hooks_are_off_the_event_loop() -> None:
    _, shop = await played(PublishedAgent, openai_adapter=create_openai_adapter(TOOLS))
    assert len(shop.threads) == 3
    assert threading.main_thread() not in shop.threads


class Shaping(TrainableToolCallingAgent):
    """Reads and changes the response, without `await`."""

    async def _execute_tool(self, env: Any, action: Any) -> Any:
        response = env.step(action)
        response.reward += 0.5
        if action.name == "look":
            assert action.kwargs == {}
            response.observation = response.observation + " " + env.wiki
        return response


async def test_a_response_that_is_changed_in_an_async_hook() -> None:
    with pytest.warns(RuntimeWarning, match=r"write `await env.step\(action\)`"):
        result, _ = await played(Shaping)
    assert result.reward == 1.5
    assert result.step_rewards == (0.5, 1.5)
    assert [one["content"] for one in result.messages if one["role"] == "tool"] == [
        "look! Sell.",
        "buy!",
    ]


class Plain(TrainableToolCallingAgent):
    def _execute_tool(self, env: Any, action: Any) -> Any:
        response = env.step(action)
        response.reward += 0.5
        return response


class Awaiting(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        step = await env.step(action)
        return SimpleNamespace(
            observation="Mine.", reward=step.reward + 0.5, done=step.done, info=None
        )


@pytest.mark.parametrize("kind", [Plain, Awaiting])
async def test_other_ways_to_change_a_response(kind: type[TrainableToolCallingAgent]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, shop = await played(kind)
    assert result.step_rewards == (0.5, 1.5)
    assert threading.main_thread() not in shop.threads


async def test_a_plain_hook_s_call_is_executed_even_if_it_is_not_read() -> None:
    """As with an environment that is called directly; a published hook may ignore a result."""

    class Twice(TrainableToolCallingAgent):
        def _execute_tool(self, env: Any, action: Any) -> Any:
            env.step(action)
            return env.step(action)

    _, shop = await played(Twice)
    assert [action.name for action in shop.actions[:2]] == ["look", "look"]


async def test_a_result_that_is_none() -> None:
    class Wrong(TrainableToolCallingAgent):
        async def _execute_tool(self, env: Any, action: Any) -> Any:
            return {"reward": 1.0}

    result, _ = await played(Wrong)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert (
        "_execute_tool returned dict: return the result of env.step(action)"
        in (result.info["error"]["message"])
    )


def returns(change: Any) -> type[TrainableToolCallingAgent]:
    """An agent whose `_execute_tool` returns `change` of the environment's result."""

    class Changed(TrainableToolCallingAgent):
        async def _execute_tool(self, env: Any, action: Any) -> Any:
            return change(await env.step(action))

    return Changed


class ChangedResponse(TrainableToolCallingAgent):
    def _execute_tool(self, env: Any, action: Any) -> Any:
        response = env.step(action)
        response.reward = float("nan")
        return response


OBJECT = {"observation": "Mine.", "reward": 0.0, "done": False, "info": None}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (returns(lambda step: replace(step, done="false")), "done must be True or False"),
        (returns(lambda step: replace(step, reward=float("nan"))), "gave the reward nan"),
        (returns(lambda step: replace(step, messages="text")), "messages must be a list"),
        (returns(lambda step: replace(step, info=None)), "info must be a mapping"),
        (ChangedResponse, "gave the reward nan"),
        (returns(lambda _: SimpleNamespace(**{**OBJECT, "done": "no"})), "done must be True"),
        (returns(lambda _: SimpleNamespace(**{**OBJECT, "reward": "1.0"})), "gave the reward '1"),
    ],
)
async def test_a_result_with_a_wrong_value(
    kind: type[TrainableToolCallingAgent], words: str
) -> None:
    """`done="false"` was true, and earned 0; a reward that is not a number got through."""
    result, _ = await played(kind)
    assert (result.stop_reason, result.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    message = result.info["error"]["message"]
    assert message.startswith("_execute_tool") and words in message


@pytest.mark.parametrize("kind", [Plain, Shaping])
@pytest.mark.filterwarnings("ignore:an async hook reads")
async def test_an_environment_that_fails_in_a_hook(kind: type[TrainableToolCallingAgent]) -> None:
    class Broken(Shop):
        def step(self, action: Any) -> Any:
            raise ValueError("out of order")

    result, _ = await played(kind, env=Broken())
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "out of order" in result.info["error"]["message"]


async def test_the_adapter_that_is_set_parses() -> None:
    """It was ignored: the text of a call went to the user as speech, and was trained."""

    def llama(request: PolicyRequest) -> Reply:
        name = "buy" if "look!" in request.text else "look"
        return Reply('<|python_tag|>{"name": "' + name + '", "parameters": {}}')

    adapter = create_openai_adapter(TOOLS, parser_type="llama3")
    result, shop = await played(TrainableToolCallingAgent, llama, openai_adapter=adapter)
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert result.reward == 1.0


async def test_hooks_set_on_an_instance() -> None:
    seen: list[str] = []

    async def execute(env: Any, action: Any) -> Any:
        seen.append(action.name)
        return env.step(action)

    result, _ = await played(TrainableToolCallingAgent, _execute_tool=execute)
    assert result.reward == 1.0
    assert seen == ["look", "buy"]


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


async def test_an_environment_of_ours_under_published_hooks() -> None:
    """The tools of its reset are kept, though the published hooks hand on a text only."""
    from toolroll.rollout.runs.registry import load_environment
    from toolroll.rollout.types import EnvironmentOptions

    desk = load_environment("desk")
    async with serving(load_embedded_tokenizer(), lambda request: Reply("Bye.")) as (_, served):
        agent = PublishedAgent(served=served, sampling_params={"max_new_tokens": 20})
        agent.openai_adapter = create_openai_adapter(())
        result = await agent.asolve(
            desk.make(EnvironmentOptions()), task=desk.tasks("test")[0], max_num_steps=1
        )
    assert result.info.get("error") is None
    assert len(result.tools) > 3
    assert result.messages[1]["role"] == "user"


async def test_prepare_prompt_tokens_called_directly_gives_what_is_served() -> None:
    async with serving(load_embedded_tokenizer(), look_then_buy) as (engine, served):
        agent = agent_of(TrainableToolCallingAgent, served)
        result = await agent.asolve(Shop(), task_index=3, session_id="s")
        text, ids = agent._prepare_prompt_tokens(None, result.messages[:2])
        first = next(entry for entry in engine.log if entry.routing_key == "s")
        assert ids == first.input_ids.tolist()
        assert "Call at most one function" in text


def test_an_abort_is_an_abort_unless_resuming_is_asked_for() -> None:
    assert RolloutArgs().max_resumes == 0
    assert RolloutArgs(max_resumes=2).max_resumes == 2


def test_an_action_is_tau_benchs_own_if_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Action(SimpleNamespace):
        pass

    assert isinstance(call_to_action_sglang([], "Hi."), TauAction)
    module = ModuleType("tau_bench.types")
    vars(module)["Action"] = Action
    monkeypatch.setitem(sys.modules, "tau_bench.types", module)
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
    ) as (_, served):
        agent = Bare()
        agent.served = served
        result = await agent.asolve(shop, rollout_args={"verify": "always"}, task_index=0)
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert result.reward == 1.0


class AwaitedAndReturned(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        call = env.step(action)
        await call
        return call


class AwaitedAndRead(TrainableToolCallingAgent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        call = env.step(action)
        await call
        call.reward += 0.5
        return call


class AwaitedByAPlainHook(TrainableToolCallingAgent):
    def _execute_tool(self, env: Any, action: Any) -> Any:
        call = env.step(action)

        async def result() -> Any:
            return await call

        return result()


@pytest.mark.parametrize("kind", [AwaitedAndReturned, AwaitedAndRead, AwaitedByAPlainHook])
async def test_a_call_is_executed_once_however_often_it_is_read(
    kind: type[TrainableToolCallingAgent],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, shop = await played(kind)
    assert [action.name for action in shop.actions] == ["look", "buy"]
    assert result.reward == (1.5 if kind is AwaitedAndRead else 1.0)


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
        assert self.served is not None
        return self.served.post(url, payload)


@pytest.mark.parametrize("kind", [BlockingRequest, ReturnsAwaitable])
async def test_a_plain_request_hook(kind: type[TrainableToolCallingAgent]) -> None:
    result, _ = await played(kind)
    assert (result.reward, result.info.get("error")) == (1.0, None)


async def test_what_a_hook_sets_is_set_on_the_environment() -> None:
    class Marks(TrainableToolCallingAgent):
        async def _execute_tool(self, env: Any, action: Any) -> Any:
            env.price = getattr(env, "price", 0) + 1
            return await env.step(action)

    _, shop = await played(Marks)
    assert shop.price == 2


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

    async with serving(load_embedded_tokenizer(), look_then_buy) as (_, served):
        await agent_of(Reads, served).asolve(Shop(), {"verify": "off"}, task_index=0)
    assert seen == [{"verify": "off"}]


@pytest.mark.parametrize(
    ("hook", "returned"),
    [
        ("_initialize_environment", None),
        ("_initialize_environment", ("text", None)),
        ("_build_initial_messages", "text"),
        ("_build_initial_messages", [1]),
        ("_prepare_prompt_tokens", None),
        ("_prepare_prompt_tokens", ("text", ["a"])),
        ("_prepare_prompt_tokens", ("text", [1.7])),
        ("_get_token_delta", None),
        ("_parse_tool", None),
        ("_parse_tool", {"parsed_result": {"calls": "text"}}),
        ("_reformulate_tool_call", None),
    ],
)
async def test_a_wrong_value_names_its_hook(hook: str, returned: Any) -> None:
    """Before, an internal error such as "'NoneType' object is not subscriptable"."""
    result, _ = await played(TrainableToolCallingAgent, **{hook: lambda *_: returned})
    assert (result.status, result.reward) == (Status.ABORTED, None)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert hook in result.info["error"]["message"]


async def test_an_agent_closes_only_a_model_that_it_opened() -> None:
    async with serving(load_embedded_tokenizer(), look_then_buy) as (engine, served):
        agent = agent_of(TrainableToolCallingAgent, served)
        await agent.aclose()
        assert agent.served is served
        own = TrainableToolCallingAgent(rollout_args={"engine": engine.url, "model": "embedded"})
        await own.asolve(Shop(), task_index=0, max_num_steps=1)
        assert own.served is not None
        await own.aclose()
        assert own.served is None
