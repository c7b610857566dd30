"""Runs seeded faults of product code through the tests nearest to each, and counts those that no test catches.

    .venv/bin/python tests/mutations/run.py [--only ID ...] [--jobs 2] [--outcome FILE]

The faults are the tables `[[fault]]` of tests/mutations/*.toml. First the nearest tests run once without any fault, and
must be green. Then each runs in a copy of the repository with one fault (caught, survived, or broken: nothing can be
concluded), in a fork of a Python that has imported torch and its libraries, but no product module.
Exit code: 0 if at least 97 % are caught and none is broken, else 1; 2 for a fault that does not apply.
"""

# ruff: noqa: T201  # prints its table
import argparse
import compileall
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from py_compile import PycInvalidationMode

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with one thread can be forked
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
import pytest

HERE = Path(__file__).resolve().parent
LEAST_CAUGHT = 0.97
BASELINE = "without faults"
_PRELOADED = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "transformers", "accelerate",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "safetensors.torch",
    "hypothesis", "numpy", "rich.console", "yaml", "jinja2",
)  # fmt: skip
_FILES_IN_A_BASELINE = 2  # test files that one process runs without faults
_NOT_COPIED = shutil.ignore_patterns(".*", "runs", "dist", "*.egg-info")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    file: str
    consequence: str
    old: str
    new: str
    tests: tuple[str, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Tests to run in a tree of their own, which has the fault if there is one."""

    name: str
    tests: tuple[str, ...]
    fault: Fault | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str  # caught, survived or broken; of the baseline: green or red
    detail: str  # the test that failed, or why nothing can be concluded
    seconds: float
    cpu_seconds: float


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = _options()
    root = options.project.resolve()
    try:
        faults = read_faults(root, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with _workplace() as place:
        return _run(options, root, faults, place)


@contextmanager
def _workplace() -> Iterator[Path]:
    """A folder of its own; a TemporaryDirectory would also go when a fork of a test ends."""
    place = Path(tempfile.mkdtemp(prefix="faults-of-tests-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def read_faults(root: Path, only: Sequence[str] | None) -> tuple[Fault, ...]:
    """The faults of a repository; ValueError for one whose text does not occur exactly once."""
    tables = [tomllib.loads(path.read_text()) for path in sorted((root / "tests" / "mutations").glob("*.toml"))]
    faults = tuple(msgspec.convert(each, Fault) for table in tables for each in table["fault"])
    unknown = set(only or ()) - {fault.id for fault in faults}
    wrong = [f"--only {name}: there is no such fault" for name in sorted(unknown)]
    for fault in faults:
        count = (root / fault.file).read_text().count(fault.old) if (root / fault.file).is_file() else 0
        if count != 1:
            wrong.append(f"{fault.id}: its text occurs {count} times in {fault.file}; it must occur once")
    if wrong:
        raise ValueError("\n".join(wrong))
    return tuple(fault for fault in faults if only is None or fault.id in only)


def _run(options: argparse.Namespace, root: Path, faults: Sequence[Fault], place: Path) -> int:
    started = time.monotonic()
    _prepare(root, place, preload=options.preload)
    run = functools.partial(_run_jobs, root=root, place=place, num_side_by_side=options.jobs, limit_s=options.limit)
    baseline = run(_baseline(faults))
    red = [result.detail for result in baseline.values() if result.outcome != "green"]
    if red:
        print("The nearest tests are not green without faults:", *red, sep="\n  ")
        return 1
    results = run([Job(name=fault.id, tests=fault.tests, fault=fault) for fault in faults])
    counts = Counter(result.outcome for result in results.values())
    seconds = time.monotonic() - started
    print(
        f"{counts['caught']} of {len(results)} caught, {counts['survived']} survived, {counts['broken']} broken,"
        f" in {seconds:.0f} s"
    )
    is_enough = counts["caught"] >= LEAST_CAUGHT * len(results) and not counts["broken"]
    if options.outcome is not None:
        _write_outcome(options.outcome, faults, results, baseline=baseline, seconds=seconds)
    return 0 if is_enough else 1


def _prepare(root: Path, place: Path, *, preload: bool) -> None:
    base = place / "base"
    shutil.copytree(root, base, ignore=_NOT_COPIED, symlinks=True)
    # By content: a fault may leave a file's size and second of change as they were.
    compileall.compile_dir(base, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    if preload:
        _preload(root)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these faults alone")
    parser.add_argument("--jobs", type=int, default=2, help="faults that run side by side (default: 2)")
    parser.add_argument("--outcome", type=Path, metavar="FILE", help="keep versions, machine and results as JSON")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of a fault (default: 300)")
    parser.add_argument("--project", type=Path, default=HERE.parents[1], help="repository (default: this one)")
    parser.add_argument("--no-preload", dest="preload", action="store_false", help="start at once, run slower")
    return parser.parse_args()


def _preload(root: Path) -> None:
    """Imports what most tests need, and makes the warm Python of the tests one for all faults."""
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    sys.path.insert(0, str(root / "tests" / "factories"))
    importlib.import_module("warm_python").start_warm_python()
    del sys.path[0]


def _baseline(faults: Sequence[Fault]) -> list[Job]:
    by_file: dict[str, list[str]] = {}
    for test in sorted({test for fault in faults for test in fault.tests}):
        by_file.setdefault(test.partition("::")[0], []).append(test)  # pytest runs a test of a named file once
    files = list(by_file.values())
    num_jobs = -(-len(files) // _FILES_IN_A_BASELINE)
    groups = [[test for file in files[start::num_jobs] for test in file] for start in range(num_jobs)]
    return [Job(name=f"{BASELINE} {number}", tests=tuple(tests)) for number, tests in enumerate(groups, 1)]


def run_copies(
    root: Path, jobs: Sequence[Job], *, num_side_by_side: int, limit_s: float, on_result: Callable[[str, Result], None]
) -> None:
    """Runs jobs in copies of a repository, without a run of the tests before; each result is reported when known."""
    with _workplace() as place:
        _prepare(root, place, preload=True)
        _run_jobs(jobs, root=root, place=place, num_side_by_side=num_side_by_side, limit_s=limit_s, on_result=on_result)


def _run_jobs(
    jobs: Sequence[Job], *, root: Path, place: Path, num_side_by_side: int, limit_s: float,
    on_result: Callable[[str, Result], None] = lambda name, result: None,
) -> dict[str, Result]:  # fmt: skip
    """Results by name; each is printed when its job ends."""
    waiting = list(enumerate(jobs))
    running: dict[int, tuple[Job, Path, float]] = {}
    results: dict[str, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_side_by_side:
                number, job = waiting.pop(0)
                folder = place / f"{number:03d}"
                _make_tree(place / "base", folder, job.fault)
                running[_fork(functools.partial(_run_tests, job, folder, root=root))] = (job, folder, time.monotonic())
            for pid, (job, folder, started) in list(running.items()):
                ended, _, usage = os.wait4(pid, os.WNOHANG)
                seconds = time.monotonic() - started
                if not ended and seconds > limit_s * (1 if job.fault is not None else len(job.tests)):
                    (folder / "stopped").touch()
                    os.killpg(pid, signal.SIGKILL)
                if not ended:
                    continue
                del running[pid]
                results[job.name] = _result(job, folder, seconds, usage.ru_utime + usage.ru_stime)
                on_result(job.name, results[job.name])
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.05)
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return {job.name: results[job.name] for job in jobs}


def _result(job: Job, folder: Path, seconds: float, cpu_seconds: float) -> Result:
    outcome, detail = _outcome(folder)
    if job.fault is None:
        outcome = "green" if outcome == "survived" else "red"
    print(f"{outcome:9}{seconds:6.1f} s  {job.name:40} {detail}", flush=True)
    if outcome in ("broken", "red"):
        print((folder / "output").read_text(errors="replace")[-4000:], flush=True)
    return Result(outcome=outcome, detail=detail, seconds=round(seconds, 1), cpu_seconds=round(cpu_seconds, 1))


def _make_tree(base: Path, folder: Path, fault: Fault | None) -> None:
    """The repository in `folder`/tree, by hard links; the file with the fault is a new one."""
    folder.mkdir()
    if fault is None:
        (folder / "tree").symlink_to(base)
        return
    shutil.copytree(base, folder / "tree", copy_function=os.link, symlinks=True)
    path = folder / "tree" / fault.file
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace(fault.old, fault.new))


def _fork(function: functools.partial[None]) -> int:
    """Runs it in a session of its own; what it starts beyond that ends with its run of tests (suite_end)."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function()
    except BaseException:  # noqa: BLE001  # shown; nothing may run on in the copy of the runner
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _run_tests(job: Job, folder: Path, *, root: Path) -> None:
    with (folder / "output").open("wb") as output, Path(os.devnull).open("rb") as nothing:
        for stream, target in ((0, nothing), (1, output), (2, output)):
            os.dup2(target.fileno(), stream)
    tree = (folder / "tree").resolve()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry).resolve() not in (root, HERE))]
    importlib.invalidate_caches()
    record = _Record()
    selection = ["-m", "not gpu and not long", "--hypothesis-seed=1", *([] if job.fault is None else ["-x"])]
    settings = ["-q", "-o", "addopts=--strict-markers --import-mode=importlib", "-p", "no:cacheprovider"]
    settings += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={folder / 't'}"]
    code = int(pytest.main([*settings, *selection, *job.tests], plugins=[record]))
    (folder / "result").write_text(
        json.dumps({"code": code, "passed": record.num_passed, "failed": record.failed, "error": record.error})
    )


