"""What loading a tokenizer prints where PyTorch is missing: nothing."""

from __future__ import annotations

import os

from support.processes import python

LOAD = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from toolroll.rollout.model.tokenizers import load_tokenizer
load_tokenizer("embedded")
import transformers
assert not transformers.is_torch_available()
"""


def test_no_notice_about_pytorch_is_printed() -> None:
    environment = {**os.environ, "USE_TORCH": "0"}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    done = python("-c", LOAD, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    noisy = LOAD.replace('load_tokenizer("embedded")', "import transformers")
    plain = python("-c", noisy, env=environment, check=True)
    assert "PyTorch was not found" in plain.stderr  # else this test proves nothing
