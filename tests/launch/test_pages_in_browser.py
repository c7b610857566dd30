"""Pages open in a real browser: nothing on the console, no request, in light and dark, on a phone and on a desk.

Needs Chromium; without it the tests skip with the line that installs it, and fail in continuous integration.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_browser import Browser, lacks_browser, running_browser
from msgspec.structs import replace
from planning_factory import plan_of
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import attempt_record

from shardwise.launch.show.recorded_run import read_recorded, recorded_runs
from shardwise.launch.show.run_page import comparison_page, run_page
from shardwise.trainer.planning.explain.comparison import comparison_page as machines_page
from shardwise.trainer.planning.explain.plan_page import plan_page
from shardwise.trainer.planning.page.content import Page
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.spec.report import Ending, Fault

LONG = "an-incident-with-a-very-long-word-" * 12
WHITE, NEAR_BLACK = "rgb(255, 255, 255)", "rgb(13, 17, 23)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    obstacle = lacks_browser()
    if obstacle is not None:
        (pytest.fail if os.environ.get("SHARDWISE_CI") == "1" else pytest.skip)(obstacle)
    with running_browser() as started:
        yield started


def run_pages(folder: Path) -> list[Page]:
    plan = tiny_plan(notes=(LONG,))
    failed = attempt_record(1, step=12, ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY)
    report = report_for(plan, history=(failed, attempt_record(2, step=40)), incidents=(LONG,), attempts=2)
    write_run(folder / "whole", plan=plan, report=report, rows=step_rows(data_s=1.0, wait_s=0.1, checkpoint_s=0.1))
    write_run(folder / "<script>alert(1)</script>".replace("/", ""), rows=())
    runs = recorded_runs(sorted(folder.iterdir()))
    return [*map(run_page, runs), comparison_page(runs)]


def plan_pages(_: Path) -> list[Page]:
    plan = plan_of("8b", "4xA100-SXM4-80GB", price=2.5)
    return [plan_page(replace(plan, notes=(LONG,))), machines_page([("here", plan), ("there", plan)])]


@pytest.mark.parametrize("pages_of", [run_pages, plan_pages], ids=["report", "plan"])
def test_pages_open_without_a_word_or_a_request_at_every_width(browser: Browser, tmp_path: Path, pages_of) -> None:
    (tmp_path / "runs").mkdir()
    page = tmp_path / "page.html"
    page.write_text(pages_html(pages_of(tmp_path / "runs"), title="page"))
    for width in (390, 1280):
        for is_dark in (False, True):
            opened = browser.open(page, width=width, is_dark=is_dark)
            assert (opened.messages, opened.requests) == ([], [])
            assert opened.scroll_width == width, "the body scrolls sideways"
            assert opened.background == (NEAR_BLACK if is_dark else WHITE)


def test_the_browser_tells_of_what_pages_do_wrong(browser: Browser, tmp_path: Path) -> None:
    """What is asked of the pages above, a page that does it is caught at."""
    html = pages_html([Page(title="t", sections=())], title="t")
    page = tmp_path / "page.html"
    page.write_text(html.replace("<body>", "<body><script>console.log(1)</script><img src='x.png'>"))
    opened = browser.open(page, width=390)
    assert "Content Security Policy" in "".join(opened.messages) and "x.png" in "".join(opened.messages)
    policy = html[html.index("<meta http-equiv") : html.index("<meta name")]
    wide = "<body><script>console.log('hello')</script><img src='x.png'><pre id='w'></pre><p>" + "<b>wide</b>" * 2
    page.write_text(html.replace(policy, "").replace("<body>", wide).replace("max-width: 58rem", "width: 900px"))
    opened = browser.open(page, width=390)
    assert "hello" in "".join(opened.messages) and [url.rpartition("/")[2] for url in opened.requests] == ["x.png"]
    assert opened.scroll_width > 390


def test_a_run_that_still_goes_has_a_page_that_opens(browser: Browser, tmp_path: Path) -> None:
    run = read_recorded(write_run(tmp_path / "bot", has_report=False, rows=step_rows(range(1, 2))))
    page = tmp_path / "page.html"
    page.write_text(pages_html([run_page(run)], title="bot"))
    opened = browser.open(page, width=390, is_dark=True)
    assert (opened.messages, opened.requests, opened.scroll_width) == ([], [], 390)
