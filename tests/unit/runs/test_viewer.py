"""`toolroll view`: what is in the page (`tests/system/test_viewer_browser.py` opens it)."""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from support.commands import toolroll
from support.listed_environment import TOOL
from support.results import episode
from support.viewed import HOSTILE, viewed_run

from toolroll import StopReason, UsageError
from toolroll.cli.follow import follow, follow_app
from toolroll.cli.view import page_title, view
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.evaluation.reward_reason import reward_reason
from toolroll.evaluation.viewer import ShownTokens, write_page
from toolroll.evaluation.viewer import page as page_module
from toolroll.evaluation.viewer.data import Pieces, row, sequences
from toolroll.evaluation.viewer.page import ReadSoFar, episodes_after
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.runs.run_directory import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its page."""
    return viewed_run(tmp_path_factory.mktemp("run <b>"))


def blocks(page: Path) -> dict[str, Any]:
    """Return the page's data, unpacked as its script unpacks it."""
    found = re.findall(
        r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', page.read_text()
    )
    return {name: json.loads(zlib.decompress(base64.b64decode(packed))) for name, packed in found}


def test_everything_is_in_the_page_and_none_of_it_as_markup(run: Path) -> None:
    text = (run / "view.html").read_text()
    assert "owned" not in text
    assert text.count("</script>") == text.count("<script") == 8
    assert not re.search(
        r"""(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", text
    ), "nothing is loaded"
    data = blocks(run / "view.html")
    parts = {"block-0", "index", *(f"tokens-{number}" for number in range(4)), "tools-0"}
    assert data.keys() == parts
    rows = data["index"]["rows"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, None]
    shown = [rows[1][name] for name in ("called", "forks", "invalid", "tokens", "trained")]
    assert shown == [["jump", "look"], 1, 1, 26, 10]
    assert data["index"]["summary"]["pond"]["do_nothing"]["passed"] == 1
    assert data["block-0"][1]["messages"][2]["content"] == HOSTILE
    assert [(row["block"], row["place"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert rows[3]["reason"] == f"E: {HOSTILE}".replace(" \u2028 ", " ")
    sequence = data["tokens-1"][1]
    assert sequence["mask"] == "00000000001111"
    assert sequence["logprobs"][5:8] == [None, -0.25, -0.5]
    assert [turn["excluded"] for turn in sequence["turns"]] == ["context", None]
    assert len(sequence["texts"]) == len(sequence["ids"]) == 14


def test_the_title_names_the_models_and_the_date(tmp_path: Path) -> None:
    for env, model, day in (("pond", "a", 30), ("desk", "b", 31), ("hills", "b", 29)):
        facts = {"date": f"2031-03-{day}T08:00:00+00:00"}
        with RunDirectory(tmp_path / "run", env, {"model": model}, provenance=facts):
            pass
    assert page_title(tmp_path / "run") == "toolroll: run, a, b, 2031-03-31"


def test_what_counts_as_trained_is_what_the_samples_hold() -> None:
    played = [episode("t-0"), episode("t-1", reason=StopReason.ENGINE_ERROR)]
    shown = [row(one)["trained"] for one in played]
    exported = [sum(sum(sample["loss_mask"]) for sample in sample_rows([one])) for one in played]
    masks = ["".join(part["mask"] for part in sequences(one.result, None)) for one in played]
    assert shown == exported == [mask.count("1") for mask in masks] == [6, 0]


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


def test_without_the_tokenizer_ids_are_shown(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    settings, nowhere = copy / "run.json", str(tmp_path / "nowhere")
    settings.write_text(settings.read_text().replace('"embedded"', json.dumps(nowhere)))
    page, _, said, _ = view(copy, out=None, tokenizer=None, tokens=9)
    assert "tokens are shown as ids" in said[0]
    assert blocks(page)["tokens-0"][0]["texts"][:2] == ["100 ", "101 "]
    assert view(copy, out=None, tokenizer="embedded", tokens=9)[2] == []
    with pytest.raises(UsageError, match="no tokenizer can be loaded"):
        view(copy, out=None, tokenizer=nowhere, tokens=9)


def test_the_command_and_a_page_with_fewer_tokens(run: Path, tmp_path: Path) -> None:
    done = toolroll("view", run, "--out", tmp_path / "page.html")
    assert done.exit_code == 0
    assert "page.html: 4 episodes, 0.1 MB; open it in a browser" in done.stdout
    with pytest.raises(UsageError, match=r"holds no episodes\.jsonl"):
        view(tmp_path, out=None, tokenizer=None, tokens=1)
    page, count, said, _ = view(run, out=tmp_path / "small.html", tokenizer=None, tokens=1)
    data = blocks(page)
    assert count == 4
    assert [name for name in sorted(data) if name.startswith("tokens-")] == ["tokens-0"]
    assert [row["hasTokens"] for row in data["index"]["rows"]] == [True, False, False, False]
    assert "the tokens of the first 1 episodes are in the page" in said[0]


def test_the_reason_for_a_reward() -> None:
    info = {"r_outputs": 0.0, "outputs": {"$12": False}, "gt_data_hash": "af01"}
    tau_bench = {"reward": 0.0, "info": info, "actions": [{"name": "book"}]}
    assert reward_reason({"failure": "turn 1:\n no call"}) == "turn 1: no call"
    assert reward_reason({"reward_info": tau_bench}) == "r_outputs 0, $12 no"
    assert reward_reason({"failure": "x", "error": {"type": "E", "message": "m"}}) == "E: m"
    assert reward_reason({"entry": "t-1"}) == ""
    assert len(reward_reason({"reason": "long " * 99})) == 300


def test_a_page_has_tokens_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    many = [episode(f"t-{n}") for n in range(502)]
    each = sum(map(len, many[0].result.trajectories))
    plain = ShownTokens(lambda env: None)
    assert write_page(file, "many", many, tokens=plain) == (502, 502)
    monkeypatch.setattr(page_module, "_MOST_TOKENS", 3 * each)
    assert write_page(file, "many", many, tokens=plain) == (502, 3)
    assert write_page(file, "many", many, tokens=plain._replace(episodes=4)) == (502, 4)
    lines = tmp_path / "episodes.jsonl"
    lines.write_bytes(b"".join(map(to_line, many[:2])))
    first = episodes_after(lines, ReadSoFar(), plain)
    assert first["tokens"] == 2 * each
    with lines.open("ab") as out:
        out.write(b"".join(map(to_line, many[2:5])))
    read = ReadSoFar(first["file"], first["position"], 2, tokens=first["tokens"])
    more = episodes_after(lines, read, plain)
    assert [row["hasTokens"] for row in more["rows"]] == [True, False, False]


def test_a_list_of_tools_is_there_once_and_blocks_are_bounded(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 100_000}]
    many = [episode(f"t-{n}", messages=long) for n in range(7)]
    for one in many[1:]:
        one.result.tools.append(TOOL)
    write_page(tmp_path / "page.html", "many", many, tokens=ShownTokens(lambda env: None, 0))
    data = blocks(tmp_path / "page.html")
    assert data["tools-0"] == [] and data["tools-1"] == [TOOL] and "tools-2" not in data
    assert [len(data[f"block-{n}"]) for n in range(3)] == [3, 3, 1]
    rows = data["index"]["rows"]
    assert [(row["block"], row["place"]) for row in rows][2:5] == [(0, 2), (1, 0), (1, 1)]
    assert data["block-1"][0]["tools"] == 1


def test_a_comparison_pairs_the_samples_that_it_compares(tmp_path: Path) -> None:
    for name, sample in (("base", 4), ("new", 2)):
        with RunDirectory(tmp_path / name, "pond", {"seed": 0}) as folder:
            for n in range(6):
                failed = name == "new" and n == 3
                reason = StopReason.ENGINE_ERROR if failed else StopReason.DONE
                folder.append(replace(episode(f"t-{n}", sample, reason=reason), seed=n))
    page = tmp_path / "page.html"
    arguments = ["compare", str(tmp_path / "base"), str(tmp_path / "new"), "--page", str(page)]
    done = toolroll(*arguments, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)
    assert done.stderr.endswith("page.html: 0.1 MB; open it in a browser\n")
    index = blocks(page)["index"]
    pairs = [(row["task"], row["run"], row["base"]) for row in index["rows"]]
    assert pairs[:6] == [(f"t-{n}", 0, None) for n in range(6)]
    assert pairs[6:] == [(f"t-{n}", 1, None if n == 3 else 4) for n in range(6)]
    assert index["runs"] == arguments[1:3]
    assert index["texts"][0].startswith("pond: ")


def test_a_run_that_goes_on_is_read_on(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    lines = [to_line(episode(f"t-{n}")) for n in range(4)]
    file.write_bytes(lines[0] + lines[1][:40])

    def tasks(last: dict[str, Any], rows: int) -> tuple[dict[str, Any], int, list[str]]:
        read = ReadSoFar(last.get("file", 0), last.get("position", 0), rows, last.get("bad", 0))
        more = episodes_after(file, read, ShownTokens(lambda env: None, 2))
        return more, more["first"], [row["task"] for row in more["rows"]]

    first, start, names = tasks({}, 0)
    assert (start, names) == (0, ["t-0"]), "not the line that is being written"
    with file.open("ab") as out:
        out.write(lines[1][40:] + lines[2])
    second, start, names = tasks(first, 1)
    assert (start, names) == (1, ["t-1", "t-2"])
    assert re.findall('id="(.*?)"', second["data"]) == ["tokens-1", "tools-1", "block-1"]
    assert tasks(second, 3)[1:] == (3, [])
    assert tasks({}, 0)[1:] == (0, ["t-0", "t-1", "t-2"]), "another browser"
    with file.open("ab") as out:
        out.write(b"not an episode\n" + lines[3])
    third, start, names = tasks(second, 3)
    assert (start, names, third["bad"]) == (3, ["t-3"], 1)
    assert tasks(third, 4)[0]["bad"] == 1 == tasks({}, 0)[0]["bad"]
    file.write_bytes(lines[0])
    cut, *read = tasks(third, 4)
    assert (cut["bad"], *read) == (0, 0, ["t-0"]), "a file that was cut"
    (tmp_path / "new").write_bytes(b"".join(lines))
    (tmp_path / "new").replace(file)
    assert tasks(second, 3)[1:] == (0, ["t-0", "t-1", "t-2", "t-3"]), "another file"


async def test_the_pages_of_others_cannot_read_a_followed_run(run: Path) -> None:
    async with TestClient(TestServer(follow_app(run, ShownTokens(lambda env: None, 1)))) as client:
        with pytest.raises(UsageError, match=rf"--port {client.port}: .*in use"):
            await follow(run, client.port or 0, tokenizer=None, tokens=0, say=lambda line: None)
        page = await client.get("/")
        assert page.status == 200
        assert "owned" not in await page.text()
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            for path in ("/", "/more"):
                assert (await client.get(path, headers=headers)).status == 403
        assert (await client.get("/more?rows=x")).status == 400
        more = await (await client.get("/more")).json()
    assert [row["reward"] for row in more["rows"]] == [1.0, 0.0, 0.5, None]
    assert "owned" not in more["data"]


async def test_a_run_that_has_not_started_is_waited_for(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    heard = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    following = asyncio.create_task(follow(tmp_path, 0, tokenizer=None, tokens=0, say=say))
    await heard.wait()
    assert "holds no run yet" in said.pop()
    heard.clear()
    for name in ("run.json", "episodes.jsonl"):
        shutil.copy(run / name, tmp_path / name)
    await heard.wait()
    while "follows" not in said[-1]:  # after what is said of the tokenizers
        await asyncio.sleep(0)
    async with ClientSession() as session, session.get(said[-1].split()[0]) as answer:
        assert answer.status == 200
    os.kill(os.getpid(), signal.SIGTERM)
    await following
