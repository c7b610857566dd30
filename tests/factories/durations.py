"""A pytest plugin: what each test costs, in which order files run, what `make test-quick` selects, and the budgets.

tests/durations.json has the seconds of every test function by file: of the CPU, in the test and in all programs that it
starts, and those in which the test waits while a core is idle; `pytest --durations-file=FILE` writes them.
`--budget NAME` adds up what the run cost: in continuous integration a run above its budget fails.
"""

import json
import os
import re
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
BUDGETS_S = {"test": 1300.0, "test-quick": 250.0}
QUICK_TEST_S = 1.0  # of a test function with all its cases; one that takes longer is not quick
QUICK_FILE_S = 6.0  # of a file, the sum of its quick tests
ALWAYS_QUICK = ("tests/end_to_end/test_train.py::test_a_run_leaves_everything_it_promises",)
NOT_QUICK = (
    "tests/cuda/test_launches.py", "tests/cuda/test_step.py", "tests/distributed/", "tests/end_to_end/",
    "tests/slurm/test_training.py",
)  # fmt: skip
NUM_DEAREST = 10
_RUNS_VARY = 0.1  # two runs of the same tests differ by this share; what is recorded has to be within the budget
_COMPARED_S = 1.0  # a file that takes less says little of the speed of a machine
CPU_SECONDS = "SHARDWISE_TESTS_CPU_SECONDS"  # a file, to which the warm process appends those of each fork
_NOT_RUN = re.compile(r"^pytestmark = .*pytest\.mark\.(gpu|long)\b", re.MULTILINE)
Durations = Mapping[str, Mapping[str, float]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, metavar="FILE", help="keep the seconds of each test function")
    parser.addoption("--quick", action="store_true", help="only tests that took little when they were last measured")
    parser.addoption("--budget", choices=sorted(BUDGETS_S), help="compare the seconds of the run with this budget")


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers:
        config.pluginmanager.register(_Clock())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the quick tests where they are requested, and puts unknown files and those that take longest first."""
    known = read_durations()
    if config.getoption("--quick"):
        functions = quick_functions(known)
        chosen = [item for item in items if function_of(item.nodeid) in functions]
        config.hook.pytest_deselected(items=[item for item in items if function_of(item.nodeid) not in functions])
        items[:] = chosen
    if config.getoption("numprocesses", None):
        items.sort(key=lambda item: -file_seconds(known, file_of(item.nodeid)))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def read_durations(path: Path = DURATIONS) -> Durations:
    return json.loads(path.read_text()) if path.exists() else {}


def file_seconds(known: Durations, file: str) -> float:
    return sum(known[file].values()) if file in known else float("inf")


def quick_functions(known: Durations) -> set[str]:
    """Test functions that take at most QUICK_TEST_S, of files whose quick tests take at most QUICK_FILE_S."""
    chosen = set(ALWAYS_QUICK)
    for file, functions in known.items():
        quick = {name: seconds for name, seconds in functions.items() if seconds <= QUICK_TEST_S}
        if not file.startswith(NOT_QUICK) and sum(quick.values()) <= QUICK_FILE_S:
            chosen |= {f"{file}::{name}" for name in quick}
    return chosen


def over_budget(budget_s: float, measured: Durations, known: Durations) -> list[str]:
    """Lines that name the ten dearest tests, if a run took longer than its budget; otherwise none."""
    recorded = {
        file: sum(known.get(file, {}).get(name, 0.0) for name in functions) for file, functions in measured.items()
    }
    ratios = [file_seconds(measured, file) / each for file, each in recorded.items() if each >= _COMPARED_S]
    slowness = max(1.0, statistics.median(ratios)) if ratios else 1.0
    total = sum(file_seconds(measured, file) for file in measured) / slowness
    if total <= budget_s:
        return []
    seconds = {f"{file}::{name}": each / slowness for file in measured for name, each in measured[file].items()}
    dearest = sorted(seconds, key=lambda name: -seconds[name])[:NUM_DEAREST]
    return [
        f"the tests took {total:.0f} worker seconds, their budget is {budget_s:.0f}; the dearest:",
        *(f"{seconds[name]:8.1f} s  {name}" for name in dearest),
    ]


def files_without_durations(known: Durations) -> list[str]:
    """Test files of the repository that `known` lacks, but for those whose every test needs a GPU or is long."""
    root = DURATIONS.parents[1]
    paths = (path for path in sorted(DURATIONS.parent.rglob("test_*.py")) if not _NOT_RUN.search(path.read_text()))
    return [name for name in (str(path.relative_to(root)) for path in paths) if name not in known]


def merged(known: Durations, measured: Durations) -> Durations:
    """`known` with what was measured, without functions that a measured file has no longer."""
    found = dict(known)
    for file, functions in measured.items():
        path = DURATIONS.parents[1] / file
        text = path.read_text() if path.is_file() else ""
        old = {name: each for name, each in known.get(file, {}).items() if f"def {name.rpartition('::')[2]}(" in text}
        found[file] = {**old, **functions}
    return found


class Used(NamedTuple):
    """Seconds so far: of the clock, of the CPU for this process and its children, and of idle cores."""

    wall: float
    cpu: float
    idle: float

    def since(self, last: "Used") -> float:
        """Seconds that a worker needed since `last`: of the CPU, and those in which it waited beside an idle core."""
        cpu = self.cpu - last.cpu
        waited = min(self.wall - last.wall - cpu, self.idle - last.idle)
        return cpu + max(0.0, waited)


class _Clock:
    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="shardwise-cpu-seconds-")
        self._forks = os.fdopen(descriptor)
        self._forks_seconds = 0.0
        self._path = Path(name)
        os.environ[CPU_SECONDS] = name
        self._last = self._used()

    def pytest_runtest_logstart(self) -> None:
        self._last = self._used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now, last = self._used(), self._last
        report.worker_seconds = now.since(last)  # type: ignore[attr-defined]  # xdist passes on what it finds
        self._last = now
        return report

    def pytest_unconfigure(self) -> None:
        os.environ.pop(CPU_SECONDS, None)
        self._forks.close()
        self._path.unlink(missing_ok=True)

    def _used(self) -> Used:
        self._forks_seconds += sum(map(float, self._forks.read().split()))
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(each.ru_utime + each.ru_stime for each in usage) + self._forks_seconds
        cores = psutil.cpu_times()
        return Used(time.monotonic(), cpu, cores.idle + getattr(cores, "iowait", 0.0))  # or waiting for a disk


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._problems: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = function_of(report.nodeid).partition("::")
        self._seconds[file][name] += getattr(report, "worker_seconds", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path, budget = self._config.getoption("--durations-file"), self._config.getoption("--budget")
        known = read_durations()
        if budget is not None:
            self._problems = over_budget(BUDGETS_S[budget] * (1 + _RUNS_VARY), self._seconds, known)
            self._problems += [
                f"{name}: tests/durations.json lacks it; add --durations-file=tests/durations.json to a run of it"
                for name in files_without_durations(known)
            ]
            if self._problems and os.environ.get("SHARDWISE_CI") and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path is not None:
            durations = self._seconds if self._is_whole(session) else merged(read_durations(path), self._seconds)
            rounded = {
                file: {name: round(each, 2) for name, each in sorted(durations[file].items())}
                for file in sorted(durations)
            }
            path.write_text(json.dumps(rounded, indent=0) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._problems:
            terminalreporter.section("budget of the tests (tests/factories/durations.py)")
            terminalreporter.write("\n".join([*self._problems, ""]))

    def _is_whole(self, session: pytest.Session) -> bool:
        options = self._config.option
        is_selected = (
            options.keyword or options.deselect or options.quick or getattr(options, "changed", None) is not None
        )
        return (
            self._config.args_source is not pytest.Config.ArgsSource.ARGS
            and not is_selected
            and session.exitstatus == pytest.ExitCode.OK
        )
