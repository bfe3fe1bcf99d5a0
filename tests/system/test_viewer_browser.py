"""The page of a run in Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright
from support.viewed import HOSTILE, viewed_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its page."""
    return viewed_run(tmp_path_factory.mktemp("run <b>"))


def browser_path() -> str | None:
    """Debian's Chromium, or the one that playwright has installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    with sync_playwright() as driver:
        return (
            driver.chromium.executable_path
            if Path(driver.chromium.executable_path).exists()
            else None
        )


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator[Page]:
    """The page, open; nothing but the file itself may have been asked for, and its script may
    not have failed.
    """
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
    assert tasks(page) == sorted(
        tasks(page), key=lambda name: {"t-2": 1, "t-3": 2, "t-10": 3}.get(name, 0)
    ), "as people count"
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
    assert (
        "".join(
            page.locator("#tokens [data-k]").evaluate_all("all => all.map(one => one.dataset.mask)")
        )
        == "000011100111"
    )
    assert page.locator("#tokens .turn").all_text_contents() == [
        "turn 1",
        "end of turn 1: stop",
        "turn 2",
        "end of turn 2: stop",
    ]
    page.click("#sequence-1")
    assert page.text_content("#detail .fork") == f"Forked: the template rewrote {HOSTILE}"
    assert page.locator("#tokens .turn").first.text_content() == "turn 1 · not trained: context"
    back = lambda k: page.locator(f"#tokens [data-k='{k}']").evaluate(
        "one => getComputedStyle(one).backgroundColor"
    )
    nothing = "rgba(0, 0, 0, 0)"
    assert back(2) == nothing != back(6) != back(10) != nothing, (
        "nothing, sampled and not trained, trained"
    )
    page.click("#color-logprob")
    assert back(2) == nothing
    alphas = [float(back(k).rpartition(",")[2].strip(" )")) for k in (10, 11, 12, 13)]
    assert alphas == sorted(alphas) and len(set(alphas)) == 4, "the less likely, the redder"
    page.click("#color-version")
    assert back(6) != back(10)
    assert page.locator(".legend span").all_text_contents() == ["v0", "v1"]
    page.hover("#tokens [data-k='11']")
    told = page.text_content("#token") or ""
    for words in (
        "id 111",
        "place 11",
        "loss_mask 1",
        "logprob -0.5 (p = 0.607)",
        "weight_version v1",
        "turn 2: 4 tokens in 1.5 s",
    ):
        assert words in told
    picture = page.screenshot(path=tmp_path / "page.png")
    assert len(picture) > 20_000
