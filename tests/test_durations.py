"""What the tests cost is known, and stays within the budgets of `make test` and `make test-quick`."""

import re
from pathlib import Path

import pytest
from durations import BUDGETS_S, files_without_durations, over_budget, quick_functions, read_durations


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
