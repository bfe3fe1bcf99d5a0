"""SkyRL's own configuration, client, input and trainer: an episode through
`RayPPOTrainer.generate`, which ends with SkyRL's check of what a generator returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from support import framework_engines as mirror
from support.bare import borrowed
from support.http import http_server
from support.slime_trainer import plays_the_reference

from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.skyrl import ToolrollGenerator
from toolroll.trainers.skyrl.generator import _HARMLESS, _HONORED

pytest.importorskip("torch", reason="SkyRL imports torch: install it for the CPU")
FOUND = find_spec("skyrl")
if FOUND is None or FOUND.origin is None:
    pytest.skip("pip install --no-deps skyrl", allow_module_level=True)
GYM = str(Path(FOUND.origin).parents[1] / "skyrl-gym")  # in SkyRL's wheel

REFUSED = {"batched", "chat_template", "use_conversation_multi_turn", "vision_language_generator"}
BARE = "skyrl skyrl.backends skyrl.train.generators skyrl.backends.skyrl_train.inference_servers"
"""The packages whose `__init__` imports engines, or needs Python 3.12."""


@pytest.fixture(scope="module")
def skyrl() -> Iterator[SimpleNamespace]:
    """SkyRL's modules."""
    with pytest.MonkeyPatch.context() as patch, borrowed(BARE):
        patch.syspath_prepend(GYM)
        from skyrl.backends.skyrl_train.inference_servers import (
            engine_utils,
            remote_inference_client,
        )
        from skyrl.train import config, trainer
        from skyrl.train.generators import base, utils

        yield SimpleNamespace(
            config=config, trainer=trainer, base=base, input=utils.prepare_generator_input,
            client=remote_inference_client.RemoteInferenceClient,
            sampling=engine_utils.get_sampling_params_for_backend,
        )  # fmt: skip


def test_each_setting_is_honored_harmless_or_refused(skyrl: SimpleNamespace) -> None:
    names = {field.name for field in dataclasses.fields(skyrl.config.GeneratorConfig)}
    assert names == _HONORED | _HARMLESS | REFUSED


def test_the_generator_and_its_output_are_theirs(skyrl: SimpleNamespace) -> None:
    settings = EpisodeSettings(env="desk")
    client = mirror.SkyrlClient("")
    own = ToolrollGenerator(mirror.GeneratorConfig(), load_embedded_tokenizer(), client, settings)
    assert isinstance(own, skyrl.base.GeneratorInterface)
    assert not issubclass(dict, skyrl.base.GeneratorInterface)
    fields = set(skyrl.base.GeneratorOutput.__annotations__)
    optional = {"trajectory_time_splits", "rollout_sample_support"}  # of SkyRL 0.4
    assert fields - set(own._output([], {}, with_logprobs=True)) in (set(), optional)


@pytest.mark.parametrize("step_wise", [False, True])
async def test_an_episode_passes_the_trainer_s_own_check(
    skyrl: SimpleNamespace, *, step_wise: bool
) -> None:
    tokenizer: Any = load_embedded_tokenizer()
    config = skyrl.config.GeneratorConfig(max_turns=12, step_wise_trajectories=step_wise)
    seen: list[dict[str, Any]] = []
    async with EmbeddedEngine(tokenizer, plays_the_reference) as engine:

        async def generate(request: web.Request) -> web.Response:
            """vLLM's route, with the embedded engine behind it."""
            asked = await request.json()
            seen.append(asked)
            answer = await mirror.SkyrlClient(engine.url).generate({
                "prompt_token_ids": [asked["token_ids"]],
                "sampling_params": asked["sampling_params"],
                "session_ids": [request.headers["X-Session-ID"]],
            })  # fmt: skip
            content = [{"logprob": value} for value in answer["response_logprobs"][0]]
            choice = {
                "token_ids": answer["response_ids"][0], "logprobs": {"content": content},
                "finish_reason": answer["stop_reasons"][0],
            }  # fmt: skip
            return web.json_response({"choices": [choice]})

        async with http_server({"/inference/v1/generate": generate}) as url:
            client = skyrl.client(url, [url], 1, tokenizer=tokenizer)
            own = ToolrollGenerator(
                config, tokenizer, client,
                EpisodeSettings(env="desk", parser="hermes", verify="always"),
            )  # fmt: skip
            row: dict[str, Any] = {"prompt": [], "env_class": None, "uid": "a"}
            row["env_extras"] = {"index": 0}
            sampling = skyrl.sampling("vllm", config.sampling_params)
            batch, _ = skyrl.input([row], 2, sampling, "desk", "train", 0)
            trainer = SimpleNamespace(
                generator=own, all_metrics={}, cfg=SimpleNamespace(generator=config)
            )
            output = await skyrl.trainer.RayPPOTrainer.generate(trainer, batch)
            await own.aclose()
            await client.teardown()
    assert [sum(rewards) for rewards in output["rewards"]] == [1.0, 1.0]
    assert trainer.all_metrics["toolroll/aborted"] == 0.0
    assert {one["cache_salt"] for one in seen} == {"toolroll-0"} and len(seen) > 2
