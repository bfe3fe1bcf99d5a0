"""`Image`: an image in a conversation, and its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IMAGE_PARTS = ("image_url", "input_image")
"""The types of content parts with an image, in Chat Completions and in Responses."""


@dataclass(frozen=True, slots=True)
class Image:
    """The tokens [position, position + count) of a sequence, which stand for an image. All are the
    same placeholder token.

    `sha256`: the digest of the file, in hexadecimal. `url`: the data URL that the engine gets, or
    "" if the image comes from a record.
    """

    position: int
    count: int
    sha256: str
    url: str = field(default="", compare=False, repr=False)


def collapsed(ids: npt.NDArray[np.int32], images: Sequence[Image]) -> npt.NDArray[np.int32]:
    """Return `ids` with one placeholder token for each image."""
    if not images:
        return ids
    copies = [np.arange(image.position + 1, image.position + image.count) for image in images]
    return np.delete(ids, np.concatenate(copies))


def image_urls(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the URL of each image in `messages`, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                url = part.get("image_url")
                yield url.get("url") if isinstance(url, Mapping) else url
