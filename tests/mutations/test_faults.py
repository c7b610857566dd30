"""Seeded faults apply to the product, and the runner tells what came of each."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
FAULTS = [fault for path in sorted(HERE.glob("*.toml")) for fault in tomllib.loads(path.read_text())["fault"]]
NUM_FAULTS = 237
FAULT = """
[[fault]]
id = "{id}"
file = "product/sums.py"
consequence = "Sums are wrong."
old = "return a + b"
new = "{new}"
tests = ["tests/test_sums.py"]
"""


def problem_of(fault: dict[str, Any]) -> str | None:
    product, old, new = REPOSITORY / fault["file"], fault["old"], fault["new"]
    if fault["file"].startswith(("tests/", "benchmarks/", "docs/")):
        return "is not of the product"
    text = product.read_text()
    if text.count(old) != 1:
        return f"{fault['file']} has changed: mend the fault, or replace it by another"
    if re.sub("#.*", "", new).split() == re.sub("#.*", "", old).split():
        return "changes no code"
    if product.suffix == ".py":
        ast.parse(text.replace(old, new))
    if not fault["tests"] or not all((REPOSITORY / test.partition("::")[0]).is_file() for test in fault["tests"]):
        return "names a test that is not there"
    return None if fault["consequence"].endswith(".") else "its consequence is no sentence"


def test_every_fault_changes_one_place_of_the_product_and_names_the_tests_that_are_there():
    assert len({fault["id"] for fault in FAULTS}) == len(FAULTS) >= NUM_FAULTS
    assert {fault["id"]: problem for fault in FAULTS if (problem := problem_of(fault))} == {}


def test_no_room_of_the_product_is_without_a_fault():
    rooms = {
        path.parent.relative_to(REPOSITORY)
        for name in ("launch", "slurm", "trainer", "shardwise")
        for path in (REPOSITORY / name).rglob("*.py")
        if path.read_text().count("\n") > 1  # not only what says what a folder is for
    }
    assert rooms - {Path(fault["file"]).parent for fault in FAULTS} == set()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A product of one function, and a test of it that sees some faults."""
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["gpu", "long"]\n',
        "product/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/test_sums.py": "from product.sums import add\n\ndef test_add():\n    assert add(2, 2) == 4\n",
        "tests/mutations/faults.toml": FAULT.format(id="minus", new="return a - b"),
    }
    for name, content in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(content)
    (tmp_path / "scratch").mkdir()
    return tmp_path / "project"


def run(project: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of the runner on a project, with a folder for temporary files."""
    words = [sys.executable, str(HERE / "run.py"), "--project", str(project), "--no-preload", *options]
    environment = {**os.environ, "TMPDIR": str(project.parent / "scratch")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.cold
def test_a_fault_that_nobody_catches_has_survived_and_one_that_proves_nothing_is_broken(project: Path, tmp_path: Path):
    with (project / "tests/mutations/faults.toml").open("a") as file:
        file.write(FAULT.format(id="times", new="return a * b"))
        file.write(FAULT.format(id="dies", new="import os; os._exit(0)"))
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    code, output = run(project, "--outcome", str(tmp_path / "outcome.json"))
    assert code == 1, output
    faults = json.loads((tmp_path / "outcome.json").read_text())["faults"]
    found = {name: fault["outcome"] for name, fault in faults.items()}
    assert found == {"minus": "caught", "times": "survived", "dies": "broken"}
    assert faults["minus"]["detail"] == "tests/test_sums.py::test_add"
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before
    assert not any((tmp_path / "scratch").iterdir())
