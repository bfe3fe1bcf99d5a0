"""verl's own `AgentLoopManager` plays our agent loop on the CPU, with its own workers and its own
client in this process; the embedded engine is in place of its GPU servers.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
import pydoc
import re
import shutil
import subprocess
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from support.desk_episodes import ByTask, known_tasks
from support.verl_mirror import Server, Servers

from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.runs.runner import session_id
from toolroll.testing import (
    EmbeddedEngine,
    PolicyRequest,
    embedded_tokenizer_path,
    load_embedded_tokenizer,
)
from toolroll.trainers.verl.agent_loop import DEFAULTS, HARMLESS, ToolrollAgentLoop
from toolroll.trainers.verl.settings import VerlSettings

pytest.importorskip("verl", reason="the peer `verl` is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl_desk"
PROMPT, RESPONSE = 4096, 4096
MODULE = "toolroll.trainers.verl.agent_loop"
LOOP = f"""
- name: toolroll
  _target_: {MODULE}.ToolrollAgentLoop
  settings: {{env: desk, on_aborted: zero, reruns: 0}}
"""


def ppo_config(overrides: list[str]) -> Any:
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(str(verl.__file__)).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def configuration(folder: Path, *, experts: bool = True) -> Any:
    """verl's own configuration, with what a run with the agent loop sets. `experts`: the model has
    the experts that the embedded engine returns.
    """
    from transformers import Qwen2Config, Qwen2MoeConfig

    shutil.copytree(embedded_tokenizer_path(), folder, dirs_exist_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if experts:
        model: Any = Qwen2MoeConfig(num_hidden_layers=2, num_experts_per_tok=2)
        model.architectures = ["Qwen2MoeForCausalLM"]
    else:
        model = Qwen2Config(architectures=["Qwen2ForCausalLM"])
    model.save_pretrained(folder)
    (folder / "loop.yaml").write_text(LOOP)
    rollout = "actor_rollout_ref.rollout"
    return ppo_config(
        [
            f"actor_rollout_ref.model.path={folder}",
            f"{rollout}.name=sglang",
            f"{rollout}.prompt_length={PROMPT}",
            f"{rollout}.response_length={RESPONSE}",
            f"{rollout}.calculate_log_probs=true",
            f"{rollout}.enable_rollout_routing_replay=true",
            f"{rollout}.agent.default_agent_loop=toolroll",
            f"{rollout}.agent.agent_loop_config_path={folder / 'loop.yaml'}",
        ]
    )


def batch_of(tasks: list[int]) -> Any:
    """verl's batch with these tasks of the desk."""
    import numpy as np
    from verl.protocol import DataProto

    rows: dict[str, list[Any]] = {
        "index": tasks,
        "raw_prompt": [[{"role": "user", "content": str(task)}] for task in tasks],
        "extra_info": [{"index": task, "env": "desk", "split": "test"} for task in tasks],
    }
    arrays: dict[str, Any] = {}
    for name, values in rows.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto(non_tensor_batch=arrays)


class Actor:
    """`made`, called as one of Ray's actors is."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any, **named: Any) -> asyncio.Future[Any]:
            result = getattr(self._made, name)(*given, **named)
            if inspect.isawaitable(result):
                return asyncio.ensure_future(result)
            done = asyncio.get_running_loop().create_future()
            done.set_result(result)
            return done

        return SimpleNamespace(remote=remote)


class ByText(ByTask):
    """Knows the turn by the text alone: verl's client gives each turn an id of its own."""

    def __call__(self, request: PolicyRequest) -> str:
        task = next(name for name, text in self._openings.items() if text in request.text)
        lines = self._lines[session_id("desk", task, 0)]
        turn = request.text.count("<|turn|>assistant") - 1
        return lines[turn] if turn < len(lines) else "Goodbye."


