"""The model's tokenizer, and its logprobs for training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from examples.learn_desk.batches import Sample, to_batch
from support.vision import PLACES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

VOCABULARY = 384
CONTROL = ("<|im_end|>", "<|im_start|>", "<|pad|>", *PLACES.values())
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
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=CONTROL[0],
        pad_token=CONTROL[2],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def load(folder: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the model in a folder."""
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.train()  # it has no dropout


def logprobs(
    model: Any, batch: Sequence[Seen], exchange: random.Random | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of all trained tokens by the model and as recorded, and the number of the
    sample of each. `exchange` gives the samples each other's images.
    """
    tensors = to_batch([one.sample for one in batch])
    ids, where = tensors.ids, tensors.trained[:, 1:]
    images = {
        name: torch.cat([one.images[name] for one in batch if one.images])
        for name in ("pixel_values", "image_grid_thw")
    }
    if exchange is not None:
        pixels = images["pixel_values"].unflatten(0, (len(images["image_grid_thw"]), -1))
        order = exchange.sample(range(len(pixels)), len(pixels))
        images["pixel_values"] = pixels[order].flatten(0, 1)
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
