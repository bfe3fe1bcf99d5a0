"""`examples/slime_tau_bench`: its flags and settings, and the arguments that the adapter reads,
by slime's own parsers (`peers`). And the files of slime's own tau-bench example, unchanged, on
toolroll (`make test-peers`)."""

import json
import os
import re
import subprocess
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import slime_mirror
from support.processes import PIPES, printed
from support.published_example import AGENTS, example_folder, run
from support.source import ROOT
from support.tau import REAL, needed

from toolroll.agents.users import UserConfig
from toolroll.cli.tasks import task_lines, write_lines
from toolroll.rollout.runs.registry import agent_maker, user_maker
from toolroll.trainers.episodes import task_index
from toolroll.trainers.slime import read_settings

EXAMPLE = ROOT / "examples" / "slime_tau_bench"
ADAPTER = ROOT / "src" / "toolroll" / "trainers" / "slime"
MODEL_FLAG = "--num-layers"

MEGATRON = """
--num-layers --tensor-model-parallel-size --sequence-parallel --recompute-granularity --recompute-method --recompute-num-layers
--attention-dropout --hidden-dropout --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend
--optimizer --lr-decay-style --weight-decay --adam-beta1 --adam-beta2
""".split()  # noqa: E501
"""Megatron-LM's own flags (looked up at its commit d98e8a64): slime adds its parser to
Megatron's, which is in no package index."""


def _arguments(tmp_path: Path, *more: str) -> list[str]:
    """What run.sh hands to slime's train.py."""
    sizes = tmp_path / "slime" / "scripts" / "models"
    sizes.mkdir(parents=True, exist_ok=True)
    (tmp_path / "models" / "Qwen3-4B-Instruct-2507_torch_dist").mkdir(parents=True, exist_ok=True)
    (sizes / "qwen3-4B-Instruct-2507.sh").write_text(f"MODEL_ARGS=({MODEL_FLAG} 36)\n")
    folders = {"SLIME": "slime", "MEGATRON": "megatron", "CHECKPOINTS": "models"}
    places = {name: str(tmp_path / folder) for name, folder in folders.items()}
    env = {**os.environ, **places, "ARGUMENTS_ONLY": "1"}
    done = subprocess.run(["bash", str(EXAMPLE / "run.sh"), *more], env=env, **PIPES)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _flags(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument.startswith("--")]


def _after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_script_names_flags_that_slime_has(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, "--num-rollout", "3")
    unknown = set(_flags(arguments)) - slime_mirror.FLAGS - set(MEGATRON)
    assert unknown == set()
    assert arguments[-2:] == ["--num-rollout", "3"] and _after(arguments, MODEL_FLAG) == "36"
    assert "--apply-chat-template" not in arguments and _after(arguments, "--input-key") == "index"


def test_the_functions_and_settings_that_the_script_names_exist(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path)
    named = [argument for argument in arguments if argument.startswith("toolroll.")]
    assert len(named) == 5
    for path in named:
        module, _, name = path.rpartition(".")
        assert callable(vars(import_module(module))[name])
    file = Path(_after(arguments, "--custom-config-path"))
    settings = read_settings(Namespace(**yaml.safe_load(file.read_text(encoding="utf-8"))))
    assert settings.user == "openai"
    assert callable(user_maker(settings.user)) and callable(agent_maker(settings.agent))
    assert UserConfig.model_validate(settings.user_settings).temperature == 0.0


def test_the_adapter_reads_arguments_that_slime_has() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ADAPTER.glob("*.py")))
    read = {
        *re.findall(r'attribute\((?:self\._)?args, f?"([a-z_]+)"', source),
        *re.findall(r"\bargs\.(rollout_[a-z_]+|sglang_[a-z_]+)", source),
    }
    some = "hf_checkpoint rollout_seed partial_rollout sglang_server_concurrency"
    assert {*some.split(), "rollout_temperature"} <= read
    of_miles = {"lora_rank", "lora_adapter_path"}
    assert read - slime_mirror.ARGUMENTS - slime_mirror.MODEL_ARGUMENTS == of_miles


# --- slime's own ----------------------------------------------------------------------------------

