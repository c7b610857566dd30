"""What the tests cost is known, and stays within the budgets of `make test` and `make test-quick`."""

import os
import re
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
    merged,
    over_budget,
    quick_functions,
    read_durations,
)

KNOWN = {"tests/test_a.py": {"test_fast": 0.5, "test_slow": 9.0}, "tests/test_b.py": {"test_other": 2.0}}
BUSY = """
import time

def test_that_computes():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
"""


def recorded() -> dict[str, float]:
    return {f"{file}::{name}": each for file, tests in read_durations().items() for name, each in tests.items()}


def test_the_recorded_seconds_are_within_the_budgets():
    known, seconds = read_durations(), recorded()
    assert over_budget(BUDGETS_S["test"], known, known) == []
    assert sum(seconds.get(name, 0.0) for name in quick_functions(known)) <= BUDGETS_S["test-quick"]


def test_the_files_with_durations_are_those_that_are_there():
    root = Path(__file__).parents[1]
    assert files_without_durations(read_durations()) == []
    assert [file for file in read_durations() if not (root / file).is_file()] == []


@pytest.mark.parametrize("target", sorted(BUDGETS_S))
def test_the_table_of_commands_has_the_seconds_of_today(target: str):
    seconds = recorded()
    selected = quick_functions(read_durations()) & seconds.keys() if target == "test-quick" else seconds
    table = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    (stated,) = re.findall(rf"^\| [^|]* \| `make {target}`[^|]*\| ([\d,]+) worker seconds", table, re.MULTILINE)
    assert int(stated.replace(",", "")) == pytest.approx(sum(seconds[name] for name in selected), rel=0.1)


def test_unknown_is_slow_and_so_is_a_file_of_many_quick_tests():
    assert file_seconds(KNOWN, "tests/test_new.py") > file_seconds(KNOWN, "tests/test_a.py") == 9.5
    many = {f"test_{number}": 0.9 for number in range(int(QUICK_FILE_S / 0.9) + 1)}
    quick = quick_functions({**KNOWN, "tests/test_many.py": many})
    assert "tests/test_a.py::test_fast" in quick
    assert not {"tests/test_a.py::test_slow", "tests/test_a.py::test_new", "tests/test_new.py::test_new"} & quick
    assert not any("test_many" in name for name in quick)


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


def test_quick_tests_are_compared_with_the_same_tests_on_a_slower_machine():
    known = {"tests/test_a.py": {"test_quick": 1.0, "test_dear": 9.0}}
    assert over_budget(1.5, {"tests/test_a.py": {"test_quick": 3.0}}, known) == []


def test_a_part_of_a_run_renews_what_it_measured_and_forgets_what_is_gone():
    file, own = (
        "tests/test_durations.py",
        test_a_part_of_a_run_renews_what_it_measured_and_forgets_what_is_gone.__name__,
    )
    known = {file: {"test_gone": 1.0, own: 1.0}, "tests/other.py": {"test_it": 1.0}}
    renewed = merged(known, {file: {"test_more": 2.0}})
    assert renewed == {file: {own: 1.0, "test_more": 2.0}, "tests/other.py": {"test_it": 1.0}}


@pytest.mark.parametrize(("budget_s", "code"), [(0.2, 1), (60.0, 0)])
def test_continuous_integration_fails_above_the_budget(tmp_path: Path, budget_s: float, code: int):
    source = Path(__file__).with_name("factories") / "durations.py"
    text = source.read_text().replace('"test": 1300.0', f'"test": {budget_s}')
    assert text != source.read_text()
    (tmp_path / "tests" / "factories").mkdir(parents=True)
    (tmp_path / "tests" / "factories" / "durations.py").write_text(text)
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
    assert ("tests/test_busy.py::test_that_computes" in done.stdout) is bool(code)
