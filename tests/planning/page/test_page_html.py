"""The page says what the text says, needs nothing but itself, and whatever a person named is only text in it."""

import base64
import hashlib
import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from page_reader import read_page
from planning_factory import plan_of

from shardwise.trainer.planning.explain.comparison import comparison_page
from shardwise.trainer.planning.explain.plan_page import explain_plan, plan_page, readable
from shardwise.trainer.planning.page import content
from shardwise.trainer.planning.page import html as page_html
from shardwise.trainer.planning.page.content import LineChart, Page, Points, Section, Series, Span, Unit, page_text
from shardwise.trainer.spec.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("8b", "4xA100-SXM4-80GB", price=2.5)


@pytest.fixture(scope="module")
def html(plan: Plan) -> str:
    return page_html.pages_html([plan_page(plan)], title=plan.name)


def test_the_page_is_whole_fetches_nothing_and_is_named_for_a_screen_reader_and_reached_by_the_keyboard(
    html: str,
) -> None:
    reader = read_page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "onclick", "onload")]
    assert not re.search(r"url\(|@import|https?://", html)
    assert html.count("<main>") == 1
    pictures = re.findall(r'<svg [^>]*role="img"[^>]*>', html)
    assert pictures and all(re.search(r'aria-label="[^"]+"', each) for each in pictures)
    tables = re.findall(r'<div class="scroll[^>]*>', html)
    assert tables and all('tabindex="0"' in each and "aria-label=" in each for each in tables)
    assert not re.search(r"<th[^>]*></th>", html)


