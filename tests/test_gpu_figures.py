"""Figures of runs on GPUs in the pages are those of the results files, and no other such figure stands there."""

import re
from pathlib import Path

import gpu_figures

from shardwise.trainer.planning.search.certainty import OWN_PEAKS

ROOT = Path(__file__).parents[1]
OWN_RUN = re.compile(r"\b(?:one|an) H[12]00\b")
GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)
# Names, sizes and versions in such a sentence, which are no figures of a run.
NAMES = re.compile(
    r"\bH[12]00(?: 80 GB)?|\b\d+[BM]\b|\b160 million|torch \d[\d.]*(?: to \d[\d.]*)?|\S*/\S*|ZeRO-\d|\bbf16|FP8"
)
# From a note in the code, beside the constant that it explains, or of the kinds that the table of benchmarks.md lists.
ELSEWHERE = ("speed-model.md", "workarounds.md")


def prose(page: Path) -> list[str]:
    """Paragraphs without generated tables and examples of output, each on one line."""
    text = re.sub(r"(?m)^    .*$", "", GENERATED.sub("", page.read_text()))
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def uncovered(paragraph: str, statements: list[str]) -> list[str]:
    """Figures of a paragraph on own runs that no statement has."""
    for each in statements:
        paragraph = paragraph.replace(each, "")
    sentences = [each for each in re.split(r"(?<=[.:;]) ", paragraph) if OWN_RUN.search(each)]
    return [figure for each in sentences for figure in re.findall(r"\d[\d.,]*", NAMES.sub("", each))]


def test_every_statement_on_a_run_on_a_gpu_has_the_figures_of_its_results_file() -> None:
    for page, statements in gpu_figures.statements().items():
        text = " ".join(prose(ROOT / page))
        assert [each for each in statements if each not in text] == [], page


def test_no_page_has_a_figure_of_an_own_run_on_a_gpu_that_no_results_file_has() -> None:
    known = gpu_figures.statements()
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name not in ELSEWHERE)]
    found = {
        page.name: figures_of
        for page in pages
        for paragraph in prose(page)
        if (figures_of := uncovered(paragraph, known.get(str(page.relative_to(ROOT)), [])))
    }
    assert found == {}
    assert uncovered("On one H100 8B reached 15,000 tokens/s.", []) == ["15,000"], "a figure without a file is found"


def test_the_kinds_that_a_plan_calls_compared_are_those_that_ran() -> None:
    assert {kind: len(found) for kind, found in gpu_figures.peak_differences().items()} == OWN_PEAKS
