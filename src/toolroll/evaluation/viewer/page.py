"""Write the page: one self-contained HTML file.

Invariants:

- The page loads nothing else, except that a followed page asks its own server for episodes. A
  content security policy forbids it.
- All data of an episode is displayed as text. It is stored as compressed data, and the script
  creates only text nodes from it.
- Either the whole page is written, or nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from toolroll.evaluation.viewer.data import Pieces, conversation, row, sequences
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import read_lines
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.runtime.jsonable import json_bytes
from toolroll.rollout.types import Tool

_BLOCK = 1 << 18  # bytes of JSON: small enough to open fast, large enough to compress well
_MOST_TOKENS = 20_000_000  # a page of about 100 MB
_FOLDER = Path(__file__).parent / "html"
_SCRIPTS = (
    "elements blocks location order search plots table pane filters "
    "tokens expected messages episode keyboard follow main"
).split()
PiecesOf = Callable[[str], Pieces | None]
"""Returns the `Pieces` for an environment's tokens, or None to display ids."""


class ShownTokens(NamedTuple):
    """How a page shows tokens: those of the first `episodes` episodes, with the text from
    `pieces_of`. If `episodes` is None: until the page has `_MOST_TOKENS`.
    """

    pieces_of: PiecesOf
    episodes: int | None = None


NO_TOKENS = ShownTokens(lambda env: None, 0)


class ReadSoFar(NamedTuple):
    """How much of an episode file was read: its inode (`file`), the bytes (`position`), the
    episodes (`rows`), the lines that are not episodes (`bad`), and the `tokens` in the page.
    """

    file: int = 0
    position: int = 0
    rows: int = 0
    bad: int = 0
    tokens: int = 0


def write_page(
    out: Path,
    title: str,
    episodes: Iterable[Episode],
    *,
    tokens: ShownTokens,
    settings: dict[str, Any] | None = None,
    summary: Callable[[], Mapping[str, Any]] = dict,
) -> tuple[int, int]:
    """Write the page for `episodes` to `out`. Return the number of episodes, and of those whose
    tokens are in the page.

    `settings`: the content of `run.json`, by environment. `summary` is called after the last
    episode, and returns their reports (as in `summary.json`).
    """
    with _written_page(out) as file:
        data = PageData(file, tokens)
        for episode in episodes:
            data.add(episode)
        data.end({"title": title, "settings": [settings or {}], "summary": summary()})
    return len(data.rows), sum(row["hasTokens"] for row in data.rows)


@dataclass(frozen=True, slots=True)
class PageRun:
    """A run in a comparison's page. `settings`: the content of `run.json`, by environment.
    `base_samples`: the baseline's sample with which each (environment, task id, sample) is paired.
    """

    name: str
    episodes: Iterable[Episode]
    settings: Mapping[str, Any]
    base_samples: Mapping[tuple[str, str, int], int]


def write_side_by_side(
    out: Path, title: str, runs: Sequence[PageRun], texts: Sequence[str]
) -> None:
    """Write the page for `runs` (the baseline first) and the `texts` of their comparisons."""
    with _written_page(out) as file:
        data = PageData(file, NO_TOKENS)
        for number, run in enumerate(runs):
            for episode in run.episodes:
                base = run.base_samples.get((episode.env, episode.task_id, episode.sample))
                data.add(episode, run=number, base=base)
        names, settings = [run.name for run in runs], [run.settings for run in runs]
        data.end({"title": title, "runs": names, "settings": settings, "texts": texts})


def followed_page(title: str) -> bytes:
    """Return a page without episodes. It asks for them at `more`, with the fields of `ReadSoFar` in
    the query.
    """
    head, tail = _template("; connect-src 'self'")
    file = io.BytesIO()
    PageData(file, NO_TOKENS).end({"title": title, "follow": True})
    return head.encode() + file.getvalue() + tail.encode()