def test_a_policy_forbids_every_request_and_every_style_but_the_one_in_the_head(html: str) -> None:
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    digest = base64.b64encode(hashlib.sha256(page_html.STYLE.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert f"<style>{page_html.STYLE}</style>" in html, "the style that the digest is of"
    assert not [name for name, _ in read_page(html).attributes if name == "style"]


def test_every_word_of_the_text_stands_on_the_page(plan: Plan, html: str) -> None:
    told = " ".join(" ".join(read_page(html).text).split())
    marks = re.compile(r"^[a-z.]$|^\[[a-z.]+\]$")  # letters and the bar of the text, which are colours here
    for word in explain_plan(plan, width=1000).split():
        assert marks.match(word) or word in told, word


def test_charts_show_the_parts_of_memory_and_its_events(plan: Plan, html: str) -> None:
    reader, memory = read_page(html), plan.chosen.memory
    assert reader.tags.count("svg") >= 4
    widths = re.findall(r'<rect class="part c\d+" x="[\d.]+%" width="([\d.]+)%" height="22"', html)
    assert len(widths) == len(memory.parts) + 1
    assert float(widths[0]) == pytest.approx(100 * next(iter(memory.parts.values())) / memory.usable_bytes, abs=0.01)
    assert all(readable(event) in " ".join(reader.text) for event in memory.events)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>'])
def test_what_a_person_named_is_only_text(plan: Plan, name: str) -> None:
    cards = tuple(replace(card, name=name) for card in plan.hardware.gpus)
    hardware = replace(plan.hardware, excluded=(name,), gpus=cards)
    schedule = replace(plan.schedule, lr_source=name)
    hostile = replace(plan, name=name, notes=(name,), hardware=hardware, schedule=schedule)
    html = page_html.pages_html([comparison_page([(name, hostile), (name, hostile)]), plan_page(hostile)], title=name)
    reader = read_page(html)
    assert not {"script", "img"} & set(reader.tags)
    assert not [attribute for attribute, _ in reader.attributes if attribute.startswith("on")]
    assert " ".join(reader.text).count(name) >= 6


def written(*blocks: object) -> str:
    page = Page(title="t", sections=(Section(title="blocks", blocks=blocks),))  # type: ignore[arg-type]
    html = page_html.pages_html([page], title="t")
    read_page(html)
    return html


def chart(*lines: Points, **changes: Any) -> LineChart:
    series = tuple(Series(name=str(number), points=points) for number, points in enumerate(lines))
    return replace(LineChart(caption="", x_label="", unit=Unit.NUMBER, series=series), **changes)


def test_numbers_stand_to_the_right_and_the_best_have_a_star() -> None:
    html = written(content.Table(rows=(("head", "number"), ("a", "1"), ("b", "2")), right=(1,), best=((2, 1),)))
    assert '<td class="right">1</td>' in html and '<td class="right best">2 *</td>' in html


def test_bars_are_as_long_as_their_share() -> None:
    html = written(
        content.StackedBar(parts={"part": 2**30}, total=2**31),
        content.Bars(caption="bars", rows=(("one", 1.0, "1 s"), ("two", 4.0, "4 s"))),
        content.Bars(caption="none", rows=()),
        content.PairedBars(caption="pairs", rows=(("a", 1.0, 2.0), ("b", None, 1.0)), unit=Unit.SECONDS),
        content.PairedBars(caption="none", rows=(("a", None, None),), unit=Unit.SECONDS),
        content.Spans(caption="spans", rows=(Span(begin=60, end=120, text="second"),), unit=Unit.SECONDS),
    )
    assert "<title>part: 1 GiB</title>" in html and ">none<" not in html
    widths = (re.findall(rf'<rect class="part {c}" x="0.00%" y="\d+" width="([\d.]+)%"', html) for c in ("c0", "c1"))
    assert list(widths) == [["25.00", "100.00", "50.00"], ["100.00", "50.00"]]
    assert '<rect class="part c0" x="50.00%" y="19" width="50.00%"' in html
    assert "- / 1 s" in html and ">1 min 00 s</text>" in html


def test_a_chart_has_its_lines_marks_bands_and_keys() -> None:
    series = (
        Series(name="measured & so", points=((0, 0), (1, 100 * 2**20))),
        Series(name="expected", points=((0, 5.0), (1, 5.0)), is_dashed=True),
    )
    marks = (content.Mark(at=0.5, text="went <back>"), content.Mark(at=7, text="elsewhere"))
    bands = (Span(begin=0, end=0.25, text="forward"), Span(begin=0.5, end=0.75, text="forward"))
    chart = LineChart(caption="c <b>", x_label="step", unit=Unit.BYTES, series=series, marks=marks, bands=bands)
    html = written(chart)
    assert re.findall(r'class="line( dashed)? c(\d)" d="(M[^"]*)"', html)[0][1:] == ("0", "M0.0 180.0L1000.0 8.6")
    assert html.count('class="line') == 2 and 'class="line dashed c1"' in html
    assert html.count('class="mark"') == 1 and "<title>went &lt;back&gt;</title>" in html
    assert html.count('class="band c2"') == 2 and html.count("</span> forward<") == 1
    assert "measured &amp; so" in html and ">50 MiB</text>" in html and ">95.4 MiB<" not in html


def test_each_axis_has_its_own_unit_areas_are_stacked_and_a_quote_keeps_its_lines() -> None:
    series = (Series(name="s", points=((0, 0), (120, 100 * 2**20))),)
    html = written(LineChart(caption="c", x_label="", unit=Unit.BYTES, x_unit=Unit.SECONDS, series=series))
    assert ">50 MiB</text>" in html and ">1 min 00 s</text>" in html
    html = written(chart(((0, 1.0), (1, 1.0)), ((0, 1.0), (1, 3.0)), is_stacked=True))
    assert html.count('class="area') == 2 and 'class="line' not in html
    assert "<pre>a\n  &lt;b&gt;</pre>" in written(content.Quote(label="after", text="a\n  <b>"))


def test_of_many_marks_none_is_named_beside_its_line() -> None:
    marks = [content.Mark(at=n, text="m") for n in range(6)]
    few, many = (written(chart(((0, 1.0), (9, 1.0)), marks=tuple(marks[:count]))) for count in (5, 6))
    assert few.count('<text class="halo"') == 5 and many.count('<text class="halo"') == 0
    assert many.count('class="mark"') == 6


def test_text_leaves_out_a_section_of_nothing_but_charts() -> None:
    sections = (Section(title="curve", blocks=(chart(((0, 1.0),)),)), Section(title="nothing to say"))
    quoted = Section(title="q", blocks=(content.Quote(label="after", text="a\nb"),))
    text = page_text(Page(title="t", sections=(*sections, quoted)), width=80)
    assert text == "t\n\nnothing to say\n\nq\n  after: a\n          b"


AXES = page_html.Axes(left=0, right=10, bottom=0, top=10)
NAN = math.nan


@pytest.mark.parametrize(
    ("points", "path"),
    [
        ((), ""),
        (((0, 0), (5, 5), (10, 10)), "M0.0 180.0L500.0 90.0L1000.0 0.0"),
        (((5, 5),), "M500.0 90.0h0"),
        (((0, 0), (5, None), (10, 10)), "M0.0 180.0h0 M1000.0 0.0h0"),
        (((0, 0), (1, 0), (2, NAN), (3, 0), (4, 0)), "M0.0 180.0L100.0 180.0 M300.0 180.0L400.0 180.0"),
        (((0, None), (1, math.inf)), ""),
    ],
)
def test_a_line_runs_through_its_points_and_ends_at_gaps(points: Points, path: str) -> None:
    assert page_html.line_path(points, AXES) == path


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, (0, 2, 4, 6, 8, 10)), (0, 8, (0, 2, 4, 6, 8)), (0.2, 0.9, (0.2, 0.4, 0.6, 0.8)),
        (-1, 1, (-1, -0.5, 0, 0.5, 1)), (3, 3, (3,)), (1, 300, (0, 100, 200, 300)[1:]),
    ],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert page_html.ticks(low, high) == pytest.approx(expected)


