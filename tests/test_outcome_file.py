"""`--outcome FILE` keeps what really happened in a run of tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outcome_file import fault_rows, promised
from zoo_outcome import Found, differences

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import pytest
from outcome_file import FAULTS, FINDING, Difference, record_differences

@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")

def test_passes(record_property):
    record_differences(record_property, [Difference("zero2 adamw", 1e-5, 3e-6), Difference("zero2 lion", 1e-5, 2e-6)])

def test_passes_too(record_property):
    record_property(FAULTS, {"kill": {"tried": 2, "survived": 2}})
    record_property(FINDING, ("packed", "llama"))
    record_differences(record_property, [Difference("zero2 adamw", 1e-5, 1e-6), Difference("zero2 muon", 1e-4, 4e-5)])

def test_fails(record_property):
    record_property(FAULTS, {"kill": {"tried": 3, "survived": 1, "lost": 2}})
    record_differences(record_property, [Difference("zero3 adamw", 1e-5, 0.5)])
    raise AssertionError

def test_fails_when_it_has_passed(broken): pass

@pytest.mark.skip(reason="needs two GPUs")
def test_needs_more(): pass

@pytest.mark.xfail(reason="a defect upstream", strict=True)
def test_of_a_defect(): raise AssertionError
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    retained = folder / "new" / "outcome.json"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "outcome_file",
        "-p",
        "no:cacheprovider",
        "--outcome",
        str(retained),
        "-n",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'tests' / 'factories'}:{REPOSITORY}"}
    answer = subprocess.run(
        [*argv, "-k", "test_"], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1, answer.stdout + answer.stderr
    return json.loads(retained.read_text())


def test_it_counts_what_passed_what_failed_and_what_was_skipped(outcome):
    counts = {"passed": 2, "failed": 2, "skipped": 2}
    assert {name: outcome[name] for name in counts} == counts
    assert {name: outcome["files"]["test_some.py"][name] for name in counts} == counts
    assert outcome["tests"] == {"test_some.py::test_passes": 1, "test_some.py::test_passes_too": 1}
    assert outcome["exit_code"] == 1 and outcome["versions"].keys() >= {"python", "shardwise", "torch", "deepspeed"}
    assert outcome["selected"] == {"marks": "", "keyword": "test_", "paths": []}
    assert outcome["failed_tests"] == ["test_some.py::test_fails", "test_some.py::test_fails_when_it_has_passed"]
    assert outcome["skipped_because"] == {"needs two GPUs": 1, "expected to fail: a defect upstream": 1}


def test_it_keeps_the_largest_difference_of_every_group(outcome):
    """Those of a test that failed as well."""
    assert outcome["differences"]["test_some.py"] == {
        "at most 1e-05": {
            "points": 4, "largest": 0.5, "groups": {"zero2 adamw": 3e-06, "zero2 lion": 2e-06, "zero3 adamw": 0.5},
        },
        "at most 0.0001": {"points": 1, "largest": 4e-05, "groups": {"zero2 muon": 4e-05}},
    }  # fmt: skip


def test_it_lists_the_members_of_every_finding(outcome):
    assert outcome["findings"] == {"test_some.py::test_passes_too": {"packed": ["llama"]}}


def test_it_keeps_the_faults_that_each_test_tried_and_the_documentation_has_those_of_the_newest_files(outcome):
    assert outcome["faults"] == {
        "test_some.py::test_fails": {"kill": {"tried": 3, "survived": 1, "lost": 2}},
        "test_some.py::test_passes_too": {"kill": {"tried": 2, "survived": 2}},
    }
    rows = fault_rows(REPOSITORY / "benchmarks" / "results")
    page = (REPOSITORY / "docs" / "surviving.md").read_text().splitlines()
    assert rows and set(rows) <= set(page), "\n".join(rows)


def test_every_promise_has_a_test_and_the_number_of_cases_of_a_committed_outcome():
    page = (REPOSITORY / "docs" / "promises.md").read_text()
    rows = list(promised(page, REPOSITORY / "benchmarks" / "results"))
    assert len(rows) == len(re.findall(r"^\| .*`tests/", page, re.MULTILINE)) > 50
    assert [(promise, stated) for promise, stated, _ in rows] == [(promise, tried) for promise, _, tried in rows]
    assert not [promise for promise, stated, _ in rows if stated == 0]


def test_a_type_that_no_longer_trains_or_is_no_longer_equal_in_a_way_is_lost():
    old = {"bert": Found("not trained: its loss"), "llama": Found("packed", ("FSDP2",)), "lfm2": Found("packed")}
    new = {"lfm2": Found("not packed: its state"), "llama": Found("packed"), "new": Found("not trained: its head")}
    assert [(is_lost, line.partition(": ")[0]) for is_lost, line in differences(old, new)] == [
        (False, "missing or failed"), (False, "changed"), (True, "changed"), (False, "new")
    ]  # fmt: skip
    assert [is_lost for is_lost, _ in differences(old, {"bert": old["bert"]})] == [True, True]
    assert [is_lost for is_lost, _ in differences(new, {**new, "lfm2": Found("not trained: its head")})] == [True]
