"""`scripts/newest.py` sees each pin and each test. What the indexes say is not tested."""

import newest


def test_the_pins_of_all_files_are_found() -> None:
    found = {(pin.kind, pin.name) for pin in newest.pins()}
    assert {
        ("pip", "areal"),  # tests/requirements-all-no-deps.txt
        ("pip", "strands-sglang"),  # benchmarks/requirements-peers.txt
        ("pip", "skyrl"), ("pip", "bfcl-eval"), ("pip", "lm-eval"), ("pip", "harbor"),  # Makefile
        ("git", "https://github.com/THUDM/slime"),
        ("pip", "pydantic-ai-slim"), ("npm", "ai"), ("npm", "@openai/codex"),  # clients
    } <= found  # fmt: skip
    assert not {name for _, name in found} & {"torch", "transformers"}


def test_a_packages_tests_are_found_through_support_files() -> None:
    names = {path.name for path in newest.tests_of("trl")}
    assert {"test_qwen.py", "test_conformance.py"} <= names and "test_call_policy.py" not in names
    assert newest.tests_of("no-such-package") == []
