"""The documentation builds as a site without a warning, and a browser shows it without errors or foreign requests."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from headless_browser import CONTRAST, lacks_browser, running_browser
from http_answers import answering
from werkzeug.utils import send_from_directory
from werkzeug.wrappers import Request, Response

ROOT = Path(__file__).parents[1]


# Of the theme, with opacity 0 until a pointer or the search shows them.
UNSEEN = ("INPUT md-option", "DIV md-search-result__meta", "A headerlink")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and "WARNING" not in answer.stderr, answer.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    def answer(request: Request) -> Response:
        return send_from_directory(site, request.path[1:] or "index.html", request.environ)

    with answering(answer) as url:
        yield f"{url}/"


def test_every_page_is_part_of_the_site_and_can_be_searched(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {path.stem for path in site.glob("*.html")} >= pages
    assert "GaLore" in (site / "search" / "search_index.json").read_text()


def test_every_link_of_the_site_leads_to_a_file_and_a_heading(site: Path) -> None:
    """Also to files of the repository outside docs/, which the site has as pages or copies."""
    texts = {path.resolve(): path.read_text() for path in site.rglob("*.html")}
    headings = {page: set(re.findall(r'\sid="?([^"\s>]+)', text)) for page, text in texts.items()}
    dead, count = set(), 0
    for page, text in texts.items():
        for address in re.findall(r'(?:href|src)="?([^"\s>]+)', text):
            if urlsplit(address).scheme or address.startswith(("#", "/")):
                continue
            name, _, heading = unquote(address).partition("#")
            target = (page.parent / name).resolve()
            target = target / "index.html" if target.is_dir() else target
            count += 1
            has_heading = not heading or heading in headings.get(target, ())
            if not target.exists() or not has_heading:
                dead.add(f"{page.name}: {address}")
    assert dead == set() and count > 1000
    assert (site / "repository" / "index.html").exists(), "the README"


def test_pages_open_in_light_and_dark_without_an_error_or_a_foreign_request(address: str) -> None:
    obstacle = lacks_browser()
    if obstacle is not None:
        (pytest.fail if os.environ.get("SHARDWISE_CI") == "1" else pytest.skip)(obstacle)
    dark_address = address.replace("127.0.0.1", "localhost")  # the theme remembers a reader's choice by host
    with running_browser() as browser:
        light = browser.open(address, width=1280, script=CONTRAST)
        dark = browser.open(dark_address, width=1280, is_dark=True, script=CONTRAST)
        phone = browser.open(f"{address}strategies.html", width=390)
    for opened in (light, dark, phone):
        assert opened.messages == []
        assert all(url.startswith((address, dark_address, "blob:", "data:")) for url in opened.requests)
    assert light.background != dark.background
    pale = [each for opened in (light, dark) for each in opened.value["found"] if not each.startswith(UNSEEN)]
    assert pale == [] and light.value["count"] > 50
