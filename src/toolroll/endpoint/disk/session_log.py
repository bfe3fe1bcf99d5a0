"""`SessionLog`: writes a session to the journal, one line per answer.

Invariants: `restore` rebuilds the same tree with the same nodes from the lines alone. Ids and
logprobs are written as the bytes of their arrays. Tools and other texts that repeat are written
once per session. Sampling parameters are written only if they differ from the previous answer's.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from toolroll.endpoint.answers.result import Choice, CompletionResult
from toolroll.endpoint.conversation.completions import TextPrompt
from toolroll.endpoint.conversation.conversation_tree import Prompt
from toolroll.endpoint.conversation.stored_response import Origin
from toolroll.endpoint.disk.journal import Journal
from toolroll.endpoint.errors import ApiError, server_stopping
from toolroll.rollout.media import Image
from toolroll.rollout.runtime.routed_experts import ExpertsRecord
from toolroll.rollout.runtime.routed_experts import to_json as experts_to_json
from toolroll.rollout.session.tree import Node
from toolroll.rollout.types import Completion, Message, WeightVersion

IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_UNCHANGED = "finish_reason matched prompt_tokens cached_tokens latency attempts rid".split()
"""The fields of a completion that are written as they are."""


class SessionLog:
    """Writes the lines of the session `session_id` to `journal`. `sample`: the number of earlier
    sessions with this name.
    """

    __slots__ = ("_journal", "ended", "params", "sample", "session_id", "size", "texts")

    def __init__(self, session_id: str, sample: int, journal: Journal) -> None:
        self.session_id = session_id
        self.sample = sample
        self.size = 0
        """The number of bytes of the session in the journal."""
        self.ended = False
        self.texts: dict[bytes, int] = {}
        self.params: Mapping[str, Any] | None = None
        self._journal = journal

    def check(self) -> None:
        """Raise `ApiError` if the session has ended, or if nothing more can be saved."""
        if self.ended and self._journal.stopping:
            raise server_stopping()
        if self.ended:
            raise ApiError(409, "request_aborted", "the session was deleted during the request")
        self._journal.check()

    def begin(self, sampling_params: Mapping[str, Any], **facts: Any) -> asyncio.Future[None]:
        """Write that the session exists, with its default sampling parameters and other `facts`."""
        return self._append("session", sampling_params=dict(sampling_params), **facts)

    async def saved(self) -> None:
        """Wait until all lines written so far are on disk."""
        await asyncio.shield(self._journal.append())

    def reward(self, reward: float, info: Mapping[str, Any]) -> asyncio.Future[None]:
        """Write the session's reward."""
        return self._append("reward", reward=reward, info=dict(info))

    def end(self) -> asyncio.Future[None]:
        """Write that the session is finished."""
        return self._append("end")

    def chat(
        self,
        prompt: Prompt,
        result: CompletionResult,
        request_key: bytes,
        nodes: Sequence[Node],
        origin: Origin,
        switches: Mapping[str, Any],
    ) -> asyncio.Future[None]:
        """Write the answers to a chat request, which were committed as `nodes`. `switches`: the
        switches of its template.
        """
        turn, response = prompt.turn, origin.response
        return self._append(
            "chat",
            object=origin.kind,
            lineage=dict(origin.lineage),
            ignored=list(origin.ignored),
            **self._answer(result, request_key, nodes),
            parent=_index(prompt.parent),
            delta=packed(prompt.delta, IDS),
            fork_reason=prompt.fork_reason,
            turn=None if turn is None else turn.node.index,
            added=[with_urls(message, self._once_text) for message in prompt.added],
            **({"images": [_image(image) for image in prompt.images]} if prompt.images else {}),
            tools=self._once(prompt.tools.text),
            switches=dict(switches),
            digest=prompt.digest.hex(),
            continues=prompt.continues,
            preserved=prompt.preserved,
            unshown=prompt.unshown,
            dropped=None if prompt.dropped is None else packed(prompt.dropped, IDS),
            prefill=prompt.prefill,
            prefill_ids=packed(prompt.prefill_ids, IDS),
            choices=[_chat_choice(choice) for choice in result.choices],
            kept=None
            if response is None
            else [response.instructions, self._once(response.echo), response.answer.decode()],
        )

    def text(
        self,
        prompt: TextPrompt,
        result: CompletionResult,
        request_key: bytes,
        nodes: Sequence[Node],
        fork_reason: str | None,
    ) -> asyncio.Future[None]:
        """Write the answers to a text completion request, which were committed as `nodes`."""
        return self._append(
            "text",
            **self._answer(result, request_key, nodes),
            parent=_index(prompt.parent),
            delta=packed(prompt.delta, IDS),
            fork_reason=fork_reason,
            choices=[_completion(choice.completion) for choice in result.choices],
        )

    def _answer(
        self, result: CompletionResult, request_key: bytes, nodes: Sequence[Node]
    ) -> dict[str, Any]:
        params = None if self.params == result.sampling_params else dict(result.sampling_params)
        self.params = result.sampling_params
        return {
            "key": request_key.hex(),
            "id": result.id,
            "created": result.created,
            "first": result.first,
            "nodes": [node.index for node in nodes],
            "sampling_params": params,
        }

    def _once(self, text: bytes) -> str | int:
        """Return `text` if this session has not written it yet. Otherwise return its number. Use
        this for texts that many answers share: the tools, images, and the part of a response that
        repeats its request.
        """
        number = self.texts.get(text)
        if number is not None:
            return number
        self.texts[text] = len(self.texts)
        return text.decode()

    def _once_text(self, text: str) -> str | int:
        return self._once(text.encode())

    def _append(self, kind: str, **data: Any) -> asyncio.Future[None]:
        line = orjson.dumps(
            {"s": self.session_id, "k": self.sample, "kind": kind, **data},
            option=orjson.OPT_APPEND_NEWLINE,
        )
        self.size += len(line)
        return self._journal.append(line)


