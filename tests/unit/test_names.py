"""The names under which the library is imported: the façade's, and the published ones of the
folders."""

import inspect
import re
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name

import pytest

import toolroll

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "toolroll.agents.trainable_agents": (
        "Status InteractionResult call_to_action_sglang TOOL_INSTRUCTION TrainableAgentMixin "
        "TrainableToolCallingAgent agent_factory"
    ),
    "toolroll.parsers": "OpenAICompatibleToolCallAdapter create_openai_adapter parse_tools",
}
HOOKS = (
    "_reformulate_tool_call _call_llm _parse_tool _execute_tool _initialize_environment "
    "_build_initial_messages "
    "_prepare_prompt_tokens asolve _get_token_delta _build_final_result"
)


@pytest.mark.parametrize(("module", "names"), PUBLISHED.items())
def test_the_published_names_are_there(module: str, names: str) -> None:
    found = import_module(module)
    assert set(names.split()) <= set(found.__all__)
    assert [name for name in found.__all__ if getattr(found, name).__doc__ is None] == []


SIGNATURES = {
    **{f"TrainableAgentMixin.{name}": "self" for name in HOOKS.split()},
    "agent_factory": "tools_info wiki config rollout_args sampling_params",
    "TrainableToolCallingAgent": "tools_info wiki model provider temperature rollout_args "
    "sampling_params",
    "TrainableAgentMixin.asolve": "self env rollout_args sampling_params task_index max_num_steps",
    "TrainableAgentMixin._get_token_delta": "self tokenizer messages",
    "TrainableAgentMixin._build_final_result": (
        "self res total_reward info messages loss_masks prompt_token_ids response_token_ids"
    ),
    "InteractionResult": "prompt reward messages info response loss_mask tokens status",
    "call_to_action_sglang": "calls text_response",
}


@pytest.mark.parametrize(("name", "parameters"), SIGNATURES.items())
def test_the_published_arguments_are_taken_in_their_order(name: str, parameters: str) -> None:
    found = inspect.signature(
        resolve_name(f"toolroll.agents.trainable_agents.{name}")
    ).parameters.values()
    positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional[: len(parameters.split())] == parameters.split()


def test_the_published_defaults_are_kept() -> None:
    agent = toolroll.TrainableToolCallingAgent([], "", "m", "p")
    sampling = {"temperature": 0.0, "max_new_tokens": 512, "top_p": 0.9, "top_k": 50}
    assert agent.sampling_params == sampling
    router = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": 30000, "use_http2": False}
    assert agent.rollout_args == router
    solve = inspect.signature(toolroll.TrainableAgentMixin.asolve)
    assert solve.parameters["max_num_steps"].default == 30
    statuses = {status.name: status.value for status in toolroll.Status}
    assert statuses == {name: name.lower() for name in ("COMPLETED", "TRUNCATED", "ABORTED")}


@pytest.mark.parametrize("page", ["migrating.md", "slime.md", "tau-bench.md"])
def test_every_name_on_a_page_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\btoolroll(?:\.[A-Za-z_]+)+", text))
    assert len(named) >= 2
    assert [name for name in sorted(named) if not _is_there(name)] == []
    for module, names in re.findall(r"from (toolroll\.[a-z.]+) import ([A-Za-z_, ]+)", text):
        assert [
            name
            for name in names.replace(" ", "").split(",")
            if name and not _is_there(f"{module}.{name}")
        ] == []


def _is_there(name: str) -> bool:
    """Whether `name` is a module, a name of one, or a group of entry points."""
    if entry_points(group=name):
        return True
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
