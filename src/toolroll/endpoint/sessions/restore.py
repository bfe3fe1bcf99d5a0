"""`restore`: rebuild the unfinished sessions from a journal.

Invariants: a session gets the same nodes with the same ids and logprobs, or an error is raised.
Lines of finished sessions have no effect, wherever they are. The answer to a request is kept for a
retry of this request, unless a later request continued the answer.
"""

from __future__ import annotations

import contextlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from toolroll.endpoint.answers.result import Choice, CompletionResult
from toolroll.endpoint.conversation.completions import TextPrompt
from toolroll.endpoint.conversation.conversation_tree import Prompt, TurnNode
from toolroll.endpoint.conversation.stored_response import Origin, StoredResponse
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.disk.journal import read_lines
from toolroll.endpoint.disk.session_log import (
    IDS,
    SessionLog,
    completion_of,
    unpacked,
    with_urls,
)
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import UsageError
from toolroll.rollout.media import Image, image_urls
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.types import IdArray

Key = tuple[str, int]
"""A session's name, and the number of earlier sessions with this name."""
Make = Callable[[str, int], tuple[LiveSession, SessionLog]]


@dataclass(slots=True)
class Restored:
    """The unfinished sessions of a journal, and the number of sessions with each name."""

    sessions: dict[Key, tuple[LiveSession, SessionLog]] = field(default_factory=dict)
    samples: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    """The number of bytes that belong to finished sessions."""


def restore(path: Path, make: Make, templates: TemplateCache, done: Collection[Key]) -> Restored:
    """Return the unfinished sessions in the journal `path`. `make` returns an empty session and its
    log. `done` are the keys of the sessions in the episode file.

    Raise `UsageError` with the line number if a line cannot be read or contradicts earlier lines.
    """
    restored, builders, ended = Restored(), dict[Key, _Builder](), set(done)
    for number, line in read_lines(path):
        try:
            data = orjson.loads(line)
            key = (data["s"], data["k"])
            restored.samples[key[0]] = max(restored.samples[key[0]], key[1] + 1)
            if data["kind"] == "end":
                ended.add(key)
            if key in ended:
                restored.stale += len(line) + (builders.pop(key).log.size if key in builders else 0)
                continue
            if key not in builders:
                builders[key] = _Builder(*make(*key), templates)
            builders[key].add(data, len(line))
        except Exception as error:
            raise UsageError(
                f"{path}, line {number}, cannot be restored ({error!r}): repair the file, or move "
                f"it away (the unfinished sessions are then lost)"
            ) from error
    restored.sessions = {key: (builder.live, builder.log) for key, builder in builders.items()}
    return restored


