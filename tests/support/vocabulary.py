"""The part of a tokenizer that a `FrameworkEngine` reads."""

from collections.abc import Iterable

from tokenizers import AddedToken


class Vocabulary:
    """The ids from 0 to `size` - 1. Those in `special` are special tokens."""

    def __init__(self, size: int, *, special: Iterable[int] = ()) -> None:
        self._size = size
        self.added_tokens_decoder = {index: AddedToken("end", special=True) for index in special}

    def __len__(self) -> int:
        return self._size
