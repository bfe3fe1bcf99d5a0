"""Run the files of slime's tau-bench example, unchanged, on toolroll. This needs slime's checkout,
tau-bench and SGLang.

As a script (see `run`), it prints JSON: one episode of the published `generate` function, and one
of each agent in `AGENTS`. It is a process of its own, because the imports need stubs that other
tests must not see, and because `input` is replaced for tau-bench's user without a model.
"""

import asyncio
import builtins
import json
import os
import sys
import tempfile
from argparse import Namespace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from support.processes import python

STUBS = Path(__file__).parent / "stubs"
TASK = 3
HOOKS = (
    *("_reformulate_tool_call", "_call_llm", "_parse_tool", "_execute_tool"),
    *("_initialize_environment", "_build_initial_messages"),
    *("_prepare_prompt_tokens", "_build_final_result"),
)
"""The hooks whose published bodies give the same tokens as toolroll's."""
AGENTS = ("super", "super, sync and async exchanged", "published hooks", "published asolve")


def example_folder() -> Path | None:
    """The folder of the example in slime's checkout, or None if slime is not installed from one."""
    spec = find_spec("slime")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [Path(place).parent / "examples" / "tau-bench" for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


def run(folder: Path) -> dict[str, Any]:
    """The results of the script, by the name of the episode."""
    tests = Path(__file__).parents[1]
    path = [STUBS, folder, tests.parent / "src", tests, os.environ.get("PYTHONPATH", "")]
    more = {"SGLANG_USE_CPU_ENGINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env = os.environ | more | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = python("-m", "support.published_example", cwd=tests, timeout=500, env=env)
    if done.returncode:
        raise RuntimeError(f"the example could not be run: {done.stderr[-4000:]}")
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**results, "unclosed": done.stderr.count("Unclosed client session")}


def _load(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _agents(published: Any) -> dict[str, type[Any]]:
    """Agents on toolroll's base class, by name (see `AGENTS`)."""
    from support.hook_agents import AsPublished, OtherColor

    from toolroll.agents.trainable_agents import TrainableToolCallingAgent

    bodies = vars(published.TrainableAgentMixin)
    hooks = {name: bodies[name] for name in HOOKS}
    published_hooks = type("PublishedHooks", (TrainableToolCallingAgent,), hooks)
    published_asolve = type("PublishedAsolve", (AsPublished,), {"asolve": bodies["asolve"]})
    kinds = (AsPublished, OtherColor, published_hooks, published_asolve)
    return dict(zip(AGENTS, kinds, strict=True))


def _user(said: object = "") -> str:
    """What tau-bench's user without a model types."""
    return "###STOP###" if str(said).strip() == "Anything else?" else "I want to return my order."


async def _main() -> dict[str, Any]:
    import generate_with_tau
    import openai_tool_adapter
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample
    from support.episodes import call
    from tau_bench.envs import get_env

    from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

    email = "omar.anderson3456@example.com"
    look_up = call("find_user_id_by_email", email=email)
    policy = lambda request: "Anything else?" if email in request.text else look_up
    config = generate_with_tau.tau_config
    config.user_strategy = "human"
    folder = Path(str(openai_tool_adapter.__file__)).parent
    published = _load("published_agents", folder / "trainable_agents.py")
    builtins.input = _user
    tokenizer = load_embedded_tokenizer()
    results: dict[str, Any] = {}
    async with EmbeddedEngine(tokenizer, policy) as engine:
        address = engine.url.rpartition("/")[2].split(":")
        args = _arguments(tokenizer, *address)
        init_http_client(args)  # as slime's trainer does
        sampling = {"temperature": 1.0, "max_new_tokens": 200}
        sample = await generate_with_tau.generate(args, Sample(prompt=str(TASK)), sampling)
        results["generate"] = _recorded(sample, str(sample.status), engine)
        for name, kind in _agents(published).items():
            engine.log.clear()
            user = {"user_strategy": "human", "user_model": ""}
            env = get_env(config.env, task_split=config.task_split, task_index=TASK, **user)
            agent = kind(env.tools_info, env.wiki, "m", "p", 0.0, args, sampling)
            agent.openai_adapter = openai_tool_adapter.create_openai_adapter(env.tools_info)
            result = await agent.asolve(env, args, sampling, TASK)
            metrics = getattr(result, "metrics", ())
            results[name] = _recorded(result, result.status.value, engine) | {
                "error": result.info.get("error"),
                "hooks": sorted(getattr(agent, "used", ())),
                "mismatches": [each for each in metrics if each.startswith("token_mismatches")],
            }
    return results


def _recorded(result: Any, status: str, engine: Any) -> dict[str, Any]:
    """What is trained, with the prompt and the sampled ids of each request."""
    return {
        "tokens": list(result.tokens),
        "loss_mask": list(result.loss_mask),
        "reward": result.reward,
        "status": status,
        "response_length": result.response_length,
        "log": [[entry.input_ids.tolist(), list(entry.output_ids)] for entry in engine.log],
    }


def _arguments(tokenizer: Any, ip: str, port: str) -> Namespace:
    """slime's arguments, as far as the example and its `GenerateState` read them."""
    checkpoint = tempfile.mkdtemp()
    tokenizer.save_pretrained(checkpoint)
    return Namespace(
        partial_rollout=False,
        sglang_router_ip=ip,
        sglang_router_port=int(port),
        hf_checkpoint=checkpoint,
        sglang_server_concurrency=8,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=200,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        sglang_dp_size=1,
        sglang_config=None,
        prefill_num_servers=None,
        use_distributed_post=False,
    )


if __name__ == "__main__":
    from toolroll.agents import trainable_agents

    sys.modules["trainable_agents"] = trainable_agents  # all that a user of the example changes
    sys.stdout.write(json.dumps(asyncio.run(_main())) + "\n")