class _Builder:
    """Rebuilds one session from its lines."""

    def __init__(self, live: LiveSession, log: SessionLog, templates: TemplateCache) -> None:
        self.live = live
        self.log = log
        self._templates = templates
        self._turns: dict[int, TurnNode] = {}
        self._urls: dict[str, str] = {}  # of the session's images, by their digests
        self._answers: dict[int, tuple[bytes, CompletionResult]] = {}
        """Maps a node's index to its answer and the key of its request."""
        self._texts: list[bytes] = []

    def add(self, data: dict[str, Any], size: int) -> None:
        """Add the content of one line of `size` bytes to the session."""
        self.log.size += size
        kind = data["kind"]
        if kind == "session":
            self.live.sampling_params = data["sampling_params"]
            self.live.created = data["created"]
            self.live.opening = data.get("opening")
        elif kind == "reward":
            self.live.reward, self.live.info = data["reward"], data["info"]
        elif kind == "chat":
            self._chat(data)
        elif kind == "text":
            self._text(data)
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _chat(self, data: dict[str, Any]) -> None:
        live, prompt, response = self.live, self._prompt(data), None
        if data["kept"] is not None:
            instructions, echo, answer = data["kept"]
            response = StoredResponse(
                data["id"], instructions, self._text_of(echo), answer.encode()
            )
        choices = [Choice(completion_of(choice), turn=_turn(choice)) for choice in data["choices"]]
        result = self._result(data, prompt.input_ids, choices)
        origin = Origin(data["object"], data["lineage"], response, data["ignored"])
        turns = live.add_chat(prompt, result, origin)
        nodes = [turn.node for turn in turns]
        self._turns |= {turn.node.index: turn for turn in turns}
        first = data["first"] + len(nodes)
        live.answers[prompt.digest] = max(live.answers[prompt.digest], first)
        self._keep(data, result, nodes, prompt.turn.node if prompt.turn is not None else None)

    def _text_of(self, value: str | int) -> bytes:
        """Return the text that `value` stands for. `value` is the text itself, or its number if
        `SessionLog` wrote the text in an earlier line.
        """
        if isinstance(value, int):
            return self._texts[value]
        self.log.texts[value.encode()] = len(self._texts)
        self._texts.append(value.encode())
        return self._texts[-1]

    def _prompt(self, data: dict[str, Any]) -> Prompt:
        parent, delta, dropped = self._parent(data), unpacked(data["delta"], IDS), data["dropped"]
        url = lambda value: self._text_of(value).decode()
        added = tuple(with_urls(message, url) for message in data["added"])
        for image in image_urls(added):
            data_of = b64decode(image.partition(",")[2])
            self._urls[sha256(data_of).hexdigest()] = image
        return Prompt(
            template=self._templates.get(data["switches"]),
            added=added,
            images=tuple(
                Image(position, count, digest, self._urls[digest])
                for position, count, digest in data.get("images", ())
            ),
            tools=ToolList.read(self._text_of(data["tools"])),
            digest=bytes.fromhex(data["digest"]),
            input_ids=np.concatenate([self.live.session.path_ids(parent), delta]),
            parent=parent,
            delta=delta,
            turn=None if data["turn"] is None else self._turns[data["turn"]],
            fork_reason=data["fork_reason"],
            continues=data["continues"],
            preserved=data["preserved"],
            unshown=data.get("unshown", False),
            dropped=None if dropped is None else unpacked(dropped, IDS),
            prefill=data["prefill"],
            prefill_ids=unpacked(data["prefill_ids"], IDS),
        )

    def _text(self, data: dict[str, Any]) -> None:
        parent, delta = self._parent(data), unpacked(data["delta"], IDS)
        prompt = TextPrompt(
            np.concatenate([self.live.session.path_ids(parent), delta]), parent, delta
        )
        choices = [Choice(completion_of(choice)) for choice in data["choices"]]
        result = self._result(data, prompt.input_ids, choices)
        nodes = self.live.add_text(prompt, result, data["fork_reason"])
        self._keep(data, result, nodes, parent)

    def _result(
        self, data: dict[str, Any], prompt_ids: IdArray, choices: list[Choice]
    ) -> CompletionResult:
        if data["sampling_params"] is not None:
            self.log.params = data["sampling_params"]
        assert self.log.params is not None
        return CompletionResult(
            id=data["id"],
            created=data["created"],
            model="",
            prompt_ids=prompt_ids,
            choices=choices,
            sampling_params=self.log.params,
            first=data["first"],
        )

    def _keep(
        self,
        data: dict[str, Any],
        result: CompletionResult,
        nodes: Sequence[Node],
        continued: Node | None,
    ) -> None:
        """Keep the answer `result` for a retry. Drop the one that has the node `continued`, because
        the client has it. Raise `ValueError` unless `nodes` are the nodes of the line `data`.
        """
        if continued is not None and continued.index in self._answers:
            key, answer = self._answers.pop(continued.index)
            with contextlib.suppress(ValueError):  # it was already dropped
                self.live.restored[key].remove(answer)
        indexes = [node.index for node in nodes]
        if indexes != data["nodes"]:
            raise ValueError(f"the restored nodes are {indexes}")
        key = bytes.fromhex(data["key"])
        self.live.restored.setdefault(key, []).append(result)
        self._answers |= dict.fromkeys(indexes, (key, result))

    def _parent(self, data: dict[str, Any]) -> Node | None:
        return None if data["parent"] is None else self.live.session.node(data["parent"])


def _turn(choice: dict[str, Any]) -> ParsedTurn:
    text, stop, stops, last_id = choice["sampled"]
    return ParsedTurn(
        SampledText(text, stop, tuple(stops), last_id), "", ParsedReply(""), choice["message"]
    )