def test_ticks_are_round_in_the_unit_they_are_written_in() -> None:
    found = [Unit.BYTES.text(tick) for tick in page_html.unit_ticks(0, 244 * 2**20, Unit.BYTES)]
    assert found == ["0 B", "50 MiB", "100 MiB", "150 MiB", "200 MiB"]
    assert page_html.unit_ticks(0, 3600, Unit.SECONDS) == (0, 1200, 2400, 3600)


def test_axes_hold_every_line_and_band_and_a_line_that_does_not_begin_at_zero_fills_them() -> None:
    axes = page_html.axes_of(chart(((1, 2.0), (3, 4.0)), ((2, 6.0),), bands=(Span(begin=0, end=5, text="b"),)))
    assert (axes.left, axes.right, axes.bottom) == (0, 5, 0) and axes.top == pytest.approx(6.3)
    axes = page_html.axes_of(chart(((0, 4.0), (1, 8.0)), from_zero=False))
    assert axes is not None and (axes.bottom, axes.top) == pytest.approx((3.8, 8.2))


def test_without_a_figure_there_are_no_axes_and_one_point_or_a_flat_line_has_room() -> None:
    gaps: tuple[Points, ...] = ((), ((0, None),), ((0, NAN), (1, None)))
    assert [page_html.axes_of(chart(points)) for points in gaps] == [None, None, None]
    for points in (((3, 5.0),), ((3, 0.0),), ((0, 5.0), (1, 5.0))):
        axes = page_html.axes_of(chart(points, from_zero=False))
        assert axes is not None and axes.top > axes.bottom
        assert 0 <= axes.y(points[0][1]) <= 180 and 0 <= axes.x(points[0][0]) <= 1000


def test_areas_lie_on_top_of_each_other_and_a_gap_adds_nothing() -> None:
    first, second = Series(name="a", points=((0, 1.0), (1, 2.0))), Series(name="b", points=((0, 3.0), (1, None)))
    (low, high), (next_low, next_high) = page_html.stacked((first, second))
    assert (low, high) == (((0, 0.0), (1, 0.0)), ((0, 1.0), (1, 2.0)))
    assert (next_low, next_high) == (high, ((0, 4.0), (1, 2.0)))
    axes = page_html.axes_of(chart(first.points, second.points, is_stacked=True))
    assert axes is not None and axes.top == pytest.approx(4.2)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=40, max_size=500), st.integers(10, 60))
