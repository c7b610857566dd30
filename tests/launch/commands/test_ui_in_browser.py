"""The pages in a real browser: nothing on the console, no foreign request, readable contrast, live, and by keyboard."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from headless_browser import ACCESS, CONTRAST, Browser, lacks_browser, running_browser
from msgspec.structs import replace
from planning_factory import plan_of
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import attempt_record

from shardwise.launch.commands.ui.server import UiServer
from shardwise.launch.rundir.lock import locked
from shardwise.launch.show.recorded_run import recorded_runs
from shardwise.launch.show.run_page import comparison_page, run_page
from shardwise.trainer.planning.explain.comparison import comparison_page as machines_page
from shardwise.trainer.planning.explain.plan_page import plan_page
from shardwise.trainer.planning.page.content import Page
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.spec.report import Ending, Fault

LONG = "a-run-with-a-name-that-has-no-place-to-break-" * 4
PAGES = {
    "runs": "/", "run": "/run?name=good&smooth=0.9", "failed": f"/run?name={LONG}",
    "compare": f"/compare?run=good&run={LONG}", "plan": "/plan?model=qwen2.5-0.5b&method=lora&card=RTX-4060-8GB",
    "refused": "/run?name=none",
}  # fmt: skip
MODES = {"light": (1280, False), "dark-phone": (390, True), "phone": (390, False), "dark": (1280, True)}
OPENED = [("run", "light"), ("plan", "light"), *((page, "dark-phone") for page in PAGES if page != "runs")]
REST = [(page, mode) for page in PAGES for mode in MODES if (page, mode) not in OPENED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    plan = tiny_plan()
    write_run(folder / "good", plan=plan)
    failed = attempt_record(1, step=12, ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY)
    report = report_for(
        plan, ending=Ending.FAILED, error=f"rank 0: {LONG}", history=(failed, failed), incidents=(LONG,)
    )
    write_run(folder / LONG, plan=plan, report=report)
    write_run(folder / "going", plan=plan, has_report=False, rows=step_rows(range(1, 6)))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[UiServer]:
    with UiServer(folder, 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def browser(server: UiServer) -> Iterator[Browser]:
    """A browser that has opened the printed address, and so has the cookie."""
    obstacle = lacks_browser()
    if obstacle is not None:
        (pytest.fail if os.environ.get("SHARDWISE_CI") == "1" else pytest.skip)(obstacle)
    with running_browser() as started:
        refused = started.open(f"{server.address}/run?name=good", width=1280, script="document.body.innerText")
        assert "with its token" in refused.value and "step" not in refused.value
        address = f"{server.address}/run?name=good&token={server.token}"
        entered = started.open(address, width=1280, until="document.querySelector('main')", script="location.href")
        assert entered.value == f"{server.address}/run?name=good"
        yield started


@pytest.mark.parametrize(("page", "mode"), [*OPENED, *(pytest.param(*each, marks=pytest.mark.long) for each in REST)])
def test_pages_are_quiet_readable_and_fit_in_light_and_dark(browser: Browser, server: UiServer, page: str, mode: str):
    width, is_dark = MODES[mode]
    opened = browser.open(
        server.address + PAGES[page],
        width=width,
        is_dark=is_dark,
        script=f"(async () => ({{...{CONTRAST}, faults: await {ACCESS}}}))()",
    )
    assert opened.value["faults"] == []
    assert [each for each in opened.messages if not (page == "refused" and "404" in each)] == []
    assert {urlsplit(url).netloc for url in opened.requests} == {urlsplit(server.address).netloc}
    assert opened.scroll_width == width, "the body scrolls sideways"
    assert opened.value["found"] == [] and opened.value["count"] >= 4
    assert opened.background == ("rgb(11, 15, 20)" if is_dark else "rgb(244, 246, 248)")


def run_pages(folder: Path) -> list[Page]:
    plan = tiny_plan(notes=(LONG,))
    failed = attempt_record(1, step=12, ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY)
    report = report_for(plan, history=(failed, attempt_record(2, step=40)), incidents=(LONG,), attempts=2)
    write_run(folder / "whole", plan=plan, report=report, rows=step_rows(data_s=1.0, wait_s=0.1, checkpoint_s=0.1))
    write_run(folder / "<script>alert(1)<script>", rows=())
    runs = recorded_runs(sorted(folder.iterdir()))
    return [*map(run_page, runs), comparison_page(runs)]


def plan_pages(_: Path) -> list[Page]:
    plan = plan_of("8b", "4xA100-SXM4-80GB", price=2.5)
    return [plan_page(replace(plan, notes=(LONG,))), machines_page([("here", plan), ("there", plan)])]


@pytest.mark.parametrize("pages_of", [run_pages, plan_pages], ids=["report", "plan"])
def test_pages_in_files_open_without_a_message_or_a_request_and_run_nothing(browser: Browser, tmp_path: Path, pages_of):
    (tmp_path / "runs").mkdir()
    page, html = tmp_path / "page.html", pages_html(pages_of(tmp_path / "runs"), title="page")
    page.write_text(html)
    for width, is_dark in ((390, True), (1280, False)):
        opened = browser.open(page, width=width, is_dark=is_dark, script=ACCESS)
        assert (opened.messages, opened.requests) == ([], [])
        assert opened.value == []
        assert opened.scroll_width == width, "the body scrolls sideways"
        assert opened.background == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")
    page.write_text(html.replace("<body>", "<body><script>console.log(1)</script><img src='x.png'>"))
    messages = "".join(browser.open(page, width=390).messages)
    assert "Content Security Policy" in messages and "x.png" in messages


def test_a_live_page_shows_new_steps_without_being_loaded_again(
    browser: Browser, server: UiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shardwise.launch.commands.ui.pages.LIVE_S", 0.3)
    page = f"{server.address}/run?name=going"
    before = browser.open(page, width=1280, script="document.querySelector('.live').innerText")
    assert "step 5 of 40" in before.value
    until = "(window.same ??= 1, document.querySelector('.live').innerText.includes('step 7 of 40'))"
    line = "".join(json.dumps(row) + "\n" for row in step_rows(range(6, 8)))

    def write() -> None:
        with (folder / "going" / "metrics.jsonl").open("a") as stream:
            stream.write(line)

    timer = threading.Timer(0.2, write)
    timer.start()
    script = "[window.same, document.title, performance.getEntriesByType('navigation').length]"
    after = browser.open(page, width=1280, until=until, script=script)
    timer.join()
    assert after.value == [1, "17% going", 1] and after.messages == []


def test_figures_of_charts_are_read_by_keyboard_and_pointer(browser: Browser, server: UiServer):
    script = """(() => {
      const plot = document.querySelector("figure.plot");
      const read = () => document.querySelector(".reading")?.innerText ?? "";
      const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      plot.focus();
      const seen = [];
      for (const key of ["End", "ArrowLeft", "Escape"]) { press(key); seen.push(read()); }
      const box = plot.querySelectorAll(".chart > svg")[1].getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left, clientY: box.top + 20, bubbles: true}));
      const boxes = [...document.querySelectorAll(".reading")].map((each) => each.getBoundingClientRect());
      return [...seen, read(), boxes.filter((each) => each.left >= 0 && each.right <= innerWidth).length];
    })()"""
    opened = browser.open(server.address + "/run?name=good", width=390, script=script)
    last, one_before, closed, first, num_read = opened.value
    assert "step 40" in last and "4.2" in last and "step 39" in one_before and closed == "" and "step 1" in first
    assert "held-out" in last and "held-out" not in one_before, "a series is read at its own points alone"
    assert num_read >= 3 and opened.messages == [], "every chart over the steps is read at the same place"


def test_the_explorer_plans_what_its_form_has_at_once(browser: Browser, server: UiServer):
    until = """(() => {
      const form = document.forms[0];
      if (!window.began) {
        window.began = true;
        form.elements.method.value = "qlora";
        form.elements.method.dispatchEvent(new Event("input", {bubbles: true}));
      }
      return document.querySelector(".command pre").innerText.includes("--method qlora");
    })()"""
    script = "[location.search, document.querySelector('.verdict').innerText, document.title]"
    opened = browser.open(server.address + PAGES["plan"], width=1280, until=until, script=script)
    search, verdict, title = opened.value
    assert "method=qlora" in search and "qlora on 1 x RTX-4060" in verdict and title.startswith("qwen2.5-0.5b")
    assert opened.messages == []


def test_no_cell_of_a_table_covers_another_where_nothing_fits(browser: Browser, server: UiServer):
    script = """[...document.querySelectorAll("main tr")].flatMap((row) => {
      const boxes = [...row.cells].map((cell) => [cell.getBoundingClientRect(), cell.innerText]);
      return boxes.slice(1).filter(([box], number) => box.left < boxes[number][0].right - 1).map(([, text]) => text);
    })"""
    address = f"{server.address}/plan?model=llama-3.1-70b&method=full&card=RTX-4060-8GB"
    opened = browser.open(address, width=1280, until="document.querySelectorAll('main tr').length > 4", script=script)
    assert opened.value == [] and opened.messages == []


def test_the_list_is_filtered_and_two_runs_are_compared(browser: Browser, server: UiServer):
    script = """(() => {
      const box = document.getElementById("filter"), button = document.getElementById("compare-button");
      const before = button.disabled;
      box.value = "FAILED";
      box.dispatchEvent(new Event("input", {bubbles: true}));
      const rows = [...document.querySelectorAll("table.runs tbody tr")];
      for (const each of document.querySelectorAll("table.runs input")) each.click();
      return [before, rows.filter((row) => !row.hidden).length, button.disabled, button.innerText,
              new URLSearchParams(new FormData(button.form)).getAll("run").length];
    })()"""
    opened = browser.open(server.address, width=1280, script=script)
    assert opened.value == [True, 1, False, "Compare 3 runs", 3] and opened.messages == []


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[UiServer]:
    """A server of a hundred runs of eleven learning rates, whose pages may act; the browser has its cookie."""
    folder, plan = tmp_path_factory.mktemp("many"), tiny_plan()
    for number in range(100):
        job = replace(plan.job, train=replace(plan.job.train, lr=1e-3 * (1 + number % 11)))
        rows = step_rows(range(1, 3), loss=5 - number / 100)
        name = f"{'RUN' if number == 50 else 'run'}-{number:03}"
        write_run(folder / name, plan=replace(plan, job=job), rows=rows, has_report=number > 0)
    with UiServer(folder, 0) as server, locked(folder / "run-000"):
        server.allow_actions()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        browser.open(f"{server.address}/?token={server.token}", width=1280, until="document.querySelector('main')")
        yield server
        server.shutdown()


def test_a_hundred_runs_are_sorted_by_column_and_picked_setting_on_a_dark_phone(browser: Browser, acting: UiServer):
    until = """(() => {
      if (!window.began) {
        window.began = true;
        document.querySelector("input[name=column][value='train.lr']").click();
      }
      return document.querySelector("td.setting[data-name='train.lr']");
    })()"""
    script = """(() => {
      const rows = () => [...document.querySelectorAll("table.runs tbody tr")];
      const title = [...document.querySelectorAll("[data-sort]")].find((each) => each.textContent === "train.lr");
      title.click();
      const rates = rows().map((row) => Number(row.querySelector(".setting").dataset.by));
      title.click();
      const highest = Number(rows()[0].querySelector(".setting").dataset.by);
      const names = () => rows().map((row) => row.cells[1].textContent);
      const press = (column) => document.querySelector(`[data-sort="${column}"]`).click();
      press(1); const up = names();
      press(1); const down = names();
      press(4); const losses = rows().map((row) => row.cells[4].dataset.by).filter(Boolean).map(Number);
      const sorted = [...document.querySelectorAll("th[aria-sort]")].map((each) => each.getAttribute("aria-sort"));
      const sticky = getComputedStyle(document.getElementById("compare")).position;
      return [rows().length, rates, highest, location.search, began, [up, down, losses, sorted, sticky]];
    })()"""
    both = f"Promise.all([{script}, {ACCESS}, {CONTRAST}.found])"
    opened = browser.open(acting.address, width=390, is_dark=True, until=until, script=both)
    (count, rates, first, search, began, (up, down, losses, sorted_by, sticky)), *faults = opened.value
    assert up == sorted(up, key=str.lower) and down == up[::-1] and losses == sorted(losses) and losses
    assert [number for number, each in enumerate(sorted_by) if each == "ascending"] == [3] and sticky == "sticky"
    assert count == 100 and rates == sorted(rates) and len(set(rates)) == 11 and first == max(rates)
    assert search == "?column=train.lr" and began is True, "the page was not loaded again"
    assert faults == [[], []] and opened.messages == [] and opened.scroll_width == 390


def test_a_form_of_a_page_acts_in_a_browser(browser: Browser, acting: UiServer):
    """The origin that a browser sends is accepted; the form names a run that has ended, so that nothing is stopped."""
    until = """(() => {
      const form = document.querySelector("form[action='/act']");
      if (form && !form.began) {
        form.began = true;
        form.closest("details").open = true;
        form.elements.name.value = "run-001";
        form.querySelector("button").click();
      }
      return document.body.innerText.includes("nothing to cancel");
    })()"""
    opened = browser.open(f"{acting.address}/run?name=run-000", width=1280, until=until, script=ACCESS)
    assert opened.value == [] and opened.messages == []
    assert not (acting.runs.folder / "run-000" / "cancelled").exists()


def test_a_question_is_sent_by_enter_and_what_came_of_it_appears_on_the_page(
    browser: Browser, acting: UiServer, monkeypatch: pytest.MonkeyPatch
):
    """The run has no model, so that none is loaded."""
    monkeypatch.setattr("shardwise.launch.commands.ui.pages.LIVE_S", 0.1)
    until = """(() => {
      const box = document.getElementById("question");
      if (box && !sessionStorage.getItem("sent")) {
        sessionStorage.setItem("sent", "1");
        box.value = "why\\n<b>so</b>";
        box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true}));
      }
      return document.querySelector(".talk .alert");
    })()"""
    found = f"[document.querySelector('.talk').innerText, location.pathname, {ACCESS}, {CONTRAST}.found]"
    script = f"Promise.all({found})"
    address = f"{acting.address}/chat?name=run-001"
    opened = browser.open(address, width=390, is_dark=True, until=until, script=script)
    talk, place, *faults = opened.value
    assert "why\n<b>so</b>" in talk and "no checkpoint" in talk and place == "/chat"
    assert faults == [[], []] and opened.messages == [] and opened.scroll_width == 390
