"""`ImageTokens`: the tokens of images.

Invariants:

- The number of an image's tokens comes from the model's processor in `transformers`.
- A prompt has a placeholder token only in the place of an image.
- An image is decoded completely before it is used. Its size is checked first, so that a small file
  cannot take much memory.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from toolroll.rollout.errors import TemplateError, capped
from toolroll.rollout.media import Image, image_urls
from toolroll.rollout.types import IdArray, Message

MOST_IMAGES = 256
"""The maximum number of images in the messages of one request."""
MOST_BYTES = 16 << 20
"""The maximum length of an image's data URL."""
MOST_PIXELS = 1 << 25
"""The maximum number of pixels of an image, which take 134 MB, or 402 MB in a WebP file."""
_KNOWN = 32
"""The number of images whose tokens are remembered, with their files."""
_DATA_URL = re.compile(r"data:image/(png|jpeg|webp|gif);base64,")


class ImageTokens:
    """Counts and places the tokens of images. `load` returns the model's processor. `placeholder`
    is the id of the token that the chat template writes for an image.

    Methods raise `TemplateError` for an image that cannot be used.
    """

    def __init__(self, load: Callable[[], Any], placeholder: int) -> None:
        self._load = load
        self.placeholder = placeholder
        self._measured = lru_cache(_KNOWN)(self._measure)

    @cached_property
    def processor(self) -> Any:
        """The processor. It is loaded for the first image."""
        return self._load()

    def expand(
        self, ids: IdArray, messages: Sequence[Message]
    ) -> tuple[IdArray, tuple[Image, ...]]:
        """Return `ids` (those of `messages`) with all tokens of each image, and the images."""
        urls = list(image_urls(messages))
        places = np.flatnonzero(ids == self.placeholder)
        if len(places) != len(urls) or len(urls) > MOST_IMAGES:
            raise TemplateError(
                f"the chat template writes {len(places)} placeholder tokens for {len(urls)} images "
                f"of these messages: it must show each image once, and at most {MOST_IMAGES}"
            )
        images = list(map(self.read, urls))
        counts = np.ones(len(ids), dtype=np.intp)
        counts[places] = [image.count for image in images]
        starts = (np.cumsum(counts) - counts)[places].tolist()
        placed = [replace(image, position=pos) for image, pos in zip(images, starts, strict=True)]
        return np.repeat(ids, counts), tuple(placed)

    def read(self, url: Any) -> Image:
        """Return the image in the data URL `url`, with the position 0."""
        form = _DATA_URL.match(url) if isinstance(url, str) else None
        if form is None or len(url) > MOST_BYTES:
            raise TemplateError(
                f"an image must be a data URL of at most {MOST_BYTES:,} characters, "
                f"data:image/png;base64,... (or jpeg, webp, gif), not {capped(repr(url), 40)}"
            )
        return replace(self._measured(form[1].upper(), url[form.end() :]), url=url)

    def _measure(self, file_format: str, text: str) -> Image:
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        import PIL.Image  # the processor needs it too

        if count is None:
            raise TemplateError(
                f"{type(self.processor).__name__} does not count the tokens of images "
                "(_get_num_multimodal_tokens): images need a model whose processor does"
            )
        try:
            data = base64.b64decode(text, validate=True)
            picture = PIL.Image.open(io.BytesIO(data), formats=[file_format])
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"it may have {MOST_PIXELS:,} pixels, not {picture.size}")
            picture.load()
            [tokens] = count(image_sizes=[picture.size[::-1]]).num_image_tokens
        except PIL.UnidentifiedImageError:
            raise TemplateError(f"an image cannot be read: its file is not {file_format}") from None
        except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
            raise TemplateError(f"an image ({file_format}) cannot be read: {error}") from error
        return Image(0, int(tokens), sha256(data).hexdigest())