def test_thinned_lines_keep_their_extremes_their_gaps_and_their_order(heights: list[float | None], most: int) -> None:
    points = tuple((float(x), y) for x, y in enumerate(heights))
    retained = page_html.thinned(points, most)
    assert len(retained) <= max(most * 1.5 + 3, len(points) if len(points) <= most else 0)
    assert set(retained) <= set(points) and all(a[0] < b[0] for a, b in pairwise(retained))
    figures = [y for y in heights if y is not None]
    if figures:
        told = [y for _, y in retained if y is not None]
        assert (min(told), max(told)) == (min(figures), max(figures))
    assert (None in heights) == (None in [y for _, y in retained])


def test_averaged_lines_of_the_same_steps_keep_the_same_steps() -> None:
    points = tuple((float(x), float(x % 2)) for x in range(1000))
    other = tuple((x, None if x < 10 else 1.0) for x, _ in points)
    found, beside = page_html.averaged(points, 100), page_html.averaged(other, 100)
    assert len(found) == 100 and [x for x, _ in found] == [x for x, _ in beside]
    assert {y for _, y in found} == {0.5} and beside[0] == (9.0, None) and beside[1] == (19.0, 1.0)
    assert page_html.averaged(points[:5]) == points[:5]


def test_a_few_values_far_above_all_others_are_marked_above_the_chart_and_leave_its_scale() -> None:
    usual: Points = tuple((float(step), 1.0 + step % 3 / 10) for step in range(40))
    far = (*usual, (40.0, 13.0), (41.0, 9.0))
    axes = page_html.axes_of(chart(far, clips=True))
    assert axes is not None and 1.2 < axes.top < 2 and axes.y(13.0) == 0
    text = written(chart(far, clips=True, x_label="step"))
    assert "2 values are above the chart; the highest is 13, at step 40" in text and text.count("\u25b2<title>") == 2
    others = (chart(usual, clips=True), chart(far[-12:], clips=True), chart(far, clips=True, is_log=True))
    for same in (chart(far), *others):
        whole = page_html.axes_of(same)
        highest = max(y for _, y in same.series[0].points if y is not None)
        assert whole is not None and whole.top > highest and "above the chart" not in written(same)
    level = Series(name="usable", points=((0, 20.0), (41, 20.0)), is_dashed=True)
    with_level = chart(far, clips=True)
    axes = page_html.axes_of(replace(with_level, series=(*with_level.series, level)))
    assert axes is not None and axes.top > 20


def test_on_a_log_scale_equal_factors_are_equally_far_apart_and_what_is_not_above_zero_is_a_gap() -> None:
    points = ((0, 0.0), (1, 0.01), (2, 1.0), (3, 100.0), (4, -1.0))
    axes = page_html.axes_of(chart(points, is_log=True))
    assert axes is not None and axes.is_log
    low, middle, high = (axes.y(value) for value in (0.01, 1.0, 100.0))
    assert low - middle == pytest.approx(middle - high) and 0 < high < low < 180
    assert page_html.line_path(points, axes).count("M") == 1 and page_html.line_path(points, axes).count("L") == 2
    assert page_html.log_ticks(0.009, 110) == pytest.approx((0.01, 0.1, 1, 10, 100))
    assert page_html.log_ticks(2.1, 6.0) != () and all(2.1 <= tick <= 6 for tick in page_html.log_ticks(2.1, 6.0))
    without = page_html.axes_of(chart(((0, 0.0), (1, -1.0)), is_log=True))
    assert without is not None and not without.is_log


def test_a_page_within_another_one_styles_nothing_else_and_folds_what_is_not_named(plan: Plan) -> None:
    text = page_html.fragment_html(plan_page(plan), title="<b>fits</b>", shown=("speed", "memory"))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", style))
    assert len(selectors) > 30
    assert [each for part in selectors for each in part.split(",") if not each.strip().startswith(".shardwise")] == []
    assert style.count("{") == style.count("}") == page_html.STYLE.count("{")
    titles = re.findall(r"<(h2|summary)>(.*?)</\1>", text)
    assert [title.partition(" ")[0].rstrip(":") for tag, title in titles if tag == "h2"] == ["speed", "memory"]
    assert len(titles) == len(plan_page(plan).sections) and "&lt;b&gt;fits" in text
    assert not re.search(r"<script|<link|src=|\son\w+=", text)
