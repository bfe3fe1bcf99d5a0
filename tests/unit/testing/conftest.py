"""Fixtures of the embedded engine's tests."""

from pathlib import Path

import pytest
from support.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama network with the embedded tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))
