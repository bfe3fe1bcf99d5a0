"""The model of the package: a Llama network with 1 million parameters, trained on `desk`.

`examples/learn_desk` trains it from nothing. The folder is an ordinary Hugging Face folder: the
embedded engine serves it without torch, and so do SGLang and transformers.
"""

from __future__ import annotations

from pathlib import Path

DESK_MODEL = "desk-1m"
"""Its name for `--model`."""

_FOLDER = Path(__file__).with_name("desk_1m")


def desk_model_path() -> Path:
    """Return the folder of the model, for `load_engine` and `AutoTokenizer.from_pretrained`.

    It was trained with the desk's setting `policy="brief"` and the tool call format `hermes`.
    """
    return _FOLDER
