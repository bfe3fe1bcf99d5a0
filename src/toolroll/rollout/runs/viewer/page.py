"""Writes the page: one HTML file with everything in it.

Invariants: nothing is loaded from anywhere (a content security policy forbids it); whatever an
episode holds is text: it travels as compressed data, and the page's script puts it in place as text
nodes only; a page is written whole or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from toolroll.rollout.runs.viewer.data import detail, row
from toolroll.rollout.runs.viewer.pieces import Pieces
from toolroll.rollout.runtime.disk import written_whole
from toolroll.rollout.types import Episode

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_MARK = "<!-- data -->"


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
    """Write the page of `episodes` into `out`; how many there are.

    `pieces_of(env)` gives the tokens' texts, or None. `settings` and `summary`: what `run.json` and
    `summary.json` say. `tokens_of`: of so many episodes, from the first on, the tokens are in the
    page too.
    """
    head, tail = _template()
    rows: list[dict[str, Any]] = []
    with written_whole(out) as file:
        file.write(head.encode())
        for episode in episodes:
            tokens = len(rows) < tokens_of
            _block(
                file,
                f"e{len(rows)}",
                detail(episode, pieces_of(episode.env) if tokens else None, tokens=tokens),
            )
            rows.append(row(episode))
        _block(
            file,
            "index",
            {"title": title, "rows": rows, "settings": settings or {}, "summary": summary or {}},
        )
        file.write(tail.encode())
    return len(rows)


def _block(file: BinaryIO, name: str, data: Any) -> None:
    """A data block: base64 of deflated JSON, in which no markup can be."""
    packed = base64.b64encode(zlib.compress(orjson.dumps(data, option=_OPTIONS, default=repr), 6))
    file.write(b'<script type="text/plain" id="' + name.encode() + b'">' + packed + b"</script>\n")


def _template() -> tuple[str, str]:
    """What stands before and behind the data, with the script's hash in the content security
    policy.
    """
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(page)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    head, tail = page.replace("SCRIPT-HASH", f"sha256-{digest}").split(_MARK)
    return head, tail
