"""The result of one request: its prompt, its completions and their parsed turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from toolroll.parsers.types import Delta
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.runtime.jsonable import ids_json
from toolroll.rollout.session.node import Node
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.types import Completion, IdArray, Message, Tool

LONG = 25_000
"""The maximum number of tokens that are parsed, or written as JSON, on the event loop."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a request. `text` is the text for the client. `reading` is the whole parsed
    turn. `shown` is the message for the client, if it is only a part of the message of `reading`.
    `stream` returns the deltas that a stream would send.

    For a text completion, `reading`, `shown` and `stream` are None.
    """

    completion: Completion
    text: str
    reading: ParsedTurn | None = None
    shown: Message | None = None
    stream: Callable[[Choice], Sequence[Delta]] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StreamContext:
    """The data that a stream needs before the answer is finished.

    `tools`: the offered tools, or None if there are none. `seeds`: one seed per choice of a chat
    completion. It determines the ids of the choice's tool calls. `answer_id` and `created`: the
    values that the finished answer will have. `prompt_tokens`: the length of the prompt.
    `stop_strings`: the stop strings that are cut from the text. `in_reasoning`: True if the prompt
    ends inside reasoning. For a text completion, `tools`, `seeds`, `prompt_tokens` and
    `in_reasoning` are not set.
    """

    template: ChatTemplate
    sampling_params: Mapping[str, Any]
    tools: Sequence[Tool] | None = None
    seeds: Sequence[str] = ()
    answer_id: str = ""
    created: int = 0
    prompt_tokens: int = 0
    stop_strings: Sequence[str] = ()
    in_reasoning: bool = False

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        own = self.sampling_params.get("stop_token_ids") or ()
        return frozenset({*self.template.stop_token_ids, *own})


@dataclass(slots=True, eq=False)
class CompletionResult:
    """The answers to a request.

    `constrained`: the request field that caused a grammar constraint, if there was one. `first`:
    the number of earlier
    answers to the same prompt. `exact`: True if the body ends with the prompt's ids.
    `stop_strings`: the stop strings that are cut from a chat reply's text. `commit` is called once,
    when the answers are returned. `saved` is done once they are on disk. `render` returns the body
    without the prompt's ids at its end.
    """

    id: str
    created: int
    model: str
    prompt_ids: IdArray
    choices: list[Choice]
    sampling_params: Mapping[str, Any]
    constrained: str | None = None
    first: int = 0
    exact: bool = True
    stop_strings: Sequence[str] = ()
    saved: asyncio.Future[None] | None = field(default=None, repr=False)
    commit: Callable[[], None] | None = field(default=None, repr=False)
    render: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    _rest: bytes | None = field(default=None, repr=False)

    @property
    def body(self) -> bytes:
        """Return the answer as JSON text. The answer is kept in this form for a retry, because
        Python lists would be 10x as large.
        """
        self.write()
        assert self._rest is not None
        if not self.exact:
            return self._rest
        return b"".join(
            (
                memoryview(self._rest)[:-1],
                b',"prompt_token_ids":[',
                ids_json(self.prompt_ids),
                b"]}",
            )
        )

    def write(self) -> None:
        """Convert the answer to JSON text, unless this was already done."""
        if self._rest is None:
            assert self.render is not None
            self._rest = orjson.dumps(self.render())
            self.render = None

    @property
    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage, including cached tokens."""
        prompt = len(self.prompt_ids)
        sampled = sum(len(choice.completion.output_ids) for choice in self.choices)
        cached = max((choice.completion.cached_tokens for choice in self.choices), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


TopLogprobs = Sequence[Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer with the id `id`. Its choices are `nodes`.

    `first`: the number of earlier answers to the prompt. `top`: the most likely tokens of each
    choice, if the request asked for them.
    """

    id: str
    created: int
    first: int
    nodes: tuple[Node, ...]
    sampling_params: Mapping[str, Any]
    top: tuple[TopLogprobs | None, ...]

    @property
    def completions(self) -> list[Completion]:
        """The completions that the engine sampled, one per node."""
        found = []
        for node, top in zip(self.nodes, self.top, strict=True):
            completion = node.completion
            assert completion is not None
            found.append(replace(completion, top_logprobs=top))
        return found
