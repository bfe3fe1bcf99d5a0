"""The result of one request: its prompt, its completions, and how they are parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.types import Completion, IdArray, Message


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `reading` is None for a text completion; then `text` is what the client gets.
    `shown`: what the client gets if that is not the message of `reading`, the whole turn.
    """

    completion: Completion
    text: str
    reading: ParsedTurn | None = None
    shown: Message | None = None


@dataclass(slots=True, eq=False)
class CompletionResult:
    """The answers to a request. `prompt_json`: `prompt_ids` as JSON (`ids_json`); `constrained`:
    what constrained the sampling, if anything. `commit` is called once, when the answers are handed
    out; `render` makes the body without the prompt's ids.
    """

    id: str
    created: int
    model: str
    prompt_ids: IdArray
    choices: list[Choice]
    sampling_params: Mapping[str, Any]
    prompt_json: bytes
    constrained: str | None = None
    commit: Callable[[], None] | None = field(default=None, repr=False)
    render: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    _rest: bytes | None = field(default=None, repr=False)

    @property
    def body(self) -> bytes:
        """The answer as JSON, kept for a retry: a tenth of the size of its lists of ids."""
        self.write()
        assert self._rest is not None
        return b"".join(
            (memoryview(self._rest)[:-1], b',"prompt_token_ids":[', self.prompt_json, b"]}")
        )

    def write(self) -> None:
        """Write the body, if it is not written yet."""
        if self._rest is None:
            assert self.render is not None
            self._rest = orjson.dumps(self.render())
            self.render = None

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, with the cached tokens."""
        prompt = len(self.prompt_ids)
        sampled = sum(len(choice.completion.output_ids) for choice in self.choices)
        cached = max((choice.completion.cached_tokens for choice in self.choices), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def joined_ids(*parts: IdArray | bytes) -> bytes:
    """Return ids as JSON text without brackets; each of `parts` is ids, or such a text."""
    texts = (part if isinstance(part, bytes) else ids_json(part) for part in parts)
    return b",".join(text for text in texts if text)
