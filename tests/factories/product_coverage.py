"""A pytest plugin: `--product-coverage FOLDER` keeps which lines and branches of the product each test file executes.

The context of the data is the test file, also in the programs that a test starts, warm ones included; a program that is
killed leaves none. Each process writes a file of its own into the folder. Commands of coverage join and sum them up:

    coverage combine --keep --data-file=FOLDER/data FOLDER
    coverage report --data-file=FOLDER/data --include='trainer/planning/*'
"""

import os
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
