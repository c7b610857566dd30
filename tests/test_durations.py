"""What the tests cost is known, and stays within the budgets of `make test` and `make test-quick`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from durations import (
    BUDGETS_S,
    QUICK_FILE_S,
    Used,
    file_seconds,
    files_without_durations,
    function_of,
    over_budget,
    quick_functions,
    read_durations,
)

KNOWN = {"tests/test_a.py": {"test_fast": 0.5, "test_slow": 9.0}, "tests/test_b.py": {"test_other": 2.0}}
BUSY = """
import time

def test_that_computes_for_two_seconds():
    end = time.process_time() + 2.0
    while time.process_time() < end:
        pass

def test_that_does_little():
    pass
"""


def test_the_recorded_seconds_are_within_the_budgets():
    known = read_durations()
    quick = quick_functions(known)
    seconds = {f"{file}::{name}": each for file, functions in known.items() for name, each in functions.items()}
    assert over_budget(BUDGETS_S["test"], known, known) == []
    assert sum(seconds.get(name, 0.0) for name in quick) <= BUDGETS_S["test-quick"]


def test_every_test_file_has_durations():
    assert files_without_durations(read_durations()) == []


def test_no_duration_is_of_a_file_that_has_gone():
    root = Path(__file__).parents[1]
    assert [file for file in read_durations() if not (root / file).is_file()] == []


@pytest.mark.parametrize("target", sorted(BUDGETS_S))
def test_the_table_of_commands_has_the_seconds_of_today(target: str):
    known = read_durations()
    seconds = {f"{file}::{name}": each for file, functions in known.items() for name, each in functions.items()}
    selected = quick_functions(known) & seconds.keys() if target == "test-quick" else seconds.keys()
    table = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    (stated,) = re.findall(rf"^\| [^|]* \| `make {target}`[^|]*\| ([\d,]+) worker seconds", table, re.MULTILINE)
    assert int(stated.replace(",", "")) == pytest.approx(sum(seconds[name] for name in selected), rel=0.1)


def test_unknown_is_slow():
    assert file_seconds(KNOWN, "tests/test_new.py") > file_seconds(KNOWN, "tests/test_a.py") == 9.5
    quick = quick_functions(KNOWN)
    assert "tests/test_a.py::test_fast" in quick
    assert not {"tests/test_a.py::test_slow", "tests/test_a.py::test_new", "tests/test_new.py::test_new"} & quick


def test_a_file_of_many_quick_tests_is_not_quick():
    many = {f"test_{number}": 0.9 for number in range(int(QUICK_FILE_S / 0.9) + 1)}
    assert not any("test_many" in name for name in quick_functions({"tests/test_many.py": many}))


def test_a_case_counts_for_its_function():
    assert function_of("tests/test_a.py::test_x[1-[2]]") == "tests/test_a.py::test_x"


@pytest.mark.parametrize(
    ("wall", "cpu", "idle", "expected"),
    [
        pytest.param(10.0, 1.0, 9.0, 10.0, id="a test that sleeps beside an idle core"),
        pytest.param(10.0, 1.0, 0.0, 1.0, id="a test that waits for a core"),
        pytest.param(10.0, 15.0, 4.0, 15.0, id="two ranks beside each other"),
    ],
)
def test_seconds_are_of_the_test_and_not_of_the_programs_beside_it(wall, cpu, idle, expected):
    assert Used(100.0 + wall, 50.0 + cpu, 30.0 + idle).since(Used(100.0, 50.0, 30.0)) == pytest.approx(expected)


def test_a_run_above_its_budget_names_the_dearest_test_and_a_slower_machine_is_no_reason():
    dearer = {**KNOWN, "tests/test_c.py": {"test_dear": 30.0}}
    assert over_budget(20.0, KNOWN, KNOWN) == []
    assert "tests/test_c.py::test_dear" in over_budget(20.0, dearer, KNOWN)[1]
    slower = {file: {name: 3 * each for name, each in functions.items()} for file, functions in KNOWN.items()}
    assert over_budget(20.0, slower, KNOWN) == []


@pytest.mark.parametrize(("budget_s", "code"), [(0.5, 1), (60.0, 0)])
def test_continuous_integration_fails_above_the_budget(tmp_path: Path, budget_s: float, code: int):
    factories = tmp_path / "tests" / "factories"
    factories.mkdir(parents=True)
    source = Path(__file__).with_name("factories") / "durations.py"
    text = source.read_text()
    assert '"test": 1300.0' in text
    shutil.copy(source, factories)
    (factories / "durations.py").write_text(text.replace('"test": 1300.0', f'"test": {budget_s}'))
    (tmp_path / "tests" / "test_busy.py").write_text(BUSY)
    (tmp_path / "tests" / "durations.json").write_text('{"tests/test_busy.py": {}}')
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["tests/factories"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "durations", "--budget", "test", "tests"],
        cwd=tmp_path,
        env={**os.environ, "SHARDWISE_CI": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("tests/test_busy.py::test_that_computes_for_two_seconds" in done.stdout) is bool(code)
