"""The documents say what the program does: every command, every strategy, and nothing that is not there."""

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from covering_factory import covering, points
from gpu_factory import GPU_CASES

from shardwise.launch.job.yaml_text import read_yaml
from shardwise.launch.options import COMMANDS, GROUPS, build_parser
from shardwise.trainer.runtime.loop.metrics import StepMetrics
from shardwise.trainer.spec.engines import ENGINES, Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.job.reading import read_job

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
TECHNIQUES = (REPOSITORY / "docs" / "techniques.md").read_text()
DOCUMENTS = [
    path
    for path in REPOSITORY.rglob("*.md")
    if not any(part.startswith(".") or part == "runs" for part in path.relative_to(REPOSITORY).parts)
]


def test_the_readme_is_short_and_sums_up_the_ledger():
    """To mend it: the sentence that benchmarks/ledger.py `statement` returns."""
    assert len(README.split()) <= 900
    assert import_module("ledger").statement() in " ".join(README.split())


@pytest.mark.parametrize("name", ["commands", "support_matrix", "zoo_page", "gpu_figures", "ledger"])
def test_the_tables_of_options_and_of_what_goes_together_are_those_of_the_program(name: str):
    """A change of options is one for users: it belongs in CHANGELOG.md. To mend it: benchmarks/NAME.py --write"""
    page = import_module(name)
    document = page.DOCUMENT.read_text()
    assert import_module("written_page").with_tables(document, page.tables()) == document


