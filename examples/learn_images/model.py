"""The model: a Qwen2-VL of half a million parameters with random weights, its tokenizer, and its
logprobs for training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from examples.learn_desk.batches import Sample, to_batch
from support.vision import PLACEHOLDER, processor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

VOCABULARY = 384
CONTEXT_LENGTH = 4096
CONTROL = ("<|im_end|>", "<|im_start|>", "<|pad|>")
VISION = ("<|vision_start|>", "<|vision_end|>", PLACEHOLDER, "<|video_pad|>")
MARKS = ("<tool_call>", "</tool_call>")
PIECES = r"[a-zA-Z]+|\d|[^a-zA-Z\d]+"
"""A word, a digit, or what is between them: merges do not cross these."""


@dataclass(frozen=True)
class Seen:
    """A sample, and what the processor makes of its images."""

    sample: Sample
    images: dict[str, Tensor]


def make_tokenizer(texts: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Return a byte-pair encoding trained on `texts`, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL + VISION + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL + VISION]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CONTROL[0],
        pad_token=CONTROL[2],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
        chat_template=template,
    )


def save_random(tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int) -> None:
    """Write a model with random weights, as SGLang and transformers read it."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    stop = tokenizer.eos_token_id
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_LENGTH, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": stop,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 2,
            "in_chans": 3,
        },
        tie_word_embeddings=True, vision_start_token_id=start, vision_end_token_id=end,
        image_token_id=image, video_token_id=video,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.update(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor(tokenizer).image_processor.save_pretrained(folder)
    videos = {"video_processor_type": "Qwen2VLVideoProcessor"}
    whole = {"processor_class": "Qwen2VLProcessor", "video_processor": videos}
    (folder / "processor_config.json").write_text(json.dumps(whole), encoding="utf-8")


def load(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model in a folder."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.train()  # it has no dropout


def logprobs(model: Any, batch: Sequence[Seen]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of all trained tokens by the model and as recorded, and the number of the
    sample of each.
    """
    tensors = to_batch([one.sample for one in batch])
    ids, where = tensors.ids, tensors.trained[:, 1:]
    images = {
        name: torch.cat([one.images[name] for one in batch if one.images])
        for name in ("pixel_values", "image_grid_thw")
        if any(one.images for one in batch)
    }
    # Without an attention mask: the padding is on the right, so no token attends to it.
    states = model.model(
        input_ids=ids[:, :-1],
        mm_token_type_ids=(ids[:, :-1] == model.config.image_token_id).int(),
        use_cache=False,
        **images,
    ).last_hidden_state
    found = functional.log_softmax(model.lm_head(states[where]), dim=-1)
    found = found.gather(1, ids[:, 1:][where].unsqueeze(1)).squeeze(1)
    return found, tensors.logprobs[:, 1:][where], where.nonzero()[:, 0]