def session_of(line: bytes) -> tuple[str, int]:
    """Return the key of the session to which the journal's `line` belongs."""
    data = orjson.loads(line)
    return data["s"], data["k"]


def packed(values: npt.NDArray[Any], kind: np.dtype[Any]) -> str:
    """Return `values`, converted to the type `kind`, as base64 text."""
    return b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()


def unpacked(text: str, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array that `packed` wrote as `text`."""
    return np.frombuffer(b64decode(text, validate=True), dtype=kind)


def with_urls(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return `message` with the URL of each image changed by `change`."""
    if not isinstance(message.get("content"), list):
        return message
    parts = (
        {**part, "image_url": {"url": change(part["image_url"]["url"])}}
        if "image_url" in part
        else part
        for part in message["content"]
    )
    return {**message, "content": list(parts)}


def _image(image: Image) -> list[Any]:
    return [image.position, image.count, image.sha256]


def _index(node: Node | None) -> int | None:
    return None if node is None else node.index


def _chat_choice(choice: Choice) -> dict[str, Any]:
    assert choice.turn is not None
    sampled = choice.turn.sampled
    return {
        **_completion(choice.completion),
        "message": choice.turn.message,
        "sampled": [sampled.text, sampled.stop, sampled.stops, sampled.last_id],
    }


def _completion(completion: Completion) -> dict[str, Any]:
    logprobs, experts = completion.logprobs, completion.routed_experts
    return {
        "ids": packed(completion.output_ids, IDS),
        "logprobs": None if logprobs is None else packed(logprobs, LOGPROBS),
        "weight_versions": [
            [span.version, span.start, span.stop] for span in completion.weight_versions
        ],
        **{name: getattr(completion, name) for name in _UNCHANGED},
        "experts": None if experts is None else experts_to_json(experts),
        "top": completion.top_logprobs,
        **({"other_prompt": completion.other_prompt} if completion.other_prompt else {}),
    }


def completion_of(data: Mapping[str, Any]) -> Completion:
    """Return the completion in `data`, a choice of an answer as `SessionLog` wrote it."""
    logprobs, experts, top = data["logprobs"], data["experts"], data["top"]
    return Completion(
        output_ids=unpacked(data["ids"], IDS),
        logprobs=None if logprobs is None else unpacked(logprobs, LOGPROBS),
        weight_versions=tuple(WeightVersion(*span) for span in data["weight_versions"]),
        routed_experts=None if experts is None else ExpertsRecord(**experts).rows(),
        top_logprobs=None
        if top is None
        else [[(value, index) for value, index in position] for position in top],
        other_prompt=data.get("other_prompt"),
        **{name: data[name] for name in _UNCHANGED},
    )
