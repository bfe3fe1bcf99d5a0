"""`restore`: rebuild the unfinished sessions from a journal.

Invariants: a session gets the same nodes with the same ids and logprobs, or an error is raised.
Lines of finished sessions have no effect, wherever they are. The answer to a request is kept for a
retry of this request, unless a later request continued the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.server.answers.result import StoredAnswer
from toolroll.rollout.server.conversation.conversation_tree import Prompt
from toolroll.rollout.server.conversation.stored_response import KeptResponse
from toolroll.rollout.server.conversation.template_cache import TemplateCache
from toolroll.rollout.server.conversation.turn import TurnNode
from toolroll.rollout.server.disk.journal import read_lines
from toolroll.rollout.server.disk.session_log import (
    IDS,
    SessionLog,
    completion_of,
    top_of,
    unpacked,
)
from toolroll.rollout.server.sessions.sessions import LiveSession
from toolroll.rollout.session.node import Node
from toolroll.rollout.template.delta import SampledText

Key = tuple[str, int]
Make = Callable[[str, int], tuple[LiveSession, SessionLog]]
_NO_REPLY = ParsedReply("")


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
    found, builders, ended = Restored(), dict[Key, _Builder](), set(done)
    for number, line in read_lines(path):
        try:
            data = orjson.loads(line)
            key = (data["s"], data["k"])
            found.samples[key[0]] = max(found.samples[key[0]], key[1] + 1)
            if data["kind"] == "end":
                ended.add(key)
            if key in ended:
                found.stale += len(line) + (builders.pop(key).log.size if key in builders else 0)
                continue
            if key not in builders:
                builders[key] = _Builder(*make(*key), templates)
            builders[key].add(data, len(line))
        except Exception as error:
            raise UsageError(
                f"{path}, line {number}, cannot be restored ({error!r}): repair the file, or move "
                f"it away (the unfinished sessions are then lost)"
            ) from error
    found.sessions = {key: (builder.live, builder.log) for key, builder in builders.items()}
    return found


class _Builder:
    """Rebuilds one session from its lines."""

    def __init__(self, live: LiveSession, log: SessionLog, templates: TemplateCache) -> None:
        self.live = live
        self.log = log
        self._templates = templates
        self._turns: dict[int, TurnNode] = {}
        self._requests: dict[int, bytes] = {}
        """Maps a node's index to the key of the request that sampled it."""
        self._texts: list[bytes] = []

    def add(self, data: dict[str, Any], size: int) -> None:
        """Add the content of one line of `size` bytes to the session."""
        self.log.size += size
        kind = data["kind"]
        if kind == "session":
            self.live.sampling_params = data["sampling_params"]
            self.live.created = data["created"]
        elif kind == "reward":
            self.live.reward, self.live.info = data["reward"], data["info"]
        elif kind == "chat":
            self._answered(data, self._chat(data))
        elif kind == "text":
            self._answered(data, self._text(data))
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _chat(self, data: dict[str, Any]) -> list[Node]:
        live, prompt = self.live, self._prompt(data)
        observed, nodes, kept = live.tree.observe(prompt), [], None
        if data["kept"] is not None:
            instructions, echo, answer = data["kept"]
            kept = KeptResponse(data["id"], instructions, self._text_of(echo), answer.encode())
        for choice in data["choices"]:
            node = self._sample(choice, data, observed)
            text, stop, stops, last_id = choice["sampled"]
            sampled = SampledText(text, stop, tuple(stops), last_id)
            reading = ParsedTurn(sampled, "", _NO_REPLY, choice["message"])
            self._turns[node.index] = live.tree.commit(prompt, node, reading)
            if kept is not None:
                live.responses.add(self._turns[node.index], kept)
            live.trace.append((node, data["object"]))
            if data["lineage"]:
                live.session.label(node, data["lineage"])
            nodes.append(node)
        if prompt.preserved:
            live.mismatches["preserved"] += 1
        first = data["first"] + len(nodes)
        live.answers[prompt.digest] = max(live.answers[prompt.digest], first)
        if prompt.turn is not None:  # the client continues this answer, so it has it
            self._forget(prompt.turn.node)
        return nodes

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
        turn = None if data["turn"] is None else self._turns[data["turn"]]
        tools = self._text_of(data["tools"])
        dropped = data["dropped"]
        return Prompt(
            self._templates.get(data["switches"]),
            tuple(data["added"]),
            tools,
            bytes.fromhex(data["digest"]),
            unpacked(data["delta"], IDS),
            self._parent(data),
            unpacked(data["delta"], IDS),
            turn,
            data["fork_reason"],
            data["continues"],
            data["preserved"],
            None if dropped is None else unpacked(dropped, IDS),
            data["prefill"],
            unpacked(data["prefill_ids"], IDS),
        )

    def _text(self, data: dict[str, Any]) -> list[Node]:
        live, delta = self.live, unpacked(data["delta"], IDS)
        observed = live.session.observe(delta, after=self._parent(data), reason=data["fork_reason"])
        nodes = []
        for choice in data["choices"]:
            node = self._sample(choice, data, observed)
            live.texts.append(node)
            live.trace.append((node, "text_completion"))
            nodes.append(node)
        parent = self._parent(data)
        if parent is not None:
            self._forget(parent)
        return nodes

    def _sample(self, choice: dict[str, Any], data: dict[str, Any], prompt: Node) -> Node:
        completion, session = completion_of(choice), self.live.session
        node = session.sample(completion, self._params(data), after=prompt)
        self.live.record.add(session.path_ids(prompt), completion)
        return node

    def _answered(self, data: dict[str, Any], nodes: list[Node]) -> None:
        """Raise `ValueError` unless `nodes` are the nodes of the line `data`. Keep the answer for a
        retry.
        """
        if [node.index for node in nodes] != data["nodes"]:
            raise ValueError(f"the restored nodes are {[node.index for node in nodes]}")
        stored = StoredAnswer(
            data["id"],
            data["created"],
            data["first"],
            tuple(nodes),
            self._params(data),
            tuple(map(top_of, data["choices"])),
        )
        key = bytes.fromhex(data["key"])
        self.live.restored.setdefault(key, []).append(stored)
        self._requests |= {node.index: key for node in nodes}

    def _forget(self, node: Node) -> None:
        """Drop the stored answer that contains `node` as a choice."""
        key = self._requests.get(node.index)
        if key is not None:
            stored = self.live.restored.get(key, [])
            stored[:] = [answer for answer in stored if node not in answer.nodes]

    def _parent(self, data: dict[str, Any]) -> Node | None:
        parent = data["parent"]
        if parent is None:
            return None
        return self.live.session.node(parent)

    def _params(self, data: dict[str, Any]) -> Any:
        if data["sampling_params"] is not None:
            self.log.params = data["sampling_params"]
        assert self.log.params is not None
        return self.log.params
