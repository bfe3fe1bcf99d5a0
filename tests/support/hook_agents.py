"""Agents that override the published hooks, and a store with tau-bench's interface where they play.
The bodies are ours; `make test-peers` runs the published files.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from support.episodes import call, judge, serving
from support.parsing import tool

from toolroll.agents.environments.tau_bench.package import import_module
from toolroll.agents.trainable_agents import TrainableToolCallingAgent
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Status
from toolroll.testing import PolicyRequest, Reply, load_embedded_tokenizer

types: Any = import_module("support.tau_mini.types")  # without litellm

TOOLS = [tool("look"), tool("buy")]
WIKI = "Sell."
TASK = Task("3", 3)
NO_TASK = types.Task(user_id="u", actions=[], instruction="", outputs=[])


class Store:
    """tau-bench's interface, with its pydantic types. `buy` ends the episode and earns 1."""

    wiki = WIKI
    tools_info = TOOLS
    blocking = True

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.threads: list[threading.Thread] = []

    def reset(self, task_index: int | None = None) -> Any:
        self.threads.append(threading.current_thread())
        return types.EnvResetResponse(
            observation=f"Task {task_index}.", info=types.EnvInfo(task=NO_TASK)
        )

    def step(self, action: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.actions.append(action)
        done = action.name == "buy"
        return types.EnvResponse(
            observation=f"{action.name}!",
            reward=float(done),
            done=done,
            info=types.EnvInfo(task=NO_TASK, source=action.name),
        )


def look_then_buy(request: PolicyRequest) -> Reply:
    has_looked = "look!" in request.text or "Mine." in request.text
    return Reply(call("buy" if has_looked else "look"))


def agent_of(
    kind: type[TrainableToolCallingAgent], model: Model | None = None, **attributes: Any
) -> TrainableToolCallingAgent:
    """An agent for the store, with these attributes of the instance."""
    settings: Any = {
        "rollout_args": {"verify": "always"},
        "sampling_params": {"max_new_tokens": 200},
    }
    agent = kind(TOOLS, WIKI, "m", "p", **settings)
    for name, value in attributes.items():
        setattr(agent, name, value)
    if model is not None:
        agent.model = model
    return agent


async def play(
    kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent,
    env: Any = None,
    policy: Any = look_then_buy,
    *,
    tokenizer: Any = None,
    task: Task = TASK,
    **attributes: Any,
) -> tuple[InteractionResult, Any, Any]:
    """An episode of at most four turns: result, environment, agent. Its tokens are judged."""
    env = Store() if env is None else env
    async with serving(tokenizer or load_embedded_tokenizer(), policy) as (engine, model):
        agent = agent_of(kind, model, **attributes)
        result = await agent.asolve(
            env, None, {"max_new_tokens": 200}, task.index, 4, task=task, seed=7, session_id="s"
        )
        if result.status is not Status.ABORTED:
            # a payload has no header to name the session
            judge(result, engine, "" if agent._has("_call_llm") else "s")
    return result, env, agent


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


class AsPublished(TrainableToolCallingAgent):
    """Each method is overridden with its published signature, and returns what `super()` does.
    `used`: the names of the methods that were called.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.used: set[str] = set()

    async def asolve(  # type: ignore[override]
        self,
        env: Any,
        rollout_args: Any,
        sampling_params: Any,
        task_index: int | None = None,
        max_num_steps: int = 30,
    ) -> InteractionResult:
        self.used.add("asolve")
        return await super().asolve(
            env, rollout_args, sampling_params, task_index, max_num_steps=max_num_steps
        )

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
        return super()._prepare_prompt_tokens(state, messages)

    def _build_final_result(self, *fields: Any, **named: Any) -> InteractionResult:
        self.used.add("_build_final_result")
        return super()._build_final_result(*fields, **named)

    def _get_token_delta(
        self, tokenizer: Any, messages: Any, *, include_generation_prompt: bool = False
    ) -> tuple[list[int], list[int]]:
        self.used.add("_get_token_delta")
        return super()._get_token_delta(
            tokenizer, messages, include_generation_prompt=include_generation_prompt
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
