"""Write the page: one self-contained HTML file.

Invariants:

- The page loads nothing else. A content security policy forbids it.
- All data of an episode is displayed as text. It is stored as compressed data, and the script
  creates only text nodes from it.
- Either the whole page is written, or nothing.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from toolroll.rollout.runs.viewer.data import Pieces, conversation, row, sequences
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Episode, Tool

_BLOCK = 1 << 18  # bytes of JSON: small enough to open fast, large enough to compress well
_SCRIPTS = (
    "elements blocks location order search plots table filters "
    "tokens messages episode keyboard main"
).split()


def write_page(
    out: Path,
    title: str,
    episodes: Iterable[Episode],
    *,
    pieces_of: Callable[[str], Pieces | None],
    settings: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    tokens_of: int = 500,
) -> int:
    """Write the page for `episodes` to `out`. Return the number of episodes.

    Args:
        pieces_of: A function that returns the `Pieces` for an environment's tokens, or None to
            display ids.
        settings: The content of `run.json`, by environment.
        summary: The content of `summary.json`, by environment.
        tokens_of: The page includes the tokens of this many episodes, starting with the first.
    """
    head, tail = _template()
    rows: list[dict[str, Any]] = []
    with written_whole(out) as file:
        file.write(head.encode())
        conversations = _Conversations(file)
        for episode in episodes:
            block, place = conversations.add(episode)
            tokens = len(rows) < tokens_of
            if tokens:
                shown_sequences = sequences(episode.result, pieces_of(episode.env))
                _write(file, f"tokens-{len(rows)}", json_bytes(shown_sequences))
            rows.append(row(episode) | {"block": block, "place": place, "hasTokens": tokens})
        conversations.flush()
        index = {"title": title, "rows": rows, "settings": settings or {}, "summary": summary or {}}
        _write(file, "index", json_bytes(index))
        file.write(tail.encode())
    return len(rows)


class _Conversations:
    """Writes conversations in blocks. Each list of tools is written once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tools: dict[bytes, int] = {}
        self._block = 0
        self._waiting: list[bytes] = []

    def add(self, episode: Episode) -> tuple[int, int]:
        """Add a conversation. Return its block and its position in the block."""
        if sum(map(len, self._waiting)) >= _BLOCK:
            self.flush()
        data = conversation(episode.result, self._add_tools(episode.result.tools))
        self._waiting.append(json_bytes(data))
        return self._block, len(self._waiting) - 1

    def flush(self) -> None:
        """Write the current block."""
        _write(self._file, f"block-{self._block}", b"[" + b",".join(self._waiting) + b"]")
        self._block += 1
        self._waiting.clear()

    def _add_tools(self, tools: list[Tool]) -> int:
        data = json_bytes(tools)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._tools:
            self._tools[digest] = len(self._tools)
            _write(self._file, f"tools-{self._tools[digest]}", data)
        return self._tools[digest]


def _write(file: BinaryIO, name: str, data: bytes) -> None:
    """Write a data block in base64, which cannot contain markup."""
    packed = base64.b64encode(zlib.compress(data, 6))
    file.write(b'<script type="text/plain" id="' + name.encode() + b'">' + packed + b"</script>\n")


def _template() -> tuple[str, str]:
    """Return the parts of the page before and after the data, including the style and the
    script.
    """
    folder = Path(__file__).parent / "html"
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '\n"use strict";\n' + "\n".join(parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (folder / "page.html").read_text(encoding="utf-8")
    page = page.replace("SCRIPT-HASH", f"sha256-{digest}")
    page = page.replace("/* style */", (folder / "page.css").read_text(encoding="utf-8"))
    head, tail = page.split("<!-- data -->")
    return head, tail.replace("/* script */", script)
