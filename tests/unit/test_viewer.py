"""`toolroll view`: what is in the page, and the page in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright
from support.results import episode, trajectory
from typer.testing import CliRunner

from toolroll.rollout.cli.app import app
from toolroll.rollout.cli.view import view
from toolroll.rollout.errors import UsageError
from toolroll.rollout.report import report, write_summary
from toolroll.rollout.run_folder import RunFolder
from toolroll.rollout.types import Episode, StopReason
from toolroll.rollout.viewer.pieces import Pieces

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> \u2028 <!-- & é"


def called(*names: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": '{"at": "<b>"}'}} for at, name in enumerate(names)
    ]
    return [
        {"role": "user", "content": "Please look."},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "I shall."},
        {"role": "tool", "name": HOSTILE, "tool_call_id": "c0", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE},
    ]


def episodes() -> list[Episode]:
    forked = trajectory(14, [(6, 9), (10, 14)], fork_reason=f"the template rewrote {HOSTILE}")
    forked = replace(forked, turns=(replace(forked.turns[0], excluded="context"), forked.turns[1]))
    forked.loss_mask[6:9] = 0
    numbers = {"turns": 3.0, "tool_calls": 2.0, "invalid_calls": 1.0, "invalid_calls/invalid_json": 1.0, "seconds": 2.5}
    return [
        episode("t-2", 0, 1.0, messages=called("look")),
        episode("t-10", 0, 0.0, messages=called("look", "jump"), trajectories=[trajectory(), forked], metrics=numbers),
        episode(f"t-{HOSTILE}", 0, 0.5),
        episode(
            "t-3", 0, reason=StopReason.ENGINE_ERROR, trajectories=[], messages=[], info={"error": {"type": "E", "message": HOSTILE}}
        ),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its page."""
    path = tmp_path_factory.mktemp("run <b>")
    with RunFolder(path, "pond", {"model": "embedded", "agent": "tool-calling", "note": HOSTILE}) as folder:
        for found in episodes():
            folder.append(found)
        write_summary(path, {"pond": report(folder.summary, floor=folder.summary)})
    assert view(path, out=None, tokenizer=None, tokens=500) == (path / "view.html", 4, [])
    return path


def blocks(page: Path) -> dict[str, Any]:
    """The page's data, unpacked as its script unpacks it."""
    found = re.findall(r'<script type="text/plain" id="(\w+)">([A-Za-z0-9+/=]*)</script>', page.read_text())
    return {name: json.loads(zlib.decompress(base64.b64decode(packed))) for name, packed in found}


# --- the file ----------------------------------------------------------------------------------------------------------------


