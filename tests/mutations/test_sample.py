"""Random faults change one place of a function each, and are run by the tests that execute it."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import coverage
import pytest

HERE = Path(__file__).parent
MODULE = '''"""Text, which no mutant changes."""

LIMIT = 3


def clipped(values: list[int], *, limit: int = LIMIT) -> list[int]:
    """The values up to a limit."""
    if not values:
        raise ValueError(f"none of {limit + 1}")
    found = []
    for value in values:
        if value < limit and value > 0:
            found.append(value + 1)
    return found
'''


@pytest.fixture(scope="module")
def sample() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        spec = importlib.util.spec_from_file_location("sample", HERE / "sample.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_each_edit_is_a_valid_module_that_differs_in_one_function(sample):
    found = {MODULE[each.start : each.end]: each.new for each in sample.edits(MODULE)}
    assert found == {
        "not values": "(values)",
        "value < limit and value > 0": "((value < limit) or (value > 0))",
        "value < limit": "(value <= limit)",
        "value > 0": "(value >= 0)",
        "0": "1",
        "found.append(value + 1)": "pass",
        "value + 1": "(value - 1)",
        "1": "2",
        "return found": "return None",
    }
    for edit in sample.edits(MODULE):
        changed = MODULE[: edit.start] + edit.new + MODULE[edit.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(MODULE))


def test_a_mutant_is_run_by_the_files_that_execute_it_the_nearest_first_within_its_budget(sample, tmp_path):
    product = tmp_path / "launch" / "probe" / "disks.py"
    files = ("tests/launch/probe/test_disks.py", "tests/test_far.py", "tests/test_dear.py", "tests/test_other.py")
    for path in (product, *(tmp_path / file for file in files)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE)
    data = coverage.CoverageData(str(tmp_path / "data"))
    for file, line in zip(files, (13, 13, 13, 10), strict=True):
        data.set_context(file)
        data.add_lines({str(product): [line]})
    seconds = dict(zip(files, (9.0, 1.0, 50.0, 1.0), strict=True))
    old = "            found.append(value + 1)\n"
    mutant = sample.Mutant(id="m", file="launch/probe/disks.py", line=13, old=old, new=old.replace("+", "-"))
    assert sample.tests_of(mutant, tmp_path, data, seconds, 20.0) == files[:2]


def test_the_mutants_that_are_kept_have_names_of_their_own_and_change_something(sample):
    mutants = sample.msgspec.json.decode(sample.MUTANTS.read_bytes(), type=list[Any])
    assert len({each["id"] for each in mutants}) == len(mutants) == sample.NUM_MUTANTS
    assert all(each["old"] != each["new"] for each in mutants)
