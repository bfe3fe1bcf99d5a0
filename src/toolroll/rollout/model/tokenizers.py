"""Load a tokenizer: by its name, or one of the two in this package.

The embedded tokenizer is a small byte-level BPE tokenizer with its own chat template. The other one
belongs to `desk-1m`, a Llama network with 1 million parameters, trained on the environment `desk`.
`examples/learn_desk` trains this model from scratch. Its folder is in Hugging Face's format. The
embedded engine serves it without torch; SGLang and transformers can load it too.
"""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from toolroll.rollout.errors import TemplateError, UsageError
from toolroll.rollout.template.images import ImageTokens

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("tokenizer")

DESK_MODEL = "desk-1m"
"""The name of this model for `--model`."""


_PLACEHOLDERS = [
    f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")
]
"""Where `config.json` and tokenizers name a placeholder token."""


_GENERATION: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}
"""The sampling parameters that are read from `generation_config.json`, and their valid values."""


def load_tokenizer(name: str | None, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer `name`: a folder, a model name on a hub, `embedded` for the small
    tokenizer in this package, or `desk-1m` for the tokenizer of the model that comes with the
    package. With `trust_remote_code`, a tokenizer class in the model's folder is loaded and run.

    Raise `UsageError` if it cannot be loaded.
    """
    if not name:
        raise UsageError(
            "no tokenizer is named: set hf_checkpoint (--model on the command line) to the model's "
            "folder or name"
        )
    if name == "embedded":
        return load_embedded_tokenizer()
    if name == DESK_MODEL:
        name = str(desk_model_path())
    # This is a path, not a name on a hub: fail without asking a hub.
    if name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
        raise UsageError(
            f"no tokenizer can be loaded from {name!r} (--model): there is no such folder"
        )
    # Catch a misspelled name here, because transformers retries an unreachable hub for 30 s.
    close = difflib.get_close_matches(name, ["embedded", DESK_MODEL], cutoff=0.8)
    if close and not Path(name).exists():
        raise UsageError(
            f"no tokenizer can be loaded from {name!r} (--model): did you mean {close[0]!r}?"
        )
    transformers: Any = import_transformers()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    if not Path(name).exists() and _cached(name, "tokenizer_config.json") is None:
        logger.warning(_NOT_HERE, name)
        hub.setLevel(logging.ERROR)  # without a network, it would log 22 lines about its retries
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"no tokenizer can be loaded from {name!r}: {reason} (without a network, give "
            f"the tokenizer's folder)"
        ) from error
    finally:
        hub.setLevel(level)


def local_name(name: str) -> str | None:
    """Return the name with which `load_tokenizer` loads the tokenizer `name` without a network, or
    None if it is neither in this package nor a folder, nor in the local cache of the hub.
    """
    if name in ("embedded", DESK_MODEL) or Path(name).is_dir():
        return name
    cached = _cached(name, "tokenizer_config.json")
    return None if cached is None else str(Path(cached).parent)


_NOT_HERE = (
    "%r is not on this machine: looking for it on the hub, which takes about a minute without a "
    "network (HF_HUB_OFFLINE=1: no look)"
)


def generation_defaults(name: str) -> dict[str, Any]:
    """Return the sampling parameters, by SGLang's names, that the `generation_config.json` of the
    model `name` sets. It is empty if there is no such file.
    """
    if name in ("embedded", DESK_MODEL):
        return {}
    transformers: Any = import_transformers()
    try:
        path = transformers.utils.hub.cached_file(name, "generation_config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the folder of a tokenizer has none
        return {}
    values = config if isinstance(config, dict) else {}
    return {
        key: values[key]
        for key, valid in _GENERATION.items()
        if type(values.get(key)) in (int, float) and valid(values[key])
    }


def desk_model_path() -> Path:
    """Return the folder of the model, for `load_engine` and `AutoTokenizer.from_pretrained`.

    The model was trained with the desk setting `policy="brief"` and the tool call format `hermes`.
    """
    return Path(__file__).with_name("desk_1m")


def embedded_tokenizer_path() -> Path:
    """Return the folder of the embedded tokenizer, for `AutoTokenizer.from_pretrained`."""
    return FOLDER


def load_embedded_tokenizer() -> Any:
    """Return the embedded tokenizer with its chat template, as a `PreTrainedTokenizerFast`."""
    transformers: Any = import_transformers()
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["tokenizer_class"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), name_or_path="embedded", **settings
    )
    tokenizer.chat_template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


_NOTICES = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_transformers() -> ModuleType:
    """Import `transformers`, which takes 1 to 2 seconds.

    Suppress the notice that it prints if PyTorch is missing, because only its tokenizers are used
    here.
    """
    if "transformers" in sys.modules:
        return sys.modules["transformers"]
    before = os.environ.get(_NOTICES)
    os.environ[_NOTICES] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            del os.environ[_NOTICES]
        else:
            os.environ[_NOTICES] = before


def find_placeholders(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that mark the place of an image, a video or audio in a prompt.

    Only the model's `config.json` and the tokenizer's own attributes count, because text-only
    models share the vocabularies of multimodal ones.
    """
    named = [getattr(tokenizer, name, None) for name in _PLACEHOLDERS]
    named += _placeholders_in(_config(str(getattr(tokenizer, "name_or_path", ""))))
    return frozenset(index for index in named if type(index) is int and index >= 0)


def _placeholders_in(config: Mapping[str, Any]) -> Iterator[Any]:
    for name, setting in config.items():
        if name in _PLACEHOLDERS:
            yield setting
        elif isinstance(setting, dict):
            yield from _placeholders_in(setting)


def load_images(tokenizer: Any, *, trust_remote_code: bool = False) -> ImageTokens | None:
    """Return what counts the tokens of images for the model of `tokenizer`, or None if its
    `config.json` names no placeholder for images. The processor is loaded for the first image.
    """
    name = str(getattr(tokenizer, "name_or_path", ""))
    config = _config(name)
    placeholder = config.get("image_token_id", config.get("image_token_index"))

    def load() -> Any:
        transformers: Any = import_transformers()
        try:
            return transformers.AutoProcessor.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
        except (ImportError, OSError, ValueError, AttributeError) as error:
            raise TemplateError(
                f"images need the processor of {name!r} (pip install 'toolroll[images]'): {error}"
            ) from error

    return ImageTokens(load, placeholder) if type(placeholder) is int else None


def _config(name: str) -> Mapping[str, Any]:
    """Return the `config.json` in the folder `name`, or in the local cache of the hub."""
    path = _cached(name, "config.json")
    config = json.loads(Path(path).read_bytes()) if path else {}
    return config if isinstance(config, dict) else {}


def _cached(name: str, file: str) -> str | None:
    """Return the path of `file` in the folder `name`, or in the local cache of the hub."""
    transformers: Any = import_transformers()
    try:
        path: str | None = transformers.utils.cached_file(name, file, local_files_only=True)
    except (OSError, ValueError):  # ValueError: an older huggingface_hub refuses the name
        return None
    return path
