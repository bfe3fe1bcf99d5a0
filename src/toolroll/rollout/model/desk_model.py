"""`desk-1m`, the model in this package: a Llama network with 1 million parameters, trained on the
environment `desk`.

`examples/learn_desk` trains it from scratch. The model's folder is in Hugging Face's format. The
embedded engine serves it without torch; SGLang and transformers can load it too.
"""

from __future__ import annotations

from pathlib import Path

DESK_MODEL = "desk-1m"
"""The name of this model for `--model`."""

_FOLDER = Path(__file__).with_name("desk_1m")


def desk_model_path() -> Path:
    """Return the folder of the model, for `load_engine` and `AutoTokenizer.from_pretrained`.

    The model was trained with the desk setting `policy="brief"` and the tool call format `hermes`.
    """
    return _FOLDER
