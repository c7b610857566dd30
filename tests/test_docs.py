"""The documents say what the program does: every command, every strategy, and nothing that is not there."""

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
from covering_factory import covering, points
from gpu_factory import GPU_CASES

from shardwise.launch.job.yaml_text import read_yaml
from shardwise.launch.options import build_parser
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


def commands() -> list[str]:
    (subparsers,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return sorted(subparsers.choices or ())


MOST_WORDS = 900


def test_the_readme_is_short():
    assert len(README.split()) <= MOST_WORDS


def test_the_page_of_commands_has_every_command_with_its_options():
    """To mend it: python benchmarks/commands.py --write"""
    page = benchmark("commands")
    document = page.DOCUMENT.read_text()
    assert benchmark("written_page").with_tables(document, page.tables()) == document
    assert [name for name in commands() if f"`shardwise {name}" not in document] == []


@pytest.mark.parametrize("sharding", Sharding)
def test_every_sharding_is_in_the_table_of_strategies(sharding):
    strategies = (REPOSITORY / "docs" / "strategies.md").read_text()
    assert re.search(rf"^\| {sharding} \|", strategies, re.MULTILINE)


@pytest.mark.parametrize("config", [file for facts in ENGINES.values() for file in facts.base_configs.values()])
def test_every_configuration_file_is_explained(config):
    folder, name = config.split("/")
    assert name in (REPOSITORY / folder / "README.md").read_text()


@pytest.mark.parametrize("code", ExitCode)
def test_every_exit_code_is_in_the_page_of_commands(code):
    assert re.search(rf"^\| {int(code)} \|", (REPOSITORY / "docs" / "commands.md").read_text(), re.MULTILINE)


def test_every_figure_of_a_step_is_explained_and_no_other():
    rows = re.findall(r"^\| (`.*?) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(StepMetrics.__struct_fields__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_between_documents_lead_somewhere(path):
    """To a file that is there and, where one is named, to a heading in it."""
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        if "://" in target:
            continue
        document = path.parent / target if target else path
        assert document.exists(), target
        if heading:
            assert heading in headings(document), f"{target}#{heading}"


def headings(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_footnote_is_there_and_is_used(path):
    text = path.read_text()
    defined = set(re.findall(r"^\[\^([^\]]+)\]:", text, re.MULTILINE))
    used = set(re.findall(r"\[\^([^\]]+)\](?!:)", text))
    assert defined == used


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


@cache
def benchmark(name: str) -> ModuleType:
    """A file under benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


def support_matrix() -> ModuleType:
    return benchmark("support_matrix")


def test_the_measured_techniques_are_the_figures_that_were_kept():
    """And each peak is what was predicted, within 10 %, but for what the page says is not counted yet."""
    *_, newest = sorted((REPOSITORY / "benchmarks" / "results").glob("techniques-*.json"))
    techniques = benchmark("techniques")
    rows = [techniques.Measured(**row) for row in json.loads(newest.read_text())["rows"]]
    assert f"<!-- measured -->\n{techniques.table_of(rows)}<!-- /measured -->" in TECHNIQUES
    for row in (row for row in rows if "dora" not in row.name):
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.1), row.name


def test_the_support_matrix_is_what_the_rules_say():
    """To mend it: python benchmarks/support_matrix.py --write"""
    matrix = support_matrix()
    document = matrix.DOCUMENT.read_text()
    assert benchmark("written_page").with_tables(document, matrix.tables()) == document


def test_no_cell_of_the_support_matrix_is_empty():
    text = support_matrix().DOCUMENT.read_text()
    for name in ("layouts", "optimizers", "methods", "precisions", "settings", "recipes"):
        table = text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip().splitlines()
        assert len(table) > 4
        for line in table[2:]:
            _, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == table[0].count("|") - 2
            for cell in cells:
                assert re.fullmatch(r"(works|refused|needs .*|from 0\.\d)\[\^[\w-]+\]", cell), line


def test_every_rule_stands_in_the_support_matrix():
    matrix = support_matrix()
    text = matrix.DOCUMENT.read_text()
    for rule in (*matrix.INCOMPATIBILITIES, *matrix.RULES):
        assert f"`{rule.name}`" in text or rule.name == "not_yet", rule.name


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
    matrix = support_matrix()
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


def test_the_options_of_every_command_are_frozen():
    """A change here is a change for users: it belongs in CHANGELOG.md."""
    (subparsers,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: sorted(
            option for action in parser._actions for option in action.option_strings if option.startswith("--")
        )
        for name, parser in subparsers.choices.items()
    }
    assert found == {
        "init": ["--data", "--help", "--model", "--output"],
        "probe": ["--gpus", "--help", "--json", "--measure", "--output"],
        "plan": ["--allow", "--constraint", "--data", "--engine-files", "--gpus", "--hardware", "--help", "--html",
                 "--json", "--largest-batch", "--largest-model", "--longest-seq", "--method", "--nodes", "--partition",
                 "--seq-len", "--show", "--simulate", "--take", "--top", "--trial", "--verbose", "--vram"],
        "estimate": ["--help"],
        "train": ["--dry-run", "--gpus", "--hardware", "--head", "--help", "--here", "--json", "--node-rank", "--nodes",
                  "--resume", "--run-dir", "--take", "--trial", "--vram"],
        "submit": ["--account", "--chain", "--constraint", "--container-image", "--dry-run", "--gpus-per-node",
                   "--hardware", "--help", "--json", "--mail", "--nodes", "--partition", "--qos", "--reservation",
                   "--run-dir", "--sweep", "--time"],
        "fetch": ["--help", "--no-prepare"],
        "status": ["--help", "--json", "--sync"],
        "logs": ["--attempt", "--follow", "--help", "--lines", "--rank"],
        "watch": ["--help", "--json", "--once"],
        "ladder": ["--csv", "--gpus", "--help", "--html", "--json", "--rungs", "--steps", "--vram"],
        "profile": ["--gpus", "--help", "--json", "--out", "--steps", "--time", "--vram"],
        "cancel": ["--help", "--now"],
        "doctor": ["--help", "--json", "--quick"],
        "cache": ["--dry-run", "--help", "--json", "--older-than", "--prune"],
        "report": ["--help", "--html", "--json"],
        "ui": ["--help", "--no-browser", "--port"],
        "export": ["--checkpoint", "--dtype", "--format", "--help", "--json", "--merge", "--no-check", "--public",
                   "--push", "--quant"],
        "import": ["--base", "--config", "--dtype", "--help", "--json", "--kind"],
        "data": ["--help"],
        "chat": ["--checkpoint", "--help", "--max-new-tokens", "--system", "--temperature"],
        "workspace": ["--entity", "--help", "--json", "--project"],
        "schema": ["--help"],
    }  # fmt: skip


@pytest.mark.cold
def test_the_python_api_re_exports_and_loads_nothing_heavy():
    program = (
        "import sys, shardwise; assert set(shardwise.__all__) <= set(dir(shardwise)); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


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
