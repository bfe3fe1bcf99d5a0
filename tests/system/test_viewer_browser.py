"""The page of a run in Chromium."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.browsed import background, browser_path, headings, open_task, opened, tasks, title
from support.http import app_server, in_thread
from support.results import episode
from support.viewed import HOSTILE, called, viewed_run

from toolroll.cli.follow import follow_app
from toolroll.evaluation.report import report
from toolroll.evaluation.viewer import PageRun, ShownTokens, write_page, write_side_by_side
from toolroll.rollout.episode import Episode
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.runs.summary import Summary

pytestmark = pytest.mark.browser
VIEWS = ("conversation", "tokens", "tools", "data")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its page."""
    return viewed_run(tmp_path_factory.mktemp("run <b>"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium."""
    path = browser_path()
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, run: Path) -> Iterator[Page]:
    """The page of the run, open."""
    with opened(browser, run / "view.html") as page:
        yield page


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 40 tasks with 3 samples each; of task n, n % 4 samples pass."""
    episodes = []
    for n, k in product(range(40), range(3)):
        text = f"The password is xyzzy{n}." if k == 1 else "No."
        messages = [*called("look"), {"role": "user", "content": text}]
        episodes.append(episode(f"t/{n}?#é", k, 1.0 if k < n % 4 else 0.0, messages=messages))
    return written(tmp_path_factory.mktemp("samples"), *episodes)


def written(folder: Path, *episodes: Episode) -> Path:
    """A page of `episodes`."""
    write_page(folder / "page.html", "page", episodes, tokens=ShownTokens(lambda env: None))
    return folder / "page.html"


def test_the_table_is_sorted_and_filtered_below_a_summary(page: Page) -> None:
    hostile = f"t-{HOSTILE}"
    assert tasks(page) == ["t-2", "t-10", hostile, "t-3"]
    page.click("#head [data-key=task]")
    assert tasks(page) == sorted(
        tasks(page), key=lambda name: {"t-2": 1, "t-3": 2, "t-10": 3}.get(name, 0)
    ), "as people count"
    page.click("#head [data-key=reward]")
    assert tasks(page) == ["t-10", hostile, "t-2", "t-3"]
    page.click("#head [data-key=reward]")
    assert tasks(page) == ["t-2", hostile, "t-10", "t-3"], "what has no reward is last either way"
    assert page.get_attribute("[role=columnheader][aria-sort]", "aria-sort") == "descending"
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
        assert page.text_content("#count") == f"{len(left)} of 4 episodes"
        page.select_option(f"#filter-{name}", "")
    page.fill("#filter-q", "T-1")
    expect(page.locator("#count")).to_have_text("1 of 4 episodes")
    assert tasks(page) == ["t-10"]
    page.fill("#filter-q", "nowhere")
    page.click("#clear")
    assert len(tasks(page)) == 4
    assert page.locator("#plots figcaption").all_text_contents()[0] == "reward, mean 0.5"
    facts = page.locator("#cards .card span").all_text_contents()
    assert facts[:3] == ["embedded", "temperature 0.5, min_tokens 3", "2031-03-31"]
    assert facts[-1] == "50 tokens, 38 if shared prefixes count once"


def test_an_episode_is_a_conversation_and_nothing_in_it_is_run(page: Page) -> None:
    open_task(page, "t-10")
    messages = page.locator(".message")
    assert messages.count() == 4
    assert HOSTILE in (messages.nth(2).text_content() or "")
    assert messages.nth(1).locator(".called b").all_text_contents() == ["look", "jump"]
    assert "I shall." in (messages.nth(1).text_content() or "")
    assert "Invalid calls1 (invalid_json 1)" in (page.text_content("#detail .facts") or "")
    page.click("#view-data")
    assert "document.title" in (page.text_content("#detail") or "")
    open_task(page, "t-3")
    assert page.text_content("#detail .error") == f"E: {HOSTILE}"
    page.click("#view-tokens")
    assert "This episode has no tokens." in (page.text_content("#detail") or "")
    page.fill("#filter-q", "<script>")
    expect(page.locator("#count")).to_have_text("4 of 4 episodes")
    assert page.title().startswith("toolroll: run <b>"), "neither script nor handler has run"
    assert page.locator("img").count() == page.locator("#title b").count() == 0


def test_tokens_have_their_mask_logprob_version_turns_and_forks(page: Page, tmp_path: Path) -> None:
    open_task(page, "t-10")
    page.click("#view-tokens")
    masks = "all => all.map(one => one.dataset.mask)"
    assert "".join(page.locator(".tokens [data-k]").evaluate_all(masks)) == "000011100111"
    turns = ["turn 1", "end of turn 1: stop", "turn 2", "end of turn 2: stop"]
    assert page.locator(".tokens .turn").all_text_contents() == turns
    page.click(".sequence-1")
    assert page.text_content("#detail .fork") == f"Forked: the template rewrote {HOSTILE}"
    assert page.locator(".tokens .turn").first.text_content() == "turn 1 · not trained: context"
    nothing = "rgba(0, 0, 0, 0)"
    colors = [background(page, k) for k in (2, 6, 10)]
    assert colors[0] == nothing and len(set(colors)) == 3, "not sampled, not trained, trained"
    page.click(".color-logprob")
    assert background(page, 2) == nothing
    alphas = [float(background(page, k).rpartition(",")[2].strip(" )")) for k in (10, 11, 12, 13)]
    assert alphas == sorted(alphas) and len(set(alphas)) == 4, "the less likely, the redder"
    page.click(".color-version")
    assert background(page, 6) != background(page, 10)
    assert page.locator(".legend span").all_text_contents() == ["v0", "v1"]
    page.hover(".tokens [data-k='11']")
    for words in (
        "id 111",
        "position 11",
        "loss_mask 1",
        "logprob -0.5 (p = 0.607)",
        "weight_version v1",
        "turn 2: 4 tokens in 1.5 s",
    ):
        assert words in (page.text_content(".token") or "")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert "id 112" in (page.text_content(".token") or "")
    picture = page.screenshot(path=tmp_path / "page.png")
    assert len(picture) > 20_000


def test_a_link_opens_its_episode_and_back_undoes(browser: Browser, samples: Path) -> None:
    task = "t/6?#é"
    link = "#pond/t/6%3F%23%C3%A9#2?reward=zero&sort=-task&view=data&with=pond/t/5?%23é%230"
    with opened(browser, samples, link) as page:
        assert headings(page) == [title("t/5?#é"), title(task, 2)]
        assert page.get_attribute("#view-data", "aria-selected") == "true"
        assert page.input_value("#filter-reward") == "zero"
        numbers = [int(name[2:-3]) for name in tasks(page)]
        assert 6 in numbers and numbers == sorted(numbers, reverse=True)
        page.click("#compare")
        expect(page.locator("#detail h2")).to_have_count(1)
        page.click("#view-tools")
        page.select_option("#filter-reward", "pass")
        address = page.url
        page.go_back()
        expect(page.locator("#filter-reward")).to_have_value("zero")
        page.go_back()
        expect(page.locator("#view-data")).to_have_attribute("aria-selected", "true")
        page.go_back()
        expect(page.locator("#detail h2")).to_have_count(2)
        page.evaluate("link => { location.hash = link; }", address.partition("#")[2])
        expect(page.locator("#filter-reward")).to_have_value("pass")
        assert headings(page) == [title(task, 2)]
    with opened(browser, samples, "#pond/gone#0") as page:
        assert page.text_content("#notice") == "This page has no episode pond/gone#0"


def test_tasks_are_grouped_with_their_pass_rates(browser: Browser, samples: Path) -> None:
    with opened(browser, samples) as page:
        page.keyboard.press("g")
        page.click("#head [data-key=reward]")
        page.click("#head [data-key=reward]")
        groups = page.locator("#rows .group")
        assert groups.first.locator(".c-rate").text_content() == "3/3 passed · 100%"
        assert page.text_content("#count") == "120 of 120 episodes in 40 tasks"
        assert groups.first.get_attribute("aria-expanded") == "false"
        groups.first.click()
        assert tasks(page) == ["t/3?#é"] * 3, "the open episode's group is out of sight"
        page.focus("#grid")
        page.keyboard.press("ArrowLeft")
        assert tasks(page) == []
        assert "group=task" in page.url
        page.select_option("#filter-reward", "zero")
        rates = page.locator("#rows .group .c-rate").all_text_contents()
        assert "2/3 passed, 1 shown · 67%" in rates, "what a filter hides counts"


def test_search_finds_messages_calls_and_results(browser: Browser, samples: Path) -> None:
    with opened(browser, samples) as page:
        page.keyboard.press("/")
        page.keyboard.type("XYZZY17")
        expect(page.locator("#count")).to_have_text("1 of 120 episodes")
        page.locator("#rows .line").click()
        expect(page.locator("#detail mark")).to_have_text(["xyzzy17"])
        page.fill("#filter-q", '"at": "<b>"')
        expect(page.locator("#count")).to_have_text("120 of 120 episodes")


def test_two_episodes_side_by_side_and_copied(browser: Browser, samples: Path) -> None:
    with opened(browser, samples, "#pond/t/6%3F%23%C3%A9#0") as page:
        page.keyboard.press("c")
        expect(page.locator("#detail h2")).to_have_text([title("t/6?#é", n) for n in (0, 1)])
        boxes = [one.bounding_box() for one in page.locator(".panel").all()]
        assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"]
        page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
        page.click("#copy-json")
        expect(page.locator("#notice")).to_have_text("JSON copied")
        copied = json.loads(page.evaluate("copied"))
        assert [(one["task"], one["sample"]) for one in copied] == [("t/6?#é", 0), ("t/6?#é", 1)]
        assert copied[1]["messages"][-1]["content"] == "The password is xyzzy6."
        assert copied[0]["sequences"][0]["ids"][:2] == [100, 101]


def test_on_a_phone_table_and_episode_take_turns(browser: Browser, run: Path) -> None:
    size = {"width": 390, "height": 844}
    with opened(browser, run / "view.html", viewport=size, has_touch=True) as page:
        wide = "document.documentElement.scrollWidth > innerWidth"
        assert not page.locator("#detail").is_visible()
        assert not page.evaluate(wide)
        page.click("#about > summary")
        page.click("#more > summary")
        page.select_option("#filter-flag", "forks")
        page.select_option("#sort", "-reward")
        assert not page.evaluate(wide)
        open_task(page, "t-10")
        assert not page.locator("#list").is_visible()
        for view in VIEWS:
            page.click(f"#view-{view}")
            assert not page.evaluate(wide), view
            panel = "one => one.scrollWidth > one.clientWidth"
            assert not page.locator("#detail").evaluate(panel), view
        page.click("#back")
        assert page.locator("#list").is_visible()
        page.go_back()
        expect(page.locator("#detail")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_axe_finds_nothing(browser: Browser, run: Path, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    episode = "#pond/t-10#0"
    size = {"width": width, "height": 900}
    for link in ("#?group=task", *(f"{episode}?view={view}" for view in VIEWS), "#?q=nowhere"):
        with opened(
            browser, run / "view.html", link, viewport=size, color_scheme=scheme, bypass_csp=True
        ) as page:
            found = axe.run(page)
            assert found.response["passes"]
            assert [(one["id"], one["nodes"]) for one in found.response["violations"]] == [], link


def test_invalid_calls_tools_and_the_reason_are_shown(browser: Browser, tmp_path: Path) -> None:
    messages = called("look", "jump")
    messages[1]["tool_calls"][1]["function"]["arguments"] = '{"at": '
    metrics = {"invalid_calls": 1.0, "invalid_calls/invalid_json": 1.0}
    bad_call = {"message": 1, "call": 1, "status": "invalid_json"}
    info = {"failure": "turn 1: no jump", "bad_calls": [bad_call]}
    failed = episode("t-1", 0, 0.0, messages=messages, metrics=metrics, info=info)
    failed.result.tools.append(
        {"function": {"name": "look", "description": "Look at it.", "parameters": {"x": 1}}}
    )
    with opened(browser, written(tmp_path, failed, episode("t-2"))) as page:
        assert page.text_content(".verdict") == "reward 0turn 1: no jump"
        assert page.locator("#rows .c-reason").all_text_contents() == ["turn 1: no jump", ""]
        assert page.locator(".call .chip").all_text_contents() == ["invalid: invalid_json"]
        assert "jump" in (page.text_content(".bad-call") or "")
        page.keyboard.press("3")
        assert page.text_content(".tool summary") == "look called 1×"
        page.click(".tool summary")
        assert '"x": 1' in page.inner_text(".tool")


def test_a_regraded_run_and_its_episodes_say_so(browser: Browser, tmp_path: Path) -> None:
    regraded = episode("t-1", 0, 0.0, info={"regrade": {"reward": 0.75, "difference": ""}})
    path, summary = tmp_path / "page.html", Summary("pond")
    summary.add(regraded)
    part = report(summary, provenance=[{"regraded": "out/base"}])
    tokens = ShownTokens(lambda env: None)
    write_page(path, "page", [regraded], tokens=tokens, summary=lambda: {"pond": part})
    with opened(browser, path) as page:
        facts = page.locator("#cards .card span").all_text_contents()
        assert facts[0] == "regraded from out/base"
        assert "Recorded reward0.75" in (page.text_content("#detail .facts") or "")


def test_a_reason_has_a_column_if_a_shown_episode_has_one(browser: Browser, tmp_path: Path) -> None:
    """It is not cut if there is room beside the names of the tasks."""
    info = {"failure": "the member was not told what is due"}
    failed = [episode(f"t-{n}", 0, 0.0, info=info) for n in range(3)]
    rows = [*failed, *(episode(f"t-{n}", 1, 1.0, metrics={"turns": n}) for n in range(3))]
    path = written(tmp_path, *rows)
    with opened(browser, path, viewport={"width": 1400, "height": 900}) as page:
        names = page.locator("#head button")
        assert "Reason" in names.all_text_contents()
        cell = page.locator("#rows .c-reason").first
        assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth"), "not cut"
        page.select_option("#filter-reward", "pass")
        expect(names.filter(has_text="Reason")).to_have_count(0)
        expect(page.locator("#left-out")).not_to_contain_text("reason")
        page.select_option("#filter-reward", "")
        expect(names.filter(has_text="Reason")).to_have_count(1)


def test_the_keyboard_reaches_all_and_the_focus_is_kept(browser: Browser, samples: Path) -> None:
    with opened(browser, samples) as page:
        focused = "document.activeElement.id"
        page.focus("#by-reward")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "by-reward"
        assert page.get_attribute("[aria-sort]", "aria-sort") == "descending"
        page.keyboard.press("Escape")
        assert page.evaluate(focused) == "grid"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        active = page.get_attribute("#grid", "aria-activedescendant")
        assert page.get_attribute(f"#{active}", "aria-selected") == "true"
        page.keyboard.press("Enter")
        expect(page.locator("#detail")).to_be_focused()
        page.focus("#view-conversation")
        page.keyboard.press("ArrowRight")
        assert page.evaluate(focused) == "view-tokens"
        page.focus("#compare")
        page.keyboard.press("Enter")
        expect(page.locator("#detail h2")).to_have_count(2)
        expect(page.locator("#compare")).to_be_focused()
        page.keyboard.press("?")
        assert page.locator("#keys").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#keys").is_visible()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two runs of 5,000 episodes. Of task n, one in ten passes only in one run."""
    file = tmp_path_factory.mktemp("compared") / "page.html"
    one = episode("t-0", messages=called("look"))
    other = episode("t-0", 0, 0.0, messages=[*called("look")[:1], *called("jump")[1:]])

    def run(passes: int) -> Iterator[Any]:
        for n in range(5000):
            yield replace(other if n % 10 == passes else one, task_id=f"task-number-{n:04}")

    pairs = {("pond", f"task-number-{n:04}", 0): 0 for n in range(5000)}
    runs = [PageRun("out/base", run(3), {}, {}), PageRun("out/new", run(7), {}, pairs)]
    lines = f"pond: baseline {'a/' * 50}, candidate b: better\nThe reason.\nThe power."
    write_side_by_side(file, "compared", runs, [lines + "\n\ntable" + "\n1 | 2" * 30])
    return file


def test_two_runs_are_side_by_side_with_flips_first(browser: Browser, compared: Path) -> None:
    with opened(browser, compared, viewport={"width": 1280, "height": 800}) as page:
        assert page.locator("*").count() < 1200, "only the rows in sight are in the document"
        assert page.get_attribute("#grid", "aria-rowcount") == "5001"
        card, lines = page.locator("pre.card"), page.locator("pre.card span")
        box, above = card.bounding_box(), lines.bounding_box()
        assert box is not None and above is not None
        assert above["y"] + above["height"] <= box["y"] + box["height"] < 400, "all is in sight"
        ends = page.locator("#plots svg").all_text_contents()
        assert ends == ["01", "12", "2"], "equal values have one"
        assert lines.inner_text().endswith("The power.") and "1 | 2" in card.inner_text()
        assert page.locator("#rows .c-change").first.text_content() == "-1"
        assert headings(page) == [title("task-number-0007")] * 2
        assert page.locator(".panel .chip").all_text_contents() == ["reward 1", "reward 0"]
        assert page.locator(".differs + .message b").all_text_contents() == ["look", "jump"]
        page.focus("#grid")
        for key, number in (("End", "4999"), ("k", "4998"), ("Home", "0007"), ("j", "0017")):
            page.keyboard.press(key)
            expect(page.locator("#detail h2")).to_have_text([title(f"task-number-{number}")] * 2)
            assert 10 < page.locator("#rows .line").count() < 60
        page.select_option("#filter-change", "passed")
        assert page.text_content("#count") == "500 of 5,000 episodes"
        for run, chip in (("out/base", "reward 1"), ("out/new", "reward 0")):
            page.get_by_role("link", name=run).click()
            expect(page.locator(".panel .chip")).to_have_text([chip])
            assert page.text_content(".run a") == run
            page.keyboard.press("c")
            expect(page.locator("#detail h2")).to_have_text([title("task-number-0017")] * 2)


@pytest.mark.parametrize("width", [820, 1280])
def test_the_table_fits_its_widened_pane(browser: Browser, compared: Path, width: int) -> None:
    fits = "grid.scrollWidth <= list.clientWidth"
    with opened(browser, compared, viewport={"width": width, "height": 900}) as page:
        names = page.locator("#head button")
        before = names.all_text_contents()
        assert before[0] == "Task" and "Baseline" in before and "Reward" in before
        assert page.evaluate(fits)
        name = page.locator("#rows .c-task").first
        assert name.evaluate("cell => cell.scrollWidth <= cell.clientWidth"), "not cut"
        page.focus("#split")
        for _ in range(9):
            page.keyboard.press("ArrowRight")
        expect(names).not_to_have_count(len(before))
        wider = names.all_text_contents()
        assert set(before) < set(wider)
        assert page.evaluate(fits)
        box: Any = page.locator("#split").bounding_box()
        page.mouse.move(box["x"] + 3, 400)
        page.mouse.down()
        page.mouse.move(0, 400)
        page.mouse.up()
        assert page.get_attribute("#split", "aria-valuenow") == "25"
        assert page.evaluate(fits)
        page.select_option("#sort", "-seconds", force=True)
        expect(page.locator("#head [aria-sort]")).to_have_text("Seconds ↓")


def test_expected_calls_are_beside_those_that_were_made(browser: Browser, tmp_path: Path) -> None:
    made = called("jump", "jump", "look")
    made[1]["tool_calls"][1]["function"]["arguments"] = '{"b": [{"d": 1, "c": 2}], "a": 1.0}'
    expected = {"sit": {}, "jump": {"a": 1, "b": [{"c": 2, "d": 1}]}, "look": {"at": HOSTILE}}
    calls: list[Any] = [{"name": name, "arguments": given} for name, given in expected.items()]
    played = replace(episode("t-1", messages=made), expected_calls=calls)
    with opened(browser, written(tmp_path, played, episode("t-2"))) as page:
        words = "Expected calls: 1 of 3 made; other calls: 2"
        assert page.text_content(".expected summary") == words
        page.click(".expected summary")
        rows = page.locator(".expected tr").evaluate_all(
            "all => all.slice(1).map(row => [row.className, row.children[0].textContent])"
        )
        assert [kind for kind, _ in rows] == ["missing", "extra", "same", "other"]
        assert rows[0][1] == "sit" and HOSTILE[9:20] in rows[3][1]
        page.keyboard.press("j")
        page.get_by_role("heading", name=title("t-2"), exact=True).wait_for()
        assert page.locator(".expected").count() == 0


def test_new_episodes_appear_and_the_place_is_kept(browser: Browser, tmp_path: Path) -> None:
    lines = [to_line(episode(f"t-{n}", 0, n % 2)) for n in range(120)]
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"")
    wrong: list[str] = []
    app = follow_app(tmp_path, ShownTokens(lambda env: None, 999))
    with in_thread(app_server(app)) as url:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        expect(page.locator("#live")).to_have_text("Following the run")
        with file.open("ab") as out:
            out.write(b"".join(lines[:80]) + lines[80][:99])
        expect(page.locator("#count")).to_have_text("80 of 80 episodes")
        page.click("#by-reward")
        page.click("#by-reward")
        page.focus("#grid")
        for _ in range(2):
            page.keyboard.press("PageDown")
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        top = "document.querySelector('#rows .open').getBoundingClientRect().top"
        where = f"{drawn}.then(() => {top})"
        before, heading, address = page.evaluate(where), headings(page), page.url
        with file.open("ab") as out:
            out.write(lines[80][99:] + b"not an episode\n" + b"".join(lines[81:]))
        expect(page.locator("#count")).to_have_text("120 of 120 episodes")
        expect(page.locator("#live")).to_have_text("Following the run, without 1 unreadable line")
        assert (page.evaluate(where), headings(page)) == (before, heading)
        assert page.evaluate("document.activeElement.id") == "grid"
        assert page.url.partition("#")[0] == address.partition("#")[0]
        page.fill("#filter-q", "t-119")
        expect(page.locator("#count")).to_have_text("1 of 120 episodes")
        (tmp_path / "new").write_bytes(b"".join(lines[100:]))
        (tmp_path / "new").replace(file)
        expect(page.locator("#count")).to_have_text("1 of 20 episodes")
        page.click("#rows .line")
        page.get_by_role("heading", name=title("t-119"), exact=True).wait_for()
        assert wrong == []
        file.unlink()
        expect(page.locator("#live")).to_have_text("Not following: toolroll view answers 500")
    expect(page.locator("#live")).to_have_text("Not following: no connection to toolroll view")
    page.close()
