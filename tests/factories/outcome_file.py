"""A pytest plugin: `--outcome FILE` keeps what a run of tests came to, as JSON.

A test adds how far two runs are apart with `record_differences(record_property, [Difference(...), ...])`, faults from
outside with `record_property(FAULTS, {kind: {"tried": ..., "survived": ...}})`, and what it found of a member of a list
with `record_property(FINDING, (finding, member))`.
"""

import json
import platform
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from durations import file_of, function_of

from shardwise.launch.probe.host import read_host
from shardwise.trainer.spec.units import GIB

DIFFERENCES = "differences"
FAULTS = "faults"
FINDING, FINDINGS = "finding", "findings"
FAULT_NUMBERS = ("tried", "survived", "lost", "hung", "tracebacks", "outlived")
PACKAGES = ("shardwise", "torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "datasets")
_WORST_FIRST = ("failed", "skipped", "passed")


class Difference(NamedTuple):
    """How far the losses of a point were from those of its reference, and how far they may be."""

    group: str
    tolerance: float
    largest: float


def record_differences(record_property: Callable[[str, object], None], found: Iterable[Difference]) -> None:
    """Adds differences to the report of a test, as plain tuples: workers send nothing else."""
    record_property(DIFFERENCES, [tuple(each) for each in found])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, metavar="FILE", help="keep versions, machine, counts and seconds as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcome")
    if path is not None and not hasattr(config, "workerinput"):  # the process that starts workers hears of every test
        config.pluginmanager.register(OutcomeFile(config, path))


class OutcomeFile:
    """Hears of every test, and writes the file once the last has ended; also where the run was interrupted."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path.resolve()  # a test may change the working directory
        self._commit = _commit()  # files may change during the tests
        self._started = time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._reasons: Counter[str] = Counter()
        self._differences: dict[str, list[Difference]] = defaultdict(list)
        self._faults: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self._findings: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        outcomes = (report.outcome, self._outcomes.get(report.nodeid, report.outcome))
        self._outcomes[report.nodeid] = min(outcomes, key=_WORST_FIRST.index)
        if report.skipped:
            self._reasons[_reason(report)] += 1
        if report.when == "call":
            properties: dict[str, Any] = dict(report.user_properties)
            self._differences[file] += [Difference(*each) for each in properties.get(DIFFERENCES, ())]
            for kind, counts in properties.get(FAULTS, {}).items():
                self._faults[function_of(report.nodeid)][kind].update(counts)
            found: list[Any] = [value for name, value in report.user_properties if name == FINDING]
            for finding, member in found:
                self._findings[function_of(report.nodeid)][finding].append(member)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._content(int(exitstatus)), indent=1) + "\n")

    def _content(self, exit_code: int) -> dict[str, Any]:
        option, faults = self._config.option, sorted(self._faults.items())
        return {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "selected": {"marks": option.markexpr, "keyword": option.keyword, "paths": self._paths()},
            "commit": self._commit,
            **facts(),
            "exit_code": exit_code,
            "seconds": round(time.monotonic() - self._started),
            **self._counts(self._outcomes.values()),
            "files": self._files(),
            "tests": self._cases(),
            "failed_tests": [name for name, outcome in self._outcomes.items() if outcome == "failed"],
            "skipped_because": dict(self._reasons),
            "differences": {file: summary(found) for file, found in self._differences.items() if found},
            "faults": {test: {kind: dict(counts) for kind, counts in found.items()} for test, found in faults},
            FINDINGS: {
                test: {finding: sorted(members) for finding, members in sorted(found.items())}
                for test, found in sorted(self._findings.items())
            },
        }

    def _paths(self) -> list[str]:
        """What the command line named, where it named anything: testpaths are everything."""
        asked = self._config.args_source is pytest.Config.ArgsSource.ARGS
        return [Path(name).name if Path(name).is_absolute() else name for name in self._config.args] if asked else []

    def _files(self) -> dict[str, dict[str, Any]]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, outcome in self._outcomes.items():
            by_file[file_of(name)].append(outcome)
        seconds = self._seconds
        return {
            file: {**self._counts(found), "seconds": round(seconds[file], 1)} for file, found in sorted(by_file.items())
        }

    def _cases(self) -> dict[str, int]:
        passed = (function_of(name) for name, outcome in self._outcomes.items() if outcome == "passed")
        return dict(sorted(Counter(passed).items()))

    def _counts(self, outcomes: Iterable[str]) -> dict[str, int]:
        found = Counter(outcomes)
        return {name: found[name] for name in ("passed", "failed", "skipped")}


def summary(differences: list[Difference]) -> dict[str, Any]:
    """By what may differ: the number of points, the largest difference of all, and that of every group."""
    found: dict[str, dict[str, Any]] = {}
    for group, tolerance, largest in sorted(differences, key=lambda each: each.tolerance):
        row = found.setdefault(f"at most {tolerance:g}", {"points": 0, "largest": 0.0, "groups": {}})
        row["points"] += 1
        row["largest"] = max(largest, row["largest"])
        row["groups"][group] = max(largest, row["groups"].get(group, 0.0))
    return found


def fault_rows(folder: Path) -> list[str]:
    """The rows of the table in docs/surviving.md, from the newest outcome that has each kind of fault."""
    newest: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("test-long-*.json"), key=lambda path: json.loads(path.read_text())["date"]):
        for found in json.loads(path.read_text()).get(FAULTS, {}).values():
            newest |= found
    grouped: dict[str, list[str]] = defaultdict(list)
    for kind in newest:
        grouped[kind.partition(": ")[0]].append(kind)
    rows = []
    for kinds in grouped.values():
        tried, survived, *failures = (sum(newest[kind].get(name, 0) for kind in kinds) for name in FAULT_NUMBERS)
        group, colon, _ = kinds[0].partition(": ")
        names = group + colon + ", ".join(kind.partition(": ")[2] for kind in kinds)  # GROUP: KIND, KIND
        rows.append(f"| {names} | {tried} | {survived} | {sum(failures)} |")
    return rows


def promised(page: str, folder: Path) -> Iterator[tuple[str, int, int]]:
    """The rows of docs/promises.md: each promise, the number of cases it states, and that of the outcome it names.

    A row without a link states the cases of its tests in the `promises-*.json`, the newest with each; one with a link
    those in the linked outcome, or the faults that they tried. What was lost, hung, outlived or ended in a traceback is
    subtracted.
    """
    newest: dict[str, int] = {}
    for path in sorted(folder.glob("promises-*.json")):
        newest |= json.loads(path.read_text())["tests"]
    row = r"^\| (.+) \| (`tests/.+`) \| (\d+)(?: \[.*/(.+)\))? \|$"
    for promise, tests, stated, link in re.findall(row, page, re.MULTILINE):
        names = re.findall(r"`(tests/[^`]+)`", tests)
        outcome: dict[str, Any] = json.loads((folder / link).read_text()) if link else {"tests": newest}
        faults = [each for name in names for each in outcome.get(FAULTS, {}).get(name, {}).values()]
        if faults:
            tried = sum(each["tried"] - sum(each.get(name, 0) for name in FAULT_NUMBERS[2:]) for each in faults)
        else:
            tried = sum(outcome["tests"].get(name, 0) for name in names)
        yield promise, int(stated), tried


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "no reason"


def _commit() -> str | None:
    words = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        answer = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() or None


def facts() -> dict[str, Any]:
    host = read_host()
    ram_gib = None if host.ram_bytes is None else round(host.ram_bytes / GIB)
    return {
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "machine": {"cpu": host.cpu_name, "cores": host.num_cores, "ram_gib": ram_gib},
    }
