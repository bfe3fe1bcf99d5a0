"""Check the images of a finished sequence with the model's processor, for `Verifier`.

This module shares no code with the code that placed the images. The processor reads the images of
the whole conversation, and each must have as many tokens in the sequence.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.types import Message

_GROUP_PIXELS = 1 << 25
"""The processor reads at once images with at most this many pixels, or one image with more."""


def with_single_tokens(
    sequence: ServedSequence, processor: Any, placeholder: int
) -> ServedSequence | None:
    """Return `sequence` with one token for each image. Return None if the images are not those of
    its messages, or have other tokens. `processor` reads them, and `placeholder` is their token.
    """
    ids, last = sequence.input_ids, sequence.turns[-1]
    images = [image for image in sequence.images if image.position < last.start]
    files = _files(sequence.messages[: last.message])
    places = [range(image.position, image.position + image.count) for image in images]
    flat = [position for span in places for position in span]
    if (
        [hashlib.sha256(data).hexdigest() for data in files] != [image.sha256 for image in images]
        or _counts(files, processor, placeholder) != [len(span) for span in places]
        or flat != np.flatnonzero(ids[: last.start] == placeholder).tolist()
    ):
        return None
    cut = np.array(sorted(set(flat) - {span[0] for span in places}), dtype=np.intp)

    def moved(position: int) -> int:
        return position - int(np.searchsorted(cut, position))

    turns = (
        replace(
            turn,
            start=moved(turn.start),
            stop=moved(turn.stop),
            sampled_from=moved(turn.sampled_from),
        )
        for turn in sequence.turns
    )
    return replace(sequence, input_ids=np.delete(ids, cut), turns=tuple(turns), images=())


def _files(messages: Sequence[Message]) -> list[bytes]:
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    urls = (part["image_url"] for part in parts if "image_url" in part)
    texts = (url if isinstance(url, str) else url["url"] for url in urls)
    return [base64.b64decode(text.partition(",")[2]) for text in texts]


def _counts(files: Sequence[bytes], processor: Any, placeholder: int) -> list[int]:
    """Return the number of tokens that `processor` gives each image."""
    import PIL.Image

    counts: list[int] = []
    token = processor.tokenizer.convert_ids_to_tokens(placeholder)
    opened = (PIL.Image.open(io.BytesIO(data)) for data in files)
    for group in _groups(opened):
        text = "\n".join([token] * len(group))
        read = np.ravel(processor(text=[text], images=group, return_tensors="np")["input_ids"])
        counts += [len(list(run)) for same, run in groupby(read == placeholder) if same]
    return counts


def _groups(pictures: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the pictures in groups of at most `_GROUP_PIXELS`. A picture is decoded after this."""
    group, pixels = list[Any](), 0
    for picture in pictures:
        size = picture.width * picture.height
        if group and pixels + size > _GROUP_PIXELS:
            yield group
            group, pixels = [], 0
        group.append(picture)
        pixels += size
    if group:
        yield group
