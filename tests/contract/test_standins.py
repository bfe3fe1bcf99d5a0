"""What is recorded of other packages, for their stand-ins, is what the installed packages have; so
are the library's names of SGLang's sampling parameters.
"""

import ast
from importlib.util import find_spec

import pytest
from support.bare import definition
from support.inventory import Missing, Tree, recorded
from support.standins import faults

from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES

ELSEWHERE = {"miles", "slime", "tau_bench", "vllm"}
"""Not installed by `make test-all`: on GitHub only, and vLLM, which needs CUDA."""


@pytest.mark.parametrize("package", [
    pytest.param(name, marks=[pytest.mark.peers] * (name in ELSEWHERE)) for name in recorded()
])  # fmt: skip
def test_the_inventory_is_what_the_package_has(package: str) -> None:
    """Record it again after a change of the version: see tests/support/inventory.py."""
    inventory, tree = recorded()[package], Tree()
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed ({inventory['origin']})")
    found = []
    for name, entry in inventory["names"].items():
        try:
            found += faults(name, entry, tree.entry(name))
        except Missing as error:
            found.append(f"{name}: {error}")
    assert found == []


INTERNAL = (
    "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized "
    "ebnf_full_assistant"
)
"""The fields that SGLang fills itself."""
OF_THE_FRONT_END = {"choice"}  # the server's, in Rust: `test_sglang_facts` compares its whole list


def test_the_sampling_parameters_are_those_of_sglang_s_class() -> None:
    node = definition("sglang/srt/sampling/sampling_params.py", "SamplingParams")
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert fields - set(INTERNAL.split()) == set(SGLANG_NAMES) - OF_THE_FRONT_END
