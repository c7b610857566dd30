"""A pytest plugin: `--product-coverage FOLDER` keeps which lines and branches of the product each test file executes.

The context of the data is the test file, also in the programs that a test starts, warm ones included; a program that is
killed leaves none. Each process writes a file of its own into the folder. This joins them, and writes the share of the
branches of each room that were executed:

    python tests/factories/product_coverage.py FOLDER OUTCOME.json
"""

import json
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
PROCESS_CONFIG = "COVERAGE_PROCESS_CONFIG"  # read by coverage at the start of an interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--product-coverage", type=Path, metavar="FOLDER", help="keep the lines and branches that each file executes"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("product_coverage")
    only_starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if folder is not None and not only_starts_workers:
        config.pluginmanager.register(_Measurement(folder.resolve()))


class _Measurement:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        data_file, source = str(folder / "data"), [str(ROOT / name) for name in ("launch", "slurm", "trainer")]
        self._coverage = coverage.Coverage(
            data_file=data_file, data_suffix=True, branch=True, config_file=False, source=source, messages=False
        )
        self._coverage.config.disable_warnings = ["no-data-collected", "module-not-measured", "module-not-imported"]
        self._coverage.start()
        self._file = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            self._file = file
            self._coverage.switch_context(file)
            self._coverage.config.context = file  # of programs that are started from here on
            self._coverage.config.patch = ["_exit"]  # by which ranks and workers end
            os.environ[PROCESS_CONFIG] = self._coverage.config.serialize()
        return (yield)

    def pytest_unconfigure(self) -> None:
        os.environ.pop(PROCESS_CONFIG, None)
        self._coverage.stop()
        self._coverage.save()


def combine(folder: Path) -> Path:
    joined = folder / "joined"
    whole = coverage.Coverage(data_file=str(joined), config_file=False, branch=True, messages=False)
    if not joined.exists():
        whole.combine([str(path) for path in folder.glob("data.*")], keep=True)
        whole.save()
    return joined


def by_room(data: Path) -> dict[str, dict[str, float]]:
    measured = coverage.Coverage(data_file=str(data), config_file=False, branch=True, messages=False)
    measured.load()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        measured.json_report(outfile=str(report), ignore_errors=True)
        files = json.loads(report.read_text())["files"]
    counts: dict[str, list[int]] = {}
    for name, each in sorted(files.items()):
        path = Path(name).resolve()
        root = next(parent for parent in path.parents if (parent / "pyproject.toml").is_file())
        total = counts.setdefault(str(path.relative_to(root).parent), [0, 0])
        total[0] += each["summary"]["num_branches"]
        total[1] += each["summary"]["covered_branches"]
    return {
        room: {"branches": branches, "executed": executed, "percent": round(100 * executed / max(1, branches), 2)}
        for room, (branches, executed) in counts.items()
    }


if __name__ == "__main__":  # python tests/factories/product_coverage.py FOLDER OUTCOME.json
    Path(sys.argv[2]).write_text(json.dumps(by_room(combine(Path(sys.argv[1]))), indent=1) + "\n")