def test_every_command_and_every_rule_stands_in_its_document():
    page, matrix = import_module("commands").DOCUMENT.read_text(), import_module("support_matrix")
    (subparsers,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert [name for name in subparsers.choices or () if f"`shardwise {name}" not in page] == []
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    lines = build_parser().format_help().splitlines()
    places = [lines.index(f"  {title}") for title in GROUPS]
    assert places == sorted(places), "the groups of the help"
    rules = {rule.name for rule in (*matrix.INCOMPATIBILITIES, *matrix.RULES)} - {"not_yet"}
    assert [name for name in rules if f"`{name}`" not in matrix.DOCUMENT.read_text()] == []


def test_every_sharding_and_configuration_file_is_explained_and_every_exit_code():
    strategies, commands = ((REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("strategies", "commands"))
    assert {str(each) for each in Sharding} <= set(re.findall(r"^\| (\w+) \|", strategies, re.MULTILINE))
    assert {int(each) for each in ExitCode} <= set(map(int, re.findall(r"^\| (\d+) \|", commands, re.MULTILINE)))
    for config in (file for facts in ENGINES.values() for file in facts.base_configs.values()):
        folder, name = config.split("/")
        assert name in (REPOSITORY / folder / "README.md").read_text()


def test_every_figure_of_a_step_is_explained_and_no_other():
    section = (REPOSITORY / "docs" / "watching.md").read_text().partition("\n## Metrics\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(StepMetrics.__struct_fields__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_documents_lead_somewhere_and_every_footnote_is_used(path):
    """To a file that is there and, where one is named, to a heading in it."""
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        if "://" in target:
            continue
        document = path.parent / target if target else path
        assert document.exists(), target
        if heading:
            assert heading in headings(document), f"{target}#{heading}"
    defined = set(re.findall(r"^\[\^([^\]]+)\]:", path.read_text(), re.MULTILINE))
    assert defined == set(re.findall(r"\[\^([^\]]+)\](?!:)", path.read_text())), "footnotes"


def headings(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_every_document_is_in_the_table_of_documents():
    table = (REPOSITORY / "docs" / "README.md").read_text()
    missing = [path.name for path in (REPOSITORY / "docs").glob("*.md") if f"]({path.name})" not in table]
    assert missing == ["README.md"]


def test_every_technique_has_a_section_with_its_line_of_a_job_or_its_version():
    sections = re.findall(r"^## (\d+)\. .+?\n(.*?)(?=^## |\Z)", TECHNIQUES, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in sections] == list(range(1, 31))
    for number, body in sections:
        is_said = re.search(
            r"`(pin|train|allow|limits|log|model|data)[:.]|`shardwise \w+|accelerate launch|examples/", body
        )
        assert is_said or re.search(r"come[s]? with 0\.\d", body), number


@pytest.mark.parametrize("line", re.findall(r"`((?:pin|train|limits|log): \{[^`]+)`", TECHNIQUES))
def test_every_line_of_a_job_in_the_techniques_is_a_job(line):
    """It is read, clashes with nothing, and changes the job."""
    lines: Any = read_yaml(line, origin="techniques.md")
    tree = {"model": {"name": "m"}, "data": {"train": "d"}, **lines}
    section = line.partition(":")[0]
    assert read_job(tree, origin="techniques.md") != read_job({**tree, section: {}}, origin="techniques.md")


def test_the_measured_techniques_are_the_figures_that_were_kept():
    """And each peak is what was predicted, within 10 %, but for what the page says is not counted yet."""
    *_, newest = sorted((REPOSITORY / "benchmarks" / "results").glob("techniques-*.json"))
    techniques = import_module("techniques")
    rows = [techniques.Measured(**row) for row in json.loads(newest.read_text())["rows"]]
    assert f"<!-- measured -->\n{techniques.table_of(rows)}<!-- /measured -->" in TECHNIQUES
    for row in (row for row in rows if "dora" not in row.name):
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.1), row.name


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_documents_name_is_there():
    """`tests/FOLDER/FILE.py::FUNCTION`; a case of a GPU in brackets is one of the table's."""
    names = {case.name for case in GPU_CASES}
    for path in DOCUMENTS:
        for file, function, case in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?(?:\[([^\]]+)\])?", path.read_text()):
            assert (REPOSITORY / file).exists(), f"{path.name}: {file}"
            assert not function or function in functions_of(REPOSITORY / file), f"{path.name}: {file}::{function}"
            assert not case or case in names, f"{path.name}: {file}::{function}[{case}]"


def test_the_covering_set_runs_what_the_support_matrix_says_it_does():
    """Any two values of a cell that cites it meet in one of its points."""
    matrix = import_module("support_matrix")
    met = {frozenset(pair) for point in covering(list(points())) for pair in point.pairs}
    cells = matrix.cited()["covering"]
    assert len(cells) > 100
    for cell in cells:
        plain = matrix.Cell()
        values = [
            (axis, getattr(cell, axis))
            for axis in cell._fields
            if axis not in ("sharding", "offload", "gpu") and getattr(cell, axis) != getattr(plain, axis)
        ]
        layout = ("layout", (cell.sharding, cell.offload))
        for pair in combinations([layout, *(values or [("method", cell.method)])], 2):
            assert frozenset(pair) in met, f"{pair} of {cell}"


def test_every_picture_is_shown_small_and_what_the_command_takes() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    script = (REPOSITORY / "benchmarks" / "screenshots.py").read_text()
    pictures = {path.name: path for path in (REPOSITORY / "docs" / "images").iterdir()}
    assert set(re.findall(r"images/([\w-]+\.png)", text)) == pictures.keys() and len(pictures) >= 5
    for path in pictures.values():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= 150_000, path.name
        assert f'"{path.stem}"' in script


def test_the_badges_state_facts_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    facts = "\n".join(project["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", facts)
    paths = (REPOSITORY / "docs" / "badges").iterdir()
    titles = {path.name: re.search(r"<title>(.*)</title>", path.read_text())[1] for path in paths}
    assert titles == {
        "licence.svg": f"licence: {project['license']}",
        "python.svg": f"python: {' | '.join(versions)}",
        "platform.svg": f"platform: {re.search(r'Operating System :: POSIX :: (.*)', facts)[1]}",
    }
    assert (
        set(re.findall(r"badges/([\w.]+)", README)) == titles.keys()
        and f"Python {versions[0]} to {versions[-1]}" in README
    )


@pytest.mark.cold
def test_the_python_api_re_exports_and_loads_nothing_heavy():
    program = (
        "import sys, shardwise; assert set(shardwise.__all__) <= set(dir(shardwise)); "
        "print([name for name in sys.modules if name.startswith(('shardwise.', 'torch', 'transformers', 'numpy'))])"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_page_on_architecture_has_the_directions_that_import_linter_holds():
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        for package in contract.get("containers", ()):
            name = package.removeprefix("shardwise.").replace(".", "/")
            order = "; ".join(layer.replace(" | ", ", ") for layer in contract["layers"])
            assert f"| `{name}` | {order} |" in page


def test_no_folder_of_code_has_more_than_twenty_entries():
    listed = subprocess.run(
        ["git", "ls-files", "launch", "slurm", "trainer"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    entries: dict[str, set[str]] = {}
    for path in map(PurePosixPath, listed):
        for folder, entry in pairwise([*reversed(path.parents), path]):
            entries.setdefault(str(folder), set()).add(entry.name)
    code = {str(PurePosixPath(name).parent) for name in listed if name.endswith("__init__.py")}
    assert {folder: len(entries[folder]) for folder in code if len(entries[folder]) > 20} == {}