class _Record:
    def __init__(self) -> None:
        self.failed = self.error = ""
        self.num_passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
        self.num_passed += report.passed and report.when == "call"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.error:
            self.error = f"collecting {report.nodeid} failed"


def _outcome(folder: Path) -> tuple[str, str]:
    if (folder / "stopped").exists():
        return "broken", "ran into the time limit"
    if not (folder / "result").is_file():
        return "broken", "the process of the tests died"
    found = json.loads((folder / "result").read_text())
    if found["error"]:
        return "broken", found["error"]
    if found["code"] == pytest.ExitCode.TESTS_FAILED and found["failed"]:
        return "caught", found["failed"]
    if found["code"] == pytest.ExitCode.OK and found["passed"]:
        return "survived", ""
    return "broken", f"pytest ended with exit code {found['code']}, {found['passed']} tests passed"


def _write_outcome(
    path: Path, faults: Sequence[Fault], results: dict[str, Result], *, baseline: dict[str, Result], seconds: float
) -> None:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "factories")]
    facts = importlib.import_module("outcome_file").facts()  # after the last fork: it imports the product
    counts = Counter(result.outcome for result in results.values())
    content = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **facts,
        "seconds": round(seconds),
        "cpu_seconds": round(sum(each.cpu_seconds for each in (*baseline.values(), *results.values()))),
        **{name: counts[name] for name in ("caught", "survived", "broken")},
        "faults": {
            fault.id: {"room": str(Path(fault.file).parent), "file": fault.file, "consequence": fault.consequence}
            | msgspec.to_builtins(results[fault.id])
            for fault in faults
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
