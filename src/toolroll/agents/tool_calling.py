"""`TrainableToolCallingAgent` and `agent_factory`. Their names and signatures are the same as in
the module `trainable_agents` of slime's tau-bench example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.agents.loop.call_policy import ONE_CALL_A_TURN, CallPolicy, policy_of, pop_settings
from toolroll.agents.trainable import TrainableAgentMixin
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Tool

DEFAULT_ROLLOUT_ARGS: Mapping[str, Any] = {
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 30000,
    "use_http2": False,
}
DEFAULT_SAMPLING_PARAMS: Mapping[str, Any] = {
    "temperature": 0.0,
    "max_new_tokens": 512,
    "top_p": 0.9,
    "top_k": 50,
}


class TrainableToolCallingAgent(TrainableAgentMixin):
    """A tool-calling agent. `tools_info` and `wiki` (the system message) are used if the
    environment has none of its own.

    `model`: a `Model` that several agents share. A name, as slime passes it, has no
    effect, and `provider` has none. `rollout_args` contains the engine's address. `temperature` is
    used in the default sampling parameters.

        args = {"engine": "http://127.0.0.1:30000", "model": "Qwen/Qwen3-8B"}
        agent = TrainableToolCallingAgent(rollout_args=args)
        desk = load_environment("desk")
        env, task = desk.make(EnvironmentOptions()), desk.tasks("test")[0]
        result = await agent.asolve(env, task=task)
        print(result.reward, result.trajectories[0].trained_tokens)
        await agent.aclose()
    """

    def __init__(
        self,
        tools_info: Sequence[Tool] = (),
        wiki: str = "",
        model: Model | str = "",
        provider: str = "",
        temperature: float = 0.0,
        rollout_args: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        policy: CallPolicy = ONE_CALL_A_TURN,
    ) -> None:
        self.tools_info = list(tools_info)
        self.wiki = wiki
        self.model = model
        self.provider = provider
        self.temperature = temperature
        self.rollout_args = DEFAULT_ROLLOUT_ARGS if rollout_args is None else rollout_args
        self.sampling_params = (
            {**DEFAULT_SAMPLING_PARAMS, "temperature": temperature}
            if sampling_params is None
            else dict(sampling_params)
        )
        self.policy = policy


def agent_factory(
    tools_info: Sequence[Tool],
    wiki: str,
    config: Any,
    rollout_args: Any = None,
    sampling_params: Mapping[str, Any] | None = None,
) -> TrainableToolCallingAgent:
    """Return an agent for `config`: tau-bench's `RunConfig`, or any object with `agent_strategy`,
    `model`, `model_provider` and `temperature`.

    Raises `NotImplementedError` for a strategy other than "tool-calling", because no other strategy
    can be trained.
    """
    settings = (
        config
        if isinstance(config, Mapping)
        else {name: getattr(config, name, None) for name in _SETTINGS}
    )
    strategy = settings.get("agent_strategy") or "tool-calling"
    if strategy != "tool-calling":
        raise NotImplementedError(
            f"agent_strategy {strategy!r}: only 'tool-calling' can be trained"
        )
    temperature = settings.get("temperature")
    if temperature is not None and temperature < 0:
        raise UsageError(f"temperature must not be negative: {temperature}")
    return TrainableToolCallingAgent(
        tools_info,
        wiki,
        settings.get("model") or "",
        settings.get("model_provider") or "",
        temperature or 0.0,
        rollout_args,
        sampling_params,
    )


_SETTINGS = ("agent_strategy", "model", "model_provider", "temperature")


def make_agent(model: Model, settings: Mapping[str, Any]) -> TrainableToolCallingAgent:
    """Return the agent that `toolroll run` plays.

    `settings`: the fields of `CallPolicy`, `on_length`, `step_timeout`, `verify` and
    `max_observation_bytes`.
    """
    policy = dict(settings)
    args = pop_settings(policy, "verify", "max_observation_bytes")
    attributes = pop_settings(policy, "on_length", "step_timeout")
    agent = TrainableToolCallingAgent(rollout_args=args, policy=policy_of(policy), model=model)
    vars(agent).update(attributes)
    return agent
