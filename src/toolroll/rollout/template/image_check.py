"""Check the images of a finished sequence with the model's processor, for `Verifier`.

This module shares no code with the code that placed the images. The processor reads the text of the
whole conversation with all its images, and each image must have as many tokens in the sequence.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.types import IdArray, Message


def with_single_tokens(
    sequence: ServedSequence, processor: Any, placeholder: int, text: str
) -> ServedSequence | None:
    """Return `sequence` with one token for each image. Return None if the images are not those of
    its messages, or have other tokens. `processor` reads them, and `placeholder` is their token.
    `text`: the render of its last prompt.
    """
    import PIL.Image

    ids, last = sequence.input_ids, sequence.turns[-1]
    images = [image for image in sequence.images if image.position < last.start]
    files = _files(sequence.messages[: last.message])
    pictures = [PIL.Image.open(io.BytesIO(data)) for data in files]
    read = processor(text=[text], images=pictures, return_tensors="np")["input_ids"]
    digests = [hashlib.sha256(data).hexdigest() for data in files]
    counts = [_runs(part, placeholder) for part in (np.ravel(read), ids[: last.start])]
    if digests != [image.sha256 for image in images] or counts[0] != counts[1]:
        return None
    # a wrong position or count leaves other tokens than the render has
    copies = [range(image.position + 1, image.position + image.count) for image in images]
    cut = np.array([place for places in copies for place in places], dtype=np.intp)

    def moved(place: int) -> int:
        return place - int(np.searchsorted(cut, place))

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


def _runs(ids: IdArray, placeholder: int) -> list[int]:
    """Return the lengths of the runs of `placeholder` in `ids`."""
    return [len(list(run)) for same, run in groupby(ids == placeholder) if same]
