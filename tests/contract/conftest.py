"""What contract tests share."""

from __future__ import annotations

from typing import Any

import pytest

from toolroll.rollout.testing import load_embedded_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded tokenizer."""
    return load_embedded_tokenizer()
