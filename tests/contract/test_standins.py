"""What is recorded of other packages, for their stand-ins, is what the installed packages have."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.inventory import Missing, Tree, recorded
from support.standins import faults

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