def episodes_after(path: Path, read: ReadSoFar, tokens: ShownTokens) -> dict[str, Any]:
    """Return the episodes in the episode file `path` that follow what was `read`: their `rows`, the
    HTML of their `data`, and the new `file`, `position`, `bad` and `tokens`.

    If `path` is another file now (a resumed run drops aborted episodes), or if the file is shorter
    than `read.position`, return all episodes. `first` in the result is the number of the first row.
    """
    with path.open("rb") as lines:
        now = os.fstat(lines.fileno())
        if read.file != now.st_ino or read.position > now.st_size:
            read = ReadSoFar()
        bad_lines: list[str] = []
        lines.seek(read.position)
        data = PageData(html := io.BytesIO(), tokens, first=read.rows, shown=read.tokens)
        for episode in read_lines(lines, on_bad_line=bad_lines.append):
            data.add(episode)
        data.flush()
        end = {"file": now.st_ino, "position": lines.tell(), "bad": read.bad + len(bad_lines)}
    end["tokens"] = data.shown
    return end | {"first": read.rows, "rows": data.rows, "data": html.getvalue().decode()}


@contextmanager
def _written_page(out: Path) -> Iterator[BinaryIO]:
    """Open the page `out`, to write its data (`PageData`)."""
    head, tail = _template()
    with written_whole(out) as file:
        file.write(head.encode())
        yield file
        file.write(tail.encode())


class PageData:
    """Writes the data of episodes to `file`. `rows` are their table rows. Conversations are written
    in blocks, and each list of tools once. `first`: the number of the first row. Blocks are
    numbered from there too. `shown`: the number of tokens in the page.
    """

    def __init__(
        self, file: BinaryIO, tokens: ShownTokens, *, first: int = 0, shown: int = 0
    ) -> None:
        self.shown = shown
        self.rows: list[dict[str, Any]] = []
        self._file = file
        self._tokens = tokens
        self._first = first
        self._tools: dict[bytes, int] = {}
        self._block = first
        self._waiting: list[bytes] = []

    def add(self, episode: Episode, *, run: int = 0, base: int | None = None) -> None:
        """Add an episode. `run` and `base`: see `data`."""
        if sum(map(len, self._waiting)) >= _BLOCK:
            self.flush()
        number = self._first + len(self.rows)
        most = self._tokens.episodes
        if has_tokens := self.shown < _MOST_TOKENS if most is None else number < most:
            self.shown += sum(map(len, episode.result.trajectories))
            shown_sequences = sequences(episode.result, self._tokens.pieces_of(episode.env))
            _write(self._file, f"tokens-{number}", json_bytes(shown_sequences))
        location = {"block": self._block, "place": len(self._waiting), "hasTokens": has_tokens}
        self.rows.append(row(episode) | {"run": run, "base": base} | location)
        tools = self._add_tools(episode.result.tools)
        self._waiting.append(json_bytes(conversation(episode, tools)))

    def flush(self) -> None:
        """Write the current block."""
        if self._waiting:
            _write(self._file, f"block-{self._block}", b"[" + b",".join(self._waiting) + b"]")
            self._block += 1
            self._waiting.clear()

    def end(self, index: dict[str, Any]) -> None:
        """Write the current block, and the block `index` with the rows."""
        self.flush()
        _write(self._file, "index", json_bytes(index | {"rows": self.rows}))

    def _add_tools(self, tools: list[Tool]) -> int:
        text = json_bytes(tools)
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if digest not in self._tools:
            self._tools[digest] = self._first + len(self._tools)
            _write(self._file, f"tools-{self._tools[digest]}", text)
        return self._tools[digest]


def _write(file: BinaryIO, name: str, block: bytes) -> None:
    """Write a data block in base64, which cannot contain markup."""
    packed = base64.b64encode(zlib.compress(block, 6))
    file.write(b'<script type="text/plain" id="' + name.encode() + b'">' + packed + b"</script>\n")


def page_style() -> str:
    """Return the style sheet of a page."""
    return (_FOLDER / "page.css").read_text(encoding="utf-8")


def _template(loads: str = "") -> tuple[str, str]:
    """Return the parts of the page before and after the data, including the style and the
    script. `loads`: what else the content security policy allows.
    """
    parts = [(_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '\n"use strict";\n' + "\n".join(parts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    page = page.replace("SCRIPT-HASH'", f"sha256-{digest}'{loads}")
    page = page.replace("/* style */", page_style())
    head, tail = page.split("<!-- data -->")
    return head, tail.replace("/* script */", script)
