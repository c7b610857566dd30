"""The page says what the text says, needs nothing but itself, and whatever a person named is only text in it."""

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from planning_factory import plan_of

from trainer.planning.explain import comparison_page, explain_plan, plan_page
from trainer.planning.explain_html import pages_html
from trainer.planning.page import Bars, Page, StackedBar, Table
from trainer.spec.plan import Plan

VOID = {"meta", "rect", "br"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("8b", "4xA100-SXM4-80GB", price=2.5)


@pytest.fixture(scope="module")
def html(plan: Plan) -> str:
    return pages_html([plan_page(plan)], title=plan.name)


def test_the_page_is_whole_and_fetches_nothing(html: str) -> None:
    reader = read(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "onclick", "onload")]
    assert not re.search(r"url\(|@import|https?://", html)


def test_every_word_of_the_text_stands_on_the_page(plan: Plan, html: str) -> None:
    told = " ".join(" ".join(read(html).text).split())
    marks = re.compile(r"^[a-z.]$|^\[[a-z.]+\]$")  # letters and the bar of the text, which are colours here
    for word in explain_plan(plan, width=1000).split():
        assert marks.match(word) or word in told, word


def test_charts_show_the_parts_of_memory_and_its_events(plan: Plan, html: str) -> None:
    reader = read(html)
    told = " ".join(reader.text)
    assert reader.tags.count("svg") >= 4
    widths = [float(found) for found in re.findall(r'<rect class="c\d+" x="[\d.]+" width="([\d.]+)" height="22"', html)]
    memory = plan.chosen.memory
    assert len(widths) == len(memory.parts) + 1
    assert widths[0] == pytest.approx(860 * next(iter(memory.parts.values())) / memory.usable_bytes, abs=0.1)
    for event in memory.events:
        assert event in told


def test_colours_follow_light_and_dark(html: str) -> None:
    assert "color-scheme: light dark" in html
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b < c"])
def test_what_a_person_named_is_only_text(plan: Plan, name: str) -> None:
    hostile = replace(
        plan,
        name=name,
        notes=(name,),
        hardware=replace(
            plan.hardware, excluded=(name,), gpus=tuple(replace(g, name=name) for g in plan.hardware.gpus)
        ),
        schedule=replace(plan.schedule, lr_source=name),
    )
    html = pages_html([comparison_page([(name, hostile), (name, hostile)]), plan_page(hostile)], title=name)
    reader = read(html)
    assert not {"script", "img"} & set(reader.tags)
    assert not [attribute for attribute, _ in reader.attributes if attribute.startswith("on")]
    assert " ".join(reader.text).count(name) >= 6


def test_every_kind_of_block_is_written() -> None:
    empty = Page(title="t", sections=())
    assert "<h1>t</h1>" in pages_html([empty], title="t")
    blocks = (
        Table(rows=(("head", "number"), ("cell", "1")), right=(1,)),
        StackedBar(parts={"part": 2**30}, total=2**31),
        Bars(caption="bars", rows=(("one", 1.0, "1 s"), ("two", 2.0, "2 s"))),
        Bars(caption="none", rows=()),
    )
    page = plan_page(plan_of("tiny", "1xCPU"))
    section = replace(page.sections[0], title="blocks", blocks=blocks)
    html = pages_html([Page(title="t", sections=(section,))], title="t")
    assert '<td class="right">1</td>' in html
    assert "<title>part: 1 GiB</title>" in html
    assert html.count("<h3>") == 1
    assert 'width="190.0"' in html
