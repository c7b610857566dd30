"""How many nodes are worth it, side by side."""

import pytest
from planning_factory import plan_of

from shardwise.trainer.planning.candidates import RunTotals
from shardwise.trainer.planning.explain.comparison import (
    MOST_COUNTS,
    NodeCount,
    counts_to_try,
    node_counts_section,
    planned,
    speedups,
)
from shardwise.trainer.planning.page.content import Page, Table, page_text


def count_of(num_nodes, tokens_per_s=None, *, method="full", reason=""):
    totals = None
    if tokens_per_s is not None:
        totals = RunTotals(hours=100 / num_nodes, gpu_hours=800.0, kwh=None, cost=None, tokens_per_s=tokens_per_s)
    return NodeCount(num_nodes=num_nodes, totals=totals, method=method, strategy="zero2", reason=reason)


@pytest.mark.parametrize(
    ("allowed", "asked", "expected"),
    [
        (1, 1, (1,)),
        (2, 1, (1, 2)),
        (3, 2, (1, 2, 3)),
        (4, 3, (1, 2, 3, 4)),
        (8, 1, (1, 2, 4, 8)),
        (16, 1, (1, 2, 4, 8, 16)),
        (128, 1, (1, 2, 4, 8, 16)),
        (128, 64, (8, 16, 32, 64, 128)),
        (100, 6, (2, 4, 6, 8, 16)),
    ],
)
def test_counts_double_up_to_what_is_allowed_near_what_is_asked(allowed, asked, expected):
    counts = counts_to_try(allowed, asked)
    assert counts == expected
    assert asked in counts and len(counts) <= MOST_COUNTS and max(counts) <= allowed


def test_more_nodes_are_held_against_the_fewest_that_fit_and_the_same_method():
    counts = [
        count_of(1, reason="nothing fits: needs 90 GiB"),
        count_of(2, 1000.0),
        count_of(4, 1900.0),
        count_of(8, 5000.0, method="lora"),
    ]
    assert speedups(counts) == {2: 1.0, 4: 1.9}
    assert speedups([count_of(1)]) == {}


def test_the_section_says_it_in_a_line_and_in_a_table():
    counts = [count_of(1, 1000.0), count_of(2, 1930.0), count_of(4, 3400.0), count_of(8, 3000.0, method="lora")]
    section = node_counts_section(counts, place="gpu", allowed=8, sentences=("on 2 nodes: one job",))
    assert all(fact in section.title for fact in ("2 are 1.93x", "4 are 3.4x", "gpu allows 8"))
    text = page_text(Page(title="t", sections=(section,)), width=100)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1] in ("1", "2", "8")]
    assert rows[0][:3] == ["1", "1,000", "1.00x"] and rows[1][:3] == ["2", "1,930", "1.93x"]
    assert rows[-1][:3] == ["8", "3,000", "-"] and rows[-1][-2:] == ["lora", "zero2"]
    assert text.endswith("on 2 nodes: one job")


def test_one_node_needs_no_table():
    section = node_counts_section([count_of(1, 1000.0)], place="gpu", allowed=1, sentences=())
    assert section.title == "nodes: gpu allows 1"
    assert not any(isinstance(block, Table) for block in section.blocks)


def test_what_does_not_fit_says_why():
    counts = [count_of(1, reason="nothing fits: needs 90 GiB"), count_of(2, 1000.0)]
    section = node_counts_section(counts, place="gpu", allowed=2, sentences=())
    assert "nothing fits: needs 90 GiB" in page_text(Page(title="t", sections=(section,)), width=100)
    assert section.title == "nodes: gpu allows 2"


def test_figures_are_those_of_the_plan():
    one, four = (planned(nodes, plan_of("8b", f"{nodes}x8xA100-SXM4-80GB", tokens_per_step=2**20)) for nodes in (1, 4))
    assert one.totals is not None and four.totals is not None
    assert 3 < speedups([one, four])[4] < 4
    assert four.totals.hours < one.totals.hours
    assert four.totals.gpu_hours == pytest.approx(four.totals.hours * 32)
