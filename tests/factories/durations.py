"""How long the tests took when they were last measured: what `make test-quick` selects, and in which order files run.

tests/durations.json is written by `pytest --durations-file tests/durations.json` over a whole run. It keeps the seconds
of every file and of every test of at least `SLOW_S`. Files run the longest first, so that two workers end together.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
SLOW_S = 0.1
QUICK_TEST_S = 0.25  # a test that takes longer is not quick
QUICK_FILE_S = 6.0  # of a file, the sum of its quick tests
ALWAYS_QUICK = ("tests/end_to_end/test_train.py::test_a_run_leaves_everything_it_promises",)
NOT_QUICK = (
    "tests/cuda/test_launches.py", "tests/cuda/test_step.py", "tests/distributed/", "tests/end_to_end/",
    "tests/slurm/test_training.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, metavar="FILE", help="keep the seconds of files and of slow tests")
    parser.addoption("--quick", action="store_true", help="only tests that took little when they were last measured")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path.resolve()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the quick tests where they are asked for, and puts the files that take longest first."""
    known = _read()
    if config.getoption("--quick"):
        chosen = _quick(items, known["slow"])
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if config.getoption("numprocesses", None):
        seconds = known["files"]
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    """The file of a test, as node ids name it."""
    return nodeid.partition("::")[0]


def _read() -> dict[str, dict[str, float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {"files": {}, "slow": {}}


def _quick(items: list[pytest.Item], slow: dict[str, float]) -> set[pytest.Item]:
    """Tests that took less than QUICK_TEST_S, outside of the folders whose fixtures train."""
    chosen = {
        item
        for item in items
        if item.nodeid in ALWAYS_QUICK
        or (not item.nodeid.startswith(NOT_QUICK) and slow.get(item.nodeid, 0.0) < QUICK_TEST_S)
    }
    seconds: dict[str, float] = defaultdict(float)
    for item in chosen:
        seconds[file_of(item.nodeid)] += slow.get(item.nodeid, 0.0)
    return {item for item in chosen if item.nodeid in ALWAYS_QUICK or seconds[file_of(item.nodeid)] <= QUICK_FILE_S}


class _Recorder:
    """Adds up set-up, call and teardown of every test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        files: dict[str, float] = defaultdict(float)
        for nodeid, seconds in self._seconds.items():
            files[file_of(nodeid)] += seconds
        content: dict[str, Any] = {
            "files": {name: round(seconds, 1) for name, seconds in sorted(files.items())},
            "slow": {name: round(each, 2) for name, each in sorted(self._seconds.items()) if each >= SLOW_S},
        }
        self._path.write_text(json.dumps(content, indent=1) + "\n")
