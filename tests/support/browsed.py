"""The page of a run in Chromium: open it, and look at it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright


def browser_path() -> str | None:
    """Debian's Chromium, or the one that playwright has installed."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    with sync_playwright() as driver:
        path = driver.chromium.executable_path
        return path if Path(path).exists() else None


@contextmanager
def opened(browser: Browser, file: Path, link: str = "", **options: Any) -> Iterator[Page]:
    """Open the page. Nothing but the file itself may be requested, and its script may not fail."""
    asked: list[str] = []
    wrong: list[str] = []
    page = browser.new_page(**{"viewport": {"width": 1500, "height": 950}, **options})
    page.set_default_timeout(20_000)
    page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.goto(file.as_uri() + link)
    page.wait_for_selector("body[data-ready]")
    yield page
    page.close()
    assert asked == [file.as_uri()]
    assert wrong == []


def tasks(page: Page) -> list[str]:
    return page.locator("#rows .c-task").all_text_contents()


def title(task: str, sample: int = 0) -> str:
    return f"pond / {task} #{sample}"


def open_task(page: Page, task: str) -> None:
    page.locator("#rows .line", has=page.get_by_text(task, exact=True)).click()
    page.get_by_role("heading", name=title(task), exact=True).wait_for()


def headings(page: Page) -> list[str]:
    return page.locator("#detail h2").all_text_contents()


def background(page: Page, k: int) -> str:
    found = page.locator(f".tokens [data-k='{k}']")
    return str(found.evaluate("one => getComputedStyle(one).backgroundColor"))
