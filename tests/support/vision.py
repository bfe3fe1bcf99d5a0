"""Random images, a processor that counts their tokens, and random models of 10 million parameters
that read images and that the real SGLang serves on a CPU.

The processor is transformers' own without its part for videos, which needs torchvision. It reads
images with Pillow. The server reads the whole processor from the model's folder.
"""

import base64
import importlib.metadata
import io
import json
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from support.cache import cached_folder
from support.episodes import call, serving
from support.listed_environment import ListedWorld
from support.qwen import save_qwen3, tokenizer_for, trl_template
from support.tiny_model import CONTEXT_LENGTH, VOCAB_SIZE

from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.template.images import ImageTokens
from toolroll.rollout.types import Completion, GenerateRequest

PLACEHOLDER = "<|image_pad|>"
PLACES = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": PLACEHOLDER,
    "video": "<|video_pad|>",
}
"""The control tokens of images, by the config's names for their ids."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 64, "mlp_ratio": 2, "in_chans": 3},  # SGLang reads the last name
    "Qwen2_5_VL": {
        "intermediate_size": 128, "out_hidden_size": 64, "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        "intermediate_size": 128, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
"""The classes of transformers that models of a family have, and its part of the vision config."""
IMAGES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
}
"""The settings of the image processor that a family changes."""


def picture(seed: int, width: int = 0, height: int = 0, file_format: str = "PNG") -> bytes:
    """A file with random pixels. By default, its size is random too."""
    from PIL import Image

    draw = random.Random(seed)
    size = width or draw.randint(20, 200), height or draw.randint(20, 200)
    image = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    file = io.BytesIO()
    image.save(file, file_format)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(seed: int, **size: Any) -> dict[str, Any]:
    """A content part of Chat Completions with a random image."""
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed, **size))}}


def shown(text: str, *seeds: int) -> list[dict[str, Any]]:
    """The content of a message: random images, then a text."""
    return [*map(image_part, seeds), {"type": "text", "text": text}]


@cache
def vision_tokenizer() -> Any:
    """A small tokenizer with the chat template of Qwen3-VL; shared, so not to be changed."""
    return tokenizer_for(trl_template("qwen3_vl"))


def processor(tokenizer: Any, family: str = "Qwen2VL") -> Any:
    """Transformers' processor of `family` for `tokenizer`, without videos."""
    import transformers

    try:  # from transformers 5
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as ImageProcessor,
        )
    except ImportError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
            Qwen2VLImageProcessor as ImageProcessor,
        )
    kind: Any = getattr(transformers, f"{family}Processor")
    parts = ["image_processor", "tokenizer"]
    names = {
        "attributes": parts,
        "get_attributes": classmethod(lambda cls: parts),
        "tokenizer_class": type(tokenizer).__name__,
        "__init__": lambda self, images, tokenizer: kind.__init__(self, images, tokenizer),
    }
    return type("ImagesOnly", (kind,), names)(ImageProcessor(**IMAGES.get(family, {})), tokenizer)


def image_tokens(tokenizer: Any, family: str = "Qwen2VL") -> ImageTokens:
    """What counts image tokens with `processor`."""
    index = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    return ImageTokens(lambda: processor(tokenizer, family), index)


class ExpandedEngine(Engine):
    """Sends all tokens of the images to an engine that knows no images, and keeps the requests.
    `other_prompt`: what the engine is said to have read.
    """

    def __init__(
        self, config: EngineConfig, other_prompt: str | None = None, *, takes_images: bool = True
    ) -> None:
        super().__init__(config)
        self.other_prompt, self.takes_images = other_prompt, takes_images
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, **options: Any) -> Completion:
        self.requests.append(request)
        completion = await super().generate(replace(request, images=()), **options)
        return replace(completion, other_prompt=self.other_prompt)


WORLD: dict[str, Any] = {
    "user_texts": [shown("Read them.", 1, 2)],
    "tool_texts": [shown("It is", 3), "Nothing."],
}


def looks(request: Any) -> str:
    """A policy that looks twice and answers."""
    return call(at="here") if request.call < 2 else "Done."


async def play(
    world: ListedWorld,
    policy: Any = looks,
    *,
    other_prompt: str | None = None,
    takes_images: bool = True,
    kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent,
    **options: Any,
) -> tuple[InteractionResult, ExpandedEngine]:
    """Play one episode; `options` are the template's."""
    tokenizer = vision_tokenizer()
    client = partial(ExpandedEngine, other_prompt=other_prompt, takes_images=takes_images)
    options = {"images": image_tokens(tokenizer), **options}
    async with serving(tokenizer, policy, client=client, **options) as (_, model):
        engine: Any = model.engine
        params = {"max_new_tokens": 512, "temperature": 1.0}
        player = kind(model=model, rollout_args={"verify": "always"}, sampling_params=params)
        result = await player.asolve(world, task=Task("t", 0), session_id="images")
    return result, engine


@cache
def tiny_vision_model(family: str) -> Path:
    """The folder of a model, with Qwen3's tokenizer and Qwen3-VL's chat template."""
    sources = (Path(__file__), Path(__file__).with_name("qwen.py"))
    versions = map(importlib.metadata.version, ("transformers", "torch"))
    key: tuple[str | bytes, ...] = (*(path.read_bytes() for path in sources), *versions)
    return cached_folder(f"tiny-{family}", key, lambda folder: _save_tiny(folder, family))


def _save_tiny(folder: Path, family: str) -> None:
    save_qwen3(folder, trl_template("qwen3_vl"))
    save_random(folder, family, 0, vocab_size=VOCAB_SIZE)


def save_random(
    folder: Path, family: str, seed: int, *, vocab_size: int, initializer_range: float = 0.2
) -> None:
    """Add a model with random weights to the folder, which has the tokenizer."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(text) for name, text in PLACES.items()
    }
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = getattr(transformers, f"{family}Config")(
        text_config={
            "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_LENGTH, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "bos_token_id": padding, "eos_token_id": end,
            "initializer_range": initializer_range,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2],
                **({"mrope_interleaved": True} if family == "Qwen3VL" else {}),
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 4, "initializer_range": initializer_range,
            **FAMILIES[family],
        },
        tie_word_embeddings=True, **tokens,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.generation_config.update(
        eos_token_id=[end, padding], pad_token_id=padding, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    processor(tokenizer, family).image_processor.save_pretrained(folder)
    kind = "Qwen3VL" if family == "Qwen3VL" else "Qwen2VL"
    videos = {"video_processor_type": f"{kind}VideoProcessor"}
    whole = {"processor_class": f"{family}Processor", "video_processor": videos}
    (folder / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")