_PARSE = """
import argparse, json, sys
import slime.utils.arguments as arguments
from slime.backends.sglang_utils.arguments import add_sglang_arguments
ours = argparse.ArgumentParser(allow_abbrev=False)
arguments.get_slime_extra_args_provider()(ours)
engine = argparse.ArgumentParser(allow_abbrev=False)
add_sglang_arguments(engine)
given = json.load(sys.stdin)
parsed, rest = ours.parse_known_args(given)
served, rest = engine.parse_known_args(rest)
whole = argparse.Namespace(**{**vars(served), **vars(parsed)})
# What main() has from a first look at the command line, and from Megatron's parser.
vars(whole).update(debug_rollout_only=False, debug_train_only=False, load_debug_rollout_data=None, train_backend="megatron")
vars(whole).update(ckpt_step=None, num_layers=36, context_parallel_size=1)
vars(whole).update(pipeline_model_parallel_size=1, tensor_model_parallel_size=2)
arguments.slime_validate_args(whole)
print(json.dumps({
    "eval": {name: getattr(whole.eval_datasets[0], name) for name in ("name", "path", "input_key", "n_samples_per_eval_prompt")},
    "toolroll": {name: value for name, value in vars(whole).items() if name.startswith("toolroll_")},
    "flags": sorted({flag for parser in (ours, engine) for action in parser._actions for flag in action.option_strings}),
    "dests": sorted({action.dest for parser in (ours, engine) for action in parser._actions}),
    "values": {name: value for name, value in {**vars(served), **vars(parsed)}.items()
               if isinstance(value, (str, int, float, list, type(None)))},
    "rest": rest,
}))
"""  # noqa: E501
"""slime's parsers import sglang's server arguments, which import triton: a stub on the CPU."""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What slime's parsers make of the script's arguments, and which arguments they have."""
    pytest.importorskip(
        "slime.utils.types",
        reason=f"slime is on GitHub only: github.com/THUDM/slime at {slime_mirror.COMMIT[:8]}",
    )
    stubs = str(ROOT / "tests" / "support" / "stubs")
    path = os.pathsep.join([stubs, os.environ.get("PYTHONPATH", "")])
    arguments = json.dumps(_arguments(tmp_path_factory.mktemp("example")))
    out = printed("-c", _PARSE, input=arguments, env={**os.environ, "PYTHONPATH": path})
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.peers
def test_slime_s_parsers_have_the_script_s_and_the_mirror_s(parsed: dict[str, Any]) -> None:
    values = parsed["values"]
    assert [flag for flag in _flags(parsed["rest"]) if flag not in MEGATRON] == []
    assert set(MEGATRON) - set(_flags(parsed["rest"])) == set(), (
        "slime has this flag itself: it is none of Megatron's alone"
    )
    rollout = "toolroll.trainers.slime.generate_rollout"
    expected = {
        "rollout_function_path": rollout,
        "eval_function_path": rollout,
        "rollout_batch_size": 32,
        "over_sampling_batch_size": 48,
        "n_samples_per_prompt": 8,
        "global_batch_size": 32 * 8,
        "use_tis": True,
        "lr": 1e-6,
        "router_policy": "manual",
        "eval_temperature": 0.0,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["eval_prompt_data"][0] == "retail-dev"
    given = yaml.safe_load((EXAMPLE / "toolroll.yaml").read_text(encoding="utf-8"))
    assert parsed["toolroll"] == given
    assert read_settings(Namespace(**parsed["toolroll"])).concurrency == 128
    found = {**parsed["eval"], "path": Path(parsed["eval"]["path"]).name}
    dataset = {"name": "retail-dev", "input_key": "index", "n_samples_per_eval_prompt": 4}
    assert found == {**dataset, "path": "retail_dev.jsonl"}
    assert slime_mirror.FLAGS - set(parsed["flags"]) == set()
    # Set while slime checks its arguments, out of --eval-prompt-data and --eval-config.
    assert slime_mirror.ARGUMENTS - set(parsed["dests"]) == {"eval_datasets"}


@pytest.mark.peers
def test_slime_s_dataset_reads_the_files_of_toolroll_tasks(tmp_path: Path) -> None:
    pytest.importorskip("slime.utils.types", reason="slime is on GitHub only")
    dataset = import_module("slime.utils.data").Dataset
    path = tmp_path / "tasks.jsonl"
    write_lines(task_lines("desk", None, None), path)
    rows = dataset(
        str(path), None, None, 4096, prompt_key="index", metadata_key="metadata"
    ).origin_samples
    assert [task_index(sample.prompt) for sample in rows] == list(range(33))
    assert rows[3].metadata["env"] == "desk" and rows[3].metadata["task_id"]


# --- slime's own example, unchanged ---------------------------------------------------------------


@pytest.fixture(scope="module")
def episodes() -> dict[str, Any]:
    needed(REAL)
    folder = example_folder()
    if folder is None:
        pytest.skip("the example's files are in slime's checkout on GitHub only: make test-peers")
    return run(folder)


@pytest.mark.peers
@pytest.mark.parametrize("name", ["generate", *AGENTS[:3]])
def test_the_tokens_are_those_served_and_sampled(episodes: dict[str, Any], name: str) -> None:
    episode = episodes[name]
    assert (episode.get("error"), episode["status"]) == (None, "completed")
    assert len(episode["log"]) == 2
    start = len(episode["tokens"]) - episode["response_length"]
    response = zip(episode["tokens"][start:], episode["loss_mask"], strict=True)
    sampled = [token for token, mask in response if mask]
    assert sampled == [token for _, ids in episode["log"] for token in ids]
    prompt, ids = episode["log"][-1]
    assert episode["tokens"] == [*prompt, *ids]
    assert episode.get("mismatches", []) == []


@pytest.mark.peers
def test_the_hooks_are_called_and_no_connection_stays_open(episodes: dict[str, Any]) -> None:
    """The last agent's `asolve` encodes text, so its tokens are not compared with the engine's."""
    hooks = [len(episodes[name]["hooks"]) for name in (*AGENTS[:2], AGENTS[3])]
    assert hooks == [10, 10, 9], "all of them are overridden through super"
    own = episodes[AGENTS[3]]
    assert (own.get("error"), own["status"], len(own["log"])) == (None, "completed", 2)
    assert len(own["loss_mask"]) == own["response_length"] > 0
    assert episodes["unclosed"] == 0