def test_everything_is_in_the_page_and_none_of_it_as_markup(run: Path) -> None:
    text = (run / "view.html").read_text()
    assert "owned" not in text
    assert text.count("</script>") == text.count("<script") == 6
    assert not re.search(r"""(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", text), "nothing is loaded"
    data = blocks(run / "view.html")
    assert sorted(data) == ["e0", "e1", "e2", "e3", "index"]
    rows = data["index"]["rows"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, None]
    assert (rows[1]["tools"], rows[1]["forks"], rows[1]["invalid"], rows[1]["tokens"], rows[1]["trained"]) == (
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
    assert Pieces(tokenizer).of(broken)[-1].strip("\ufffd") == "", "what is no character is shown as such"


def test_fewer_tokens_make_a_smaller_page(run: Path, tmp_path: Path) -> None:
    page, count, said = view(run, out=tmp_path / "small.html", tokenizer=None, tokens=1)
    data = blocks(page)
    assert (count, data["e0"]["sequences"] is None, data["e1"]["sequences"]) == (4, False, None)
    assert "the tokens of the first 1 episodes are in the page" in said[0]


def test_without_the_tokenizer_ids_are_shown(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    settings = copy / "run.json"
    settings.write_text(settings.read_text().replace('"embedded"', json.dumps(str(tmp_path / "nowhere"))))
    page, _, said = view(copy, out=None, tokenizer=None, tokens=9)
    assert "tokens are shown by their ids" in said[0]
    assert blocks(page)["e0"]["sequences"][0]["texts"][:2] == ["100 ", "101 "]
    assert view(copy, out=None, tokenizer="embedded", tokens=9)[2] == []
    with pytest.raises(UsageError, match="no tokenizer can be loaded"):
        view(copy, out=None, tokenizer=str(tmp_path / "nowhere"), tokens=9)


def test_the_command(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(run), "--out", str(tmp_path / "page.html")], env={"COLUMNS": "300"})
    assert done.exit_code == 0
    assert "page.html: 4 episodes, 0.0 MB; open it in a browser" in done.stdout
    with pytest.raises(UsageError, match=r"holds no episodes\.jsonl"):
        view(tmp_path, out=None, tokenizer=None, tokens=1)
    with pytest.raises(UsageError, match="there is no folder"):
        view(run, out=tmp_path / "no" / "page.html", tokenizer=None, tokens=1)


# --- in the browser ------------------------------------------------------------------------------------------------------------


def browser_path() -> str | None:
    """Debian's Chromium, or the one that playwright has installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    with sync_playwright() as driver:
        return driver.chromium.executable_path if Path(driver.chromium.executable_path).exists() else None


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator[Page]:
    """The page, open; nothing but the file itself may have been asked for, and its script may not have failed."""
    path = browser_path()
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    asked: list[str] = []
    wrong: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 950})
        page.set_default_timeout(20_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.goto((run / "view.html").as_uri())
        page.wait_for_selector("body[data-ready]")
        yield page
        browser.close()
    assert asked == [(run / "view.html").as_uri()]
    assert wrong == []


def tasks(page: Page) -> list[str]:
    return page.locator("#table tbody tr td:first-child").all_text_contents()


def open_task(page: Page, task: str) -> None:
    page.locator("#table tbody tr", has=page.get_by_text(task, exact=True)).click()
    page.get_by_role("heading", name=f"pond · {task} · sample 0").wait_for()


@pytest.mark.browser
def test_the_table_is_sorted_and_filtered(page: Page) -> None:
    hostile = f"t-{HOSTILE}"
    assert tasks(page) == ["t-2", "t-10", hostile, "t-3"]
    page.click("th[data-key=task]")
    assert tasks(page) == sorted(tasks(page), key=lambda name: {"t-2": 1, "t-3": 2, "t-10": 3}.get(name, 0)), "as people count"
    page.click("th[data-key=reward]")
    assert tasks(page) == ["t-10", hostile, "t-2", "t-3"]
    page.click("th[data-key=reward]")
    assert tasks(page) == ["t-2", hostile, "t-10", "t-3"], "what has no reward is last either way"
    assert page.get_attribute("th[data-key=reward]", "aria-sort") == "descending"
    for name, value, left in (
        ("reward", "pass", ["t-2"]),
        ("reward", "part", [hostile]),
        ("reward", "none", ["t-3"]),
        ("status", "aborted", ["t-3"]),
        ("stop", "done", ["t-2", hostile, "t-10"]),
        ("tool", "jump", ["t-10"]),
        ("flag", "forks", ["t-10"]),
        ("flag", "invalid", ["t-10"]),
    ):
        page.select_option(f"#filter-{name}", value)
        assert tasks(page) == left, (name, value)
        assert page.text_content("#count") == f"{len(left)} of 4"
        page.select_option(f"#filter-{name}", "")
    page.fill("#filter-text", "T-1")
    assert tasks(page) == ["t-10"]
    page.fill("#filter-text", "")
    assert page.locator("#plots figcaption").all_text_contents()[0] == "reward, mean 0.5"


@pytest.mark.browser
def test_an_episode_is_shown_as_a_conversation_and_nothing_in_it_is_run(page: Page) -> None:
    open_task(page, "t-10")
    page.click("#view-conversation")
    messages = page.locator(".message")
    assert messages.count() == 4
    assert HOSTILE in (messages.nth(2).text_content() or "")
    assert messages.nth(1).locator(".call b").all_text_contents() == ["look", "jump"]
    assert "I shall." in (messages.nth(1).text_content() or "")
    assert "invalid calls 1 (invalid_json 1)" in (page.text_content("#detail .facts") or "")
    page.click("#view-data")
    assert "document.title" in (page.text_content("#detail") or "")
    open_task(page, "t-3")
    assert page.text_content("#detail p.bad") == f"E: {HOSTILE}"
    page.click("#view-tokens")
    assert "This episode has no tokens." in (page.text_content("#detail") or "")
    assert page.title().startswith("toolroll: run <b>"), "neither script nor handler has run"
    assert page.locator("img").count() == page.locator("#title b").count() == 0


@pytest.mark.browser
def test_tokens_have_their_mask_logprob_version_turns_and_forks(page: Page, tmp_path: Path) -> None:
    open_task(page, "t-10")
    page.click("#view-tokens")
    assert "".join(page.locator("#tokens [data-k]").evaluate_all("all => all.map(one => one.dataset.mask)")) == "000011100111"
    assert page.locator("#tokens .turn").all_text_contents() == ["turn 1", "end of turn 1: stop", "turn 2", "end of turn 2: stop"]
    page.click("#sequence-1")
    assert page.text_content("#detail .fork") == f"Forked: the template rewrote {HOSTILE}"
    assert page.locator("#tokens .turn").first.text_content() == "turn 1 · not trained: context"
    back = lambda k: page.locator(f"#tokens [data-k='{k}']").evaluate("one => getComputedStyle(one).backgroundColor")
    nothing = "rgba(0, 0, 0, 0)"
    assert back(2) == nothing != back(6) != back(10) != nothing, "nothing, sampled and not trained, trained"
    page.click("#color-logprob")
    assert back(2) == nothing
    alphas = [float(back(k).rpartition(",")[2].strip(" )")) for k in (10, 11, 12, 13)]
    assert alphas == sorted(alphas) and len(set(alphas)) == 4, "the less likely, the redder"
    page.click("#color-version")
    assert back(6) != back(10)
    assert page.locator(".legend span").all_text_contents() == ["v0", "v1"]
    page.hover("#tokens [data-k='11']")
    told = page.text_content("#token") or ""
    for words in ("id 111", "place 11", "loss_mask 1", "logprob -0.5 (p = 0.607)", "weight_version v1", "turn 2: 4 tokens in 1.5 s"):
        assert words in told
    picture = page.screenshot(path=tmp_path / "page.png")
    assert len(picture) > 20_000
