"""Overridden hooks by form: plain and async, with `super()`, and what they must not return."""

import gc
import json
import threading
import urllib.request
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from support.hook_agents import TOOLS, WIKI, PublishedAgent, Store, look_then_buy, play
from support.listed_environment import ListedWorld
from support.patience import PATIENCE

from toolroll import CallStatus, Model, Status, StepResult, StopReason, UsageError
from toolroll.agents.loop.published_hooks import wrap_parse_tool
from toolroll.agents.trainable_agents import TrainableToolCallingAgent
from toolroll.parsers.openai import create_openai_adapter
from toolroll.testing import PolicyRequest, Reply

Agent = TrainableToolCallingAgent


def more(step: Any) -> Any:
    step.reward += 0.5
    return step


plain = lambda env, action: more(env.step(action))


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
    return more(call)


def awaited_by_a_plain_hook(env: Any, action: Any) -> Any:
    call = env.step(action)

    async def result() -> Any:
        return await call

    return result()


def executed_twice(env: Any, action: Any) -> Any:
    env.step(action)
    return env.step(action)


async def read_without_await(env: Any, action: Any) -> Any:
    step = more(env.step(action))
    if action.name == "look":
        assert action.kwargs == {}
        step.observation = step.observation + " " + env.wiki
    return step


async def sets_attributes(env: Any, action: Any) -> Any:
    """The runner has a `seed` of its own, and `env` of an environment need not be one."""
    if action.name == "look":
        env.seed, env.mark = "mine", 1
        assert (env.seed, env.mark) == ("mine", 1)
    return await env.step(action)


def longer(step: Any) -> Any:
    step.observation += " Yes."
    step.info = {**step.info.model_dump(), "seen": step.done}
    return more(step)


class StepOfSuper(Agent):
    async def _execute_tool(self, env: Any, action: Any) -> Any:
        return longer(await super()._execute_tool(env, action))


class PlainStepOfSuper(Agent):
    def _execute_tool(self, env: Any, action: Any) -> Any:
        return longer(super()._execute_tool(env, action))


class IndexedReset(Agent):
    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        first = super()._initialize_environment(env, task_index)
        await first
        return first[0], first[1]


class ChangedReset(Agent):
    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        obs, info = await super()._initialize_environment(env, task_index)
        return f"{obs}!", info


class UnawaitedReset(Agent):
    async def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        obs, info = super()._initialize_environment(env, task_index)
        return obs, info


class ReadsInfo(Agent):
    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        first = env.reset()
        with pytest.raises(AttributeError, match="info has no 'nothing'"):
            _ = first.info.nothing
        with pytest.raises(AttributeError, match="has 'nothing'"):
            _ = env.nothing
        return first.observation + "!", first.info


class BlockingRequest(Agent):
    """On the event loop, this request would wait for the engine of this process forever."""

    def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            url, json.dumps(payload).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)


class ReturnsAwaitable(Agent):
    def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        assert isinstance(self.model, Model)
        return self.model.post(url, payload)


PLAYED = {
    "error": None,
    "rewards": (0.0, 1.0),
    "actions": ["look", "buy"],
    "first": [WIKI, "Task 3."],
    "results": ["look!", "buy!"],
    "info": {"source": "buy"},
    "warnings": 0,
    "on_the_event_loop": False,
    "attributes": {},
}
"""An episode on the store without overrides."""
MORE = {"rewards": (0.5, 1.5)}
OF_SUPER = MORE | {"results": ["look! Yes.", "buy! Yes."], "info": {"source": "buy", "seen": True}}


@pytest.mark.parametrize(
    ("hook", "form", "changes"),
    [
        ("_execute_tool", plain, MORE),
        ("_execute_tool", another_object,
         MORE | {"results": ["Mine.", "Mine."], "info": {"source": None}}),
        ("_execute_tool", awaited_and_returned, {}),
        ("_execute_tool", awaited_and_read, MORE),
        ("_execute_tool", awaited_by_a_plain_hook, {}),
        ("_execute_tool", executed_twice,  # the third call is after the end
         {"rewards": (0.0,), "actions": ["look", "look", "buy"], "results": ["look!"],
          "error": "EnvironmentFailure", "info": {"source": "look"}}),
        ("_execute_tool", read_without_await,
         MORE | {"results": ["look! Sell.", "buy!"], "warnings": 2, "on_the_event_loop": True}),
        ("_execute_tool", sets_attributes, {"attributes": {"seed": "mine", "mark": 1}}),
        ("_execute_tool", StepOfSuper, OF_SUPER),
        ("_execute_tool", PlainStepOfSuper, OF_SUPER),
        ("_initialize_environment", IndexedReset, {}),
        ("_initialize_environment", ChangedReset, {"first": [WIKI, "Task 3.!"]}),
        ("_initialize_environment", UnawaitedReset, {"warnings": 1, "on_the_event_loop": True}),
        ("_initialize_environment", ReadsInfo, {"first": [WIKI, "Task 3.!"]}),
        ("_call_llm", BlockingRequest, {}),
        ("_call_llm", ReturnsAwaitable, {}),
    ],
)  # fmt: skip
async def test_a_form_that_works(hook: str, form: Any, changes: dict[str, Any]) -> None:
    """A warning names the line of the hook that forgets an `await`."""
    kind, hooks = (form, {}) if isinstance(form, type) else (Agent, {hook: form})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, store, _ = await play(kind, **hooks)
    runtime = [caution for caution in caught if caution.category is RuntimeWarning]
    assert {caution.filename for caution in runtime} <= {__file__}
    assert all("write `await env.step(action)`" in str(caution.message) for caution in runtime)
    contents = [message["content"] for message in result.messages]
    assert PLAYED | changes == {
        "error": result.info.get("error", {}).get("type"),
        "rewards": result.step_rewards,
        "actions": [action.name for action in store.actions],
        "first": contents[:2],
        "results": [m["content"] for m in result.messages if m["role"] == "tool"],
        "info": {name: result.info[name] for name in ("source", "seen") if name in result.info},
        "warnings": len(runtime),
        "on_the_event_loop": threading.main_thread() in store.threads,
        "attributes": {name: vars(store)[name] for name in ("seed", "mark") if name in vars(store)},
    }


