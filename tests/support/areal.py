"""AReaL itself: its inference client with the embedded engine behind it, and its actor."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
from support.bare import bare

INSTALL = (
    "pip install --no-deps areal==1.0.4 aiofiles blinker colorlog flask itsdangerous lark llvmlite "
    "numba werkzeug, and torch for the CPU"
)


def real(module: str) -> Any:
    pytest.importorskip("torch", reason=INSTALL)
    return pytest.importorskip(module, reason=INSTALL)


def gconfig(**given: Any) -> Any:
    return real("areal.api.cli_args").GenerationHyperparameters(**given)


# --- inference ------------------------------------------------------------------------------------


@cache
def _client() -> Any:
    base = real("areal.infra.remote_inf_engine").RemoteInfEngine

    class Client(base):  # type: ignore[misc, valid-type]
        """Keeps its requests in `seen`. Each turn's last token has the next weight version, as if
        the weights had changed during the turn.
        """

        async def agenerate(self, req: Any) -> Any:
            self.seen.append(req)
            answer = await super().agenerate(req)
            answer.output_versions[-1:] = [one + 1 for one in answer.output_versions[-1:]]
            return answer

    return Client


@asynccontextmanager
async def inference(url: str, *, concurrency: int = 64) -> AsyncIterator[Any]:
    """AReaL's client of an SGLang server, at weight version 3. Its `rollout_batch` plays up to
    `concurrency` groups at a time.
    """
    config = real("areal.api.cli_args").InferenceEngineConfig(
        backend="sglang:d1", consumer_batch_size=64, max_concurrent_rollouts=concurrency,
        check_trajectory_format=True,
    )  # fmt: skip
    client = _client()(config, real("areal.engine.sglang_remote").SGLangBackend())
    client.seen = []
    client.set_version(3)
    await asyncio.to_thread(client.initialize, addr=url.removeprefix("http://"))
    try:
        yield client
    finally:
        await (await real("areal").workflow_context.get_aiohttp_session()).close()
        await asyncio.to_thread(client.destroy)


# --- training -------------------------------------------------------------------------------------


def actor(engine: Any = None, **given: Any) -> Any:
    """AReaL's `PPOActor`, without a KL reward. The package's `__init__` is left out, since it needs
    the clients of four logging services.
    """
    config = real("areal.api.cli_args").PPOActorConfig(
        backend="fsdp:d1", kl_ctl=0.0, ppo_n_minibatches=1, **given
    )
    bare("areal.trainer")
    return real("areal.trainer.ppo.actor").PPOActor(config, engine)


class OneStep:
    """The train engine of an actor's update: `logps_of` gives the logprob of each token of padded
    rows but the first, [rows, n - 1]. The gradient is left in the policy.
    """

    def __init__(self, logps_of: Any) -> None:
        self._logps_of = logps_of

    def train(self) -> None:
        pass

    def get_version(self) -> int:
        return 4

    def train_batch(self, batch: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        import torch

        assert loss_weight_fn(batch) > 0
        logps = self._logps_of(batch["input_ids"].long(), batch["attention_mask"].long()).float()
        logps = torch.nn.functional.pad(logps, (0, 1))
        loss_fn(logps, torch.zeros_like(logps), batch).backward()
        return {}


def update(logps_of: Any, rows: Sequence[dict[str, Any]], **given: Any) -> None:
    """One step of AReaL's actor on what the workflow returned: its advantages, and its loss."""
    own = actor(OneStep(logps_of), **given)
    own.ppo_update(own.compute_advantages(list(rows)))
