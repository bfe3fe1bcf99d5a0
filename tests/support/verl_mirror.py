"""verl's `LLMServerClient` and `TokenOutput` (verl 0.9.1) with the embedded engine behind them."""

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import pytest
from support.experts import sent_experts
from support.standins import recorded_class, stand_in, stands_for
from support.wire import generate, sglang_names

TokenOutput = recorded_class("verl.workers.rollout.replica:TokenOutput")
_LOOP = "verl.experimental.agent_loop.agent_loop"
AgentLoopMetrics = recorded_class(f"{_LOOP}:AgentLoopMetrics")
AgentLoopOutput = recorded_class(f"{_LOOP}:AgentLoopOutput")


@stands_for("verl.workers.rollout.llm_server:LLMServerClient", own="__init__ seen")
class Servers:
    """`output`: the class that is returned. `vllm`: names and stop reasons as of verl's vLLM
    server. `without_logprobs`: as a server that gives none. `experts`: with
    `enable_rollout_routing_replay`. No dataclass: hydra would make a configuration of it.
    """

    def __init__(
        self,
        url: str,
        output: Any = TokenOutput,
        *,
        vllm: bool = False,
        without_logprobs: bool = False,
        experts: bool = False,
    ) -> None:
        self.seen: list[dict[str, Any]] = []
        self._url, self._output = url, output
        self._vllm, self._without_logprobs = vllm, without_logprobs
        self._experts = experts

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.seen.append(dict(sampling_params))
        params = dict(sampling_params)
        assert params.pop("logprobs") is True
        sampled = await generate(
            self._url,
            prompt_ids,
            sglang_names(params) if self._vllm else params,
            request_id,
            return_routed_experts=self._experts,
        )
        reason = sampled.reason
        if self._vllm:
            reason = "aborted" if reason == "abort" else "completed"
        return self._output(
            token_ids=sampled.output_ids,
            log_probs=None if self._without_logprobs else sampled.logprobs,
            routed_experts=sent_experts(sampled.body) if self._experts else None,
            stop_reason=reason,
            extra_fields={"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3},
        )


@stands_for(
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer", own="__init__ seen"
)
class Server(Servers):
    """One server behind verl's own client."""

    async def generate(  # type: ignore[override]
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: None = None,
        video_data: None = None,
    ) -> Any:
        return await super().generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )


@stands_for(f"{_LOOP}:AgentLoopBase")
class AgentLoopBase(ABC):
    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any: ...


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mirror importable as verl's agent loop, whether or not verl is installed."""
    own = {kind.__name__: kind for kind in (AgentLoopBase, AgentLoopMetrics, AgentLoopOutput)}
    stand_in(
        monkeypatch,
        {"verl": {}, "verl.experimental": {}, "verl.experimental.agent_loop": {}, _LOOP: own},
    )


def loop_arguments(servers: Servers, tokenizer: Any, **rollout: Any) -> dict[str, Any]:
    """What verl's worker makes an agent loop with, as far as ours reads it."""
    settings = {"name": "sglang", "prompt_length": 4096, "response_length": 4096}
    return {
        "trainer_config": SimpleNamespace(
            config=SimpleNamespace(
                algorithm=SimpleNamespace(adv_estimator="grpo"),
                actor_rollout_ref=SimpleNamespace(
                    rollout=Keys({**settings, **rollout}),
                    actor=SimpleNamespace(loss_agg_mode="token-mean"),
                    model=SimpleNamespace(),
                ),
            )
        ),
        "server_manager": servers,
        "tokenizer": tokenizer,
        "data_config": SimpleNamespace(config=Keys()),
        "processor": None,
    }


class Keys(dict[str, Any]):
    """A mapping whose keys are attributes too, as a configuration's are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]