async def test_a_step_without_a_reward_counts_from_zero() -> None:
    """A step of `ListedWorld` has no reward before the last."""
    policy = lambda request: Reply(LOOK if request.call == 0 else "Goodbye.")
    result, _, _ = await play(StepOfSuper, ListedWorld(tool_texts=("It is here.",)), policy)
    assert (result.info.get("error"), result.step_rewards) == (None, (0.5, 1.5))
    assert result.info["seen"] is True
    assert "It is here. Yes." in [message["content"] for message in result.messages]


LOOK = '<tool_call>{"name": "look", "arguments": {"at": "here"}}</tool_call>'


def returned(value: Any) -> Any:
    return lambda *_: value


def own_error(*_: Any) -> Any:
    raise KeyError("mine")


def object_with(**fields: Any) -> Any:
    step = {"observation": "Mine.", "reward": 0.0, "done": False, "info": None}
    return returned(SimpleNamespace(**(step | fields)))


def with_reward_nan(result: Any, *_: Any) -> Any:
    result.reward = float("nan")
    return result


async def coroutine(*_: Any) -> Any:
    return None


async def step_that_is_never_executed(env: Any, action: Any) -> Any:
    env.step(action)
    return StepResult(done=True, reward=1.0)


async def coroutine_in_a_message(env: Any, action: Any) -> Any:
    await env.step(action)
    return StepResult([{"role": "user", "content": coroutine()}])


async def step_as_a_field(env: Any, action: Any) -> Any:
    return SimpleNamespace(observation="", reward=env.step(action), done=True, info={})


async def coroutine_of_a_coroutine(*_: Any) -> Any:
    async def inner() -> Any:
        return coroutine()

    return inner()


async def first_text(env: Any, task_index: int | None) -> Any:
    await env.reset(task_index)
    return coroutine(), {}


class ReturnsPost(Agent):
    async def _call_llm(self, url: str, payload: dict[str, Any]) -> Any:
        assert isinstance(self.model, Model)
        return self.model.post(url, payload)


TOKEN_HOOKS = ("_prepare_prompt_tokens", "_get_token_delta", "_parse_tool")
TEXT_HOOKS = ("_build_initial_messages", "_reformulate_tool_call", "_build_final_result")
UNREAD = "neither awaited env.step(...) nor"
AN_OBJECT, A_COROUTINE = "returned an object", "returned a coroutine"


