"""`toolroll view`: what is in the page of a run (`tests/system/test_viewer_browser.py` opens
it).
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.viewed import HOSTILE, viewed_run
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app
from toolroll.rollout.cli.view import view
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.viewer.pieces import Pieces


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its page."""
    return viewed_run(tmp_path_factory.mktemp("run <b>"))


def blocks(page: Path) -> dict[str, Any]:
    """The page's data, unpacked as its script unpacks it."""
    found = re.findall(
        r'<script type="text/plain" id="(\w+)">([A-Za-z0-9+/=]*)</script>', page.read_text()
    )
    return {name: json.loads(zlib.decompress(base64.b64decode(packed))) for name, packed in found}


def test_everything_is_in_the_page_and_none_of_it_as_markup(run: Path) -> None:
    text = (run / "view.html").read_text()
    assert "owned" not in text
    assert text.count("</script>") == text.count("<script") == 6
    assert not re.search(
        r"""(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", text
    ), "nothing is loaded"
    data = blocks(run / "view.html")
    assert sorted(data) == ["e0", "e1", "e2", "e3", "index"]
    rows = data["index"]["rows"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, None]
    assert (
        rows[1]["tools"],
        rows[1]["forks"],
        rows[1]["invalid"],
        rows[1]["tokens"],
        rows[1]["trained"],
    ) == (
        ["jump", "look"],
        1,
        1,
        26,
        10,
    )
    assert data["index"]["summary"]["pond"]["do_nothing_floor"]["passed"] == 1
    assert data["e1"]["messages"][2]["content"] == HOSTILE
    sequence = data["e1"]["sequences"][1]
    assert sequence["mask"] == "00000000001111"
    assert sequence["logprobs"][5:8] == [None, -0.25, -0.5]
    assert [turn["excluded"] for turn in sequence["turns"]] == ["context", None]
    assert len(sequence["texts"]) == len(sequence["ids"]) == 14


def test_pieces_are_the_text(tokenizer: Any) -> None:
    for text in ("plain text", "Zürich 東京 👩‍👩‍👧 é<|end|>\n\n x", "👩", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = Pieces(tokenizer).of(ids)
        assert len(found) == len(ids)
        assert "".join(found) == tokenizer.decode(ids)
    broken = tokenizer.encode("👩", add_special_tokens=False)[:2]
    assert Pieces(tokenizer).of(broken)[-1].strip("\ufffd") == "", (
        "what is no character is shown as such"
    )


def test_fewer_tokens_make_a_smaller_page(run: Path, tmp_path: Path) -> None:
    page, count, said = view(run, out=tmp_path / "small.html", tokenizer=None, tokens=1)
    data = blocks(page)
    assert (count, data["e0"]["sequences"] is None, data["e1"]["sequences"]) == (4, False, None)
    assert "the tokens of the first 1 episodes are in the page" in said[0]


def test_without_the_tokenizer_ids_are_shown(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    settings = copy / "run.json"
    settings.write_text(
        settings.read_text().replace('"embedded"', json.dumps(str(tmp_path / "nowhere")))
    )
    page, _, said = view(copy, out=None, tokenizer=None, tokens=9)
    assert "tokens are shown by their ids" in said[0]
    assert blocks(page)["e0"]["sequences"][0]["texts"][:2] == ["100 ", "101 "]
    assert view(copy, out=None, tokenizer="embedded", tokens=9)[2] == []
    with pytest.raises(UsageError, match="no tokenizer can be loaded"):
        view(copy, out=None, tokenizer=str(tmp_path / "nowhere"), tokens=9)


def test_the_command(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["view", str(run), "--out", str(tmp_path / "page.html")], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0
    assert "page.html: 4 episodes, 0.0 MB; open it in a browser" in done.stdout
    with pytest.raises(UsageError, match=r"holds no episodes\.jsonl"):
        view(tmp_path, out=None, tokenizer=None, tokens=1)
    with pytest.raises(UsageError, match="there is no folder"):
        view(run, out=tmp_path / "no" / "page.html", tokenizer=None, tokens=1)