async def test_verls_manager_plays_the_agent_loop(tmp_path: Path) -> None:
    import torch
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopManager,
        AgentLoopWorker,
    )
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    tasks = known_tasks()[:4]
    async with EmbeddedEngine(load_embedded_tokenizer(), ByText(mistakes=0.0)) as engine:
        server, config = Server(engine.url, TokenOutput, experts=True), configuration(tmp_path)
        balancer: Any = Actor(GlobalRequestLoadBalancer({"one": Actor(server)}))
        client = LLMServerClient(config, balancer)
        manager = AgentLoopManager(config, client)
        workers = [Actor(AgentLoopWorker(config, client)) for _ in range(2)]
        vars(manager)["agent_loop_workers"] = workers
        made = await manager.generate_sequences(batch_of(tasks))
    assert issubclass(importlib.import_module(MODULE).ToolrollAgentLoop, AgentLoopBase)
    batch = made.batch
    assert batch["responses"].shape == (4, RESPONSE) and batch["prompts"].shape == (4, PROMPT)
    assert batch["rm_scores"].sum(dim=1).tolist() == [1.0] * 4
    assert list(made.non_tensor_batch["min_global_steps"]) == [3] * 4
    assert list(made.non_tensor_batch["toolroll_left_out_tokens"]) == [0] * 4
    served = {(*entry.input_ids.tolist(), *entry.output_ids): entry for entry in engine.log}
    for at in range(4):
        shown = batch["attention_mask"][at].bool()
        ids = batch["input_ids"][at][shown].tolist()
        assert tuple(ids) in served  # the last turn's prompt and reply: all that verl trains on
        mask = batch["response_mask"][at][shown[PROMPT:]].tolist()
        logprobs = batch["rollout_log_probs"][at][shown[PROMPT:]].tolist()
        turns = [one for whole, one in served.items() if whole == tuple(ids[: len(whole)])]
        assert sum(mask) == sum(len(one.output_ids) for one in turns) and len(turns) > 2
        assert [value for value, one in zip(logprobs, mask, strict=True) if one] == pytest.approx(
            [value for one in turns for value in one.logprobs]
        )
        # verl stores a row at its token's position; the last token has none
        rows_of = batch["routed_experts"][at][shown]
        assert rows_of.dtype == torch.int16 and not rows_of[-1].any()
        assert rows_of[:-1, 0, 0].tolist() == [index % 8 for index in ids[:-1]]
        assert rows_of[:-1, 1, 1].tolist() == [index % 5 for index in ids[:-1]]


@pytest.mark.parametrize("experts", [True, False])
async def test_a_failed_episode_fits_into_the_batch(tmp_path: Path, experts: bool) -> None:
    """verl makes one tensor of the routed experts of all episodes."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.workers.rollout.replica import TokenOutput

    class FailingServers(Servers):
        async def generate(self, request_id: Any, **request: Any) -> Any:
            raise CompletionError("the server gives no answer")

    servers: Any = FailingServers("", TokenOutput)
    worker = AgentLoopWorker(configuration(tmp_path, experts=experts), servers)
    playing = worker.generate_sequences(batch_of(known_tasks()[:1]))
    if not experts:
        with pytest.raises(UsageError, match="num_experts_per_tok"):
            await playing
        return
    made = await playing
    assert made.batch["routed_experts"].shape == (1, PROMPT + RESPONSE, 2, 2)


def test_the_example_is_what_verl_takes() -> None:
    from omegaconf import OmegaConf

    environment = {**os.environ, "ARGUMENTS_ONLY": "1"}
    script = ["bash", str(EXAMPLE / "run.sh")]
    printed = subprocess.check_output(script, env=environment, text=True)
    config = ppo_config(printed.splitlines())  # refuses unknown keys
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length) == (4096, 4096)
    entries: Any = OmegaConf.to_container(OmegaConf.load(rollout.agent.agent_loop_config_path))
    (entry,) = entries
    assert entry["name"] == rollout.agent.default_agent_loop
    assert pydoc.locate(entry["_target_"]) is ToolrollAgentLoop
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    assert f"_target_: {entry['_target_']}\n" in page
    keys = re.findall(r"^[a-z_.]+=\w+(?=$|  #)|(?<=`)\+data.*?=false(?=`)", page, re.MULTILINE)
    assert len(keys) == 4 and ppo_config(keys).algorithm.adv_estimator == "grpo"
    assert VerlSettings.read(entry["settings"], where="settings").env == "desk"
    rows = run_path(str(EXAMPLE / "make_data.py"))["rows"]()
    assert [row["extra_info"]["index"] for row in rows] == list(range(33))


def test_every_key_of_multi_turn_has_no_effect_or_is_refused() -> None:
    config = importlib.import_module("verl.workers.config.rollout").MultiTurnConfig()
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    assert {name: value for name, value in fields.items() if name not in HARMLESS} == {
        name: DEFAULTS.get(name) for name in fields if name not in HARMLESS
    }
    assert DEFAULTS.keys() <= fields.keys()