@pytest.mark.parametrize(
    ("hook", "form", "words"),
    [
        ("_build_final_result", own_error, "mine"),
        ("_build_final_result", returned(None), "_build_final_result returned NoneType"),
        ("_build_final_result", with_reward_nan, "_build_final_result gave the reward"),
        ("_execute_tool", returned({}), "returned dict: return the result of env.step"),
        ("_execute_tool", object_with(done="no"), "done must be True or False"),
        ("_execute_tool", object_with(reward="1.0"), "gave the reward '1"),
        ("_execute_tool", step_that_is_never_executed, UNREAD),
        ("_execute_tool", coroutine_in_a_message, AN_OBJECT),
        ("_execute_tool", step_as_a_field, AN_OBJECT),
        ("_execute_tool", coroutine_of_a_coroutine, A_COROUTINE),
        ("_initialize_environment", returned(None), "cannot be read"),
        ("_initialize_environment", first_text, AN_OBJECT),
        ("_build_initial_messages", returned([1]), "messages[0]"),
        ("_prepare_prompt_tokens", returned(("text", [1.7])), "returned"),
        ("_prepare_prompt_tokens", lambda *_: ("", coroutine()), AN_OBJECT),
        ("_call_llm", ReturnsPost, A_COROUTINE),
        ("_parse_tool", returned({"parsed_result": {"calls": "x"}}), "returned"),
        ("_reformulate_tool_call", returned(None), "returned NoneType"),
        *((hook, returned(None), "returned") for hook in TOKEN_HOOKS),
        *((hook, coroutine, A_COROUTINE) for hook in (*TOKEN_HOOKS, *TEXT_HOOKS)),
    ],
)
async def test_a_failing_form_aborts_and_names_the_hook(hook: str, form: Any, words: str) -> None:
    """A coroutine that is dropped is an error."""
    kind, hooks = (form, {}) if isinstance(form, type) else (Agent, {hook: form})
    gc.collect()  # what other tests left, such as loops
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, _, _ = await play(kind, **hooks)
        gc.collect()
    error = result.info["error"]
    is_own = words == "mine"  # the hook's own error
    reason = StopReason.INTERNAL_ERROR if is_own else StopReason.ENVIRONMENT_ERROR
    assert (result.status, result.stop_reason, result.reward) == (Status.ABORTED, reason, None)
    assert is_own or error["type"] == "EnvironmentFailure"
    assert words in error["message"] and (is_own or hook in error["message"])
    turns = [turn for trajectory in result.trajectories for turn in trajectory.turns]
    assert {turn.reward for turn in turns} <= {0.0}


async def test_a_plain_step_that_returns_a_coroutine_must_be_awaited() -> None:
    class Later(ListedWorld):
        blocking = False

        async def later(self) -> StepResult:
            return StepResult(done=True, reward=1.0)

        def step(self, action: Any) -> Any:
            return self.later()

    with pytest.raises(UsageError, match=r"Later.step is async.*`await env.step`"):
        await play(Agent, Later(), lambda request: Reply(LOOK), _execute_tool=read_without_await)
    gc.collect()


@pytest.mark.parametrize("form", [plain, read_without_await])
@pytest.mark.filterwarnings("ignore:an async hook reads")
async def test_an_environment_that_fails_in_a_hook(form: Any) -> None:
    class Broken(Store):
        def step(self, action: Any) -> Any:
            raise ValueError("out of order")

    result, _, _ = await play(Agent, Broken(), _execute_tool=form)
    assert result.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "out of order" in result.info["error"]["message"]


LLAMA = create_openai_adapter(TOOLS, parser_type="llama3")
"""It cannot read the model's calls."""


def published(**attributes: Any) -> Any:
    """The published agent with these attributes of the class."""
    return type("Own", (PublishedAgent,), attributes)


def llama_calls(request: PolicyRequest) -> Reply:
    name = "buy" if "look!" in request.text else "look"
    return Reply('<|python_tag|>{"name": "' + name + '", "parameters": {}}')


@pytest.mark.parametrize(
    ("kind", "policy", "adapter"),
    [
        (PublishedAgent, look_then_buy, {"openai_adapter": None}),
        (published(openai_adapter=LLAMA), look_then_buy, {"openai_adapter": None}),
        (published(openai_adapter=None, _parse_tool=Agent._parse_tool), look_then_buy, {}),
        (Agent, llama_calls, {"openai_adapter": LLAMA}),
    ],
)  # fmt: skip
async def test_the_adapter_parses(kind: type[Agent], policy: Any, adapter: dict[str, Any]) -> None:
    """An adapter of None is the model's."""
    result, store, _ = await play(kind, None, policy, **adapter)
    assert (result.info.get("error"), result.reward) == (None, 1.0)
    assert [action.name for action in store.actions] == ["look", "buy"]


PARSED = {"name": "look", "parameters": '{"at": "here"}'}


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ({"name": "look", "parameters": {"at": "here"}}, CallStatus.OK),
        ({"name": "look", "parameters": '{"at'}, CallStatus.INVALID_JSON),
        ({"name": "look"}, CallStatus.BAD_ARGUMENTS),
        ({"name": "", "parameters": "{}"}, CallStatus.MISSING_NAME),
    ],
)
@pytest.mark.parametrize("text", ["Hm.", None])
def test_a_call_of_an_override(call: dict[str, Any], status: CallStatus, text: str | None) -> None:
    result = {"normal_text": text, "calls": [PARSED, call]}
    reply = wrap_parse_tool(lambda reply: {"parsed_result": result})("raw")
    good, other = reply.tool_calls
    assert (reply.content, good.name, good.arguments) == (text or "", "look", {"at": "here"})
    assert (other.status, bool(other.error)) == (status, status is not CallStatus.OK)
    assert good.ok and other.ok is (other.arguments == good.arguments)


def test_a_reply_that_an_override_could_not_parse() -> None:
    parse = wrap_parse_tool(lambda reply: {"success": False, "error": "no end tag"})
    (call,) = parse("<tool_call>").tool_calls
    expected = (CallStatus.INVALID_JSON, "no end tag", "<tool_call>")
    assert (call.status, call.error, call.raw) == expected
