"""`--outcome FILE` keeps what really happened in a run of tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from outcome_file import fault_rows, promised

REPOSITORY = Path(__file__).parents[1]
TESTS = """
import pytest
from outcome_file import FAULTS, FINDING, Difference, record_differences

def test_passes(record_property):
    record_property(FAULTS, {"kill": {"tried": 2, "survived": 2}})
    record_property(FINDING, ("packed", "llama"))
    record_differences(record_property, [Difference("zero2 adamw", 1e-5, 3e-6), Difference("zero2 muon", 1e-4, 4e-5)])

def test_fails(record_property):
    record_property(FAULTS, {"kill": {"tried": 3, "survived": 1, "lost": 2}})
    record_differences(record_property, [Difference("zero2 adamw", 1e-5, 0.5)])
    raise AssertionError

@pytest.mark.skip(reason="needs two GPUs")
def test_needs_more(): pass
"""


def test_it_keeps_what_passed_and_failed_the_largest_differences_findings_and_faults(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "outcome_file", "-p", "no:cacheprovider", "--outcome", "new/outcome.json", "-n", "1"]
    words = [sys.executable, "-m", "pytest", *options, "-k", "test_"]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'tests' / 'factories'}:{REPOSITORY}"}
    assert subprocess.run(words, env=environment, cwd=tmp_path, check=False).returncode == 1
    outcome = json.loads((tmp_path / "new" / "outcome.json").read_text())
    counts = {"passed": 1, "failed": 1, "skipped": 1}
    assert {name: outcome[name] for name in counts} == counts
    assert {name: outcome["files"]["test_some.py"][name] for name in counts} == counts
    assert outcome["exit_code"] == 1 and outcome["versions"].keys() >= {"python", "shardwise", "torch", "deepspeed"}
    assert outcome["tests"] == {"test_some.py::test_passes": 1}
    assert outcome["failed_tests"] == ["test_some.py::test_fails"]
    assert outcome["skipped_because"] == {"needs two GPUs": 1}
    assert outcome["differences"]["test_some.py"] == {
        "at most 1e-05": {"points": 2, "largest": 0.5, "groups": {"zero2 adamw": 0.5}},
        "at most 0.0001": {"points": 1, "largest": 4e-05, "groups": {"zero2 muon": 4e-05}},
    }
    assert outcome["findings"] == {"test_some.py::test_passes": {"packed": ["llama"]}}
    assert outcome["faults"] == {
        "test_some.py::test_fails": {"kill": {"tried": 3, "survived": 1, "lost": 2}},
        "test_some.py::test_passes": {"kill": {"tried": 2, "survived": 2}},
    }


def test_the_documentation_has_the_faults_of_the_newest_outcomes() -> None:
    rows = fault_rows(REPOSITORY / "benchmarks" / "results")
    page = (REPOSITORY / "docs" / "surviving.md").read_text().splitlines()
    assert rows and set(rows) <= set(page), "\n".join(rows)


def test_every_promise_has_a_test_and_the_number_of_cases_of_a_committed_outcome():
    page = (REPOSITORY / "docs" / "promises.md").read_text()
    rows = list(promised(page, REPOSITORY / "benchmarks" / "results"))
    assert len(rows) == len(re.findall(r"^\| .*`tests/", page, re.MULTILINE)) > 50
    assert [(promise, stated) for promise, stated, _ in rows] == [(promise, tried) for promise, _, tried in rows]
    assert not [promise for promise, stated, _ in rows if stated == 0]
