"""A pytest plugin: `--changed[=BASE]` runs the test files that a change can reach; `make test-changed` uses it.

Of a changed file these run:

- of a file of the tests: itself, or the tests that import or name it, also through others;
- of a module of the product: the tests that import it, and those of its folder;
- of another file: the tests that name it or its folder, and those of the folders of modules that do;
- of a file with seeded faults (tests/mutations): the cases that catch them, of whichever file;
- of what documents execute (SHOWN): the documents, also those of `make test-long` that install nothing.

Claims on all files (ON_ALL) run always, everything after a change of EVERYTHING, of what tests/conftest.py imports, and
of a file that nothing names. What only a distant test finds is left to `make test`, before a merge.
"""

import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from durations import file_of, function_of

ROOT = Path(__file__).parents[2]
PRODUCT = ("launch/", "slurm/", "trainer/")
COMMANDS, DOCUMENTS = ("launch/commands/", "launch/cli.py", "launch/options.py"), "tests/journeys/"
SHOWN = (*COMMANDS, DOCUMENTS, "README.md", "docs/guide/", "docs/walkthrough.md", "examples/")  # what documents execute
ON_ALL = ("tests/test_docs.py", "tests/test_words.py", "tests/mutations/test_faults.py")
BARE = ("tests/factories/", "benchmarks/")  # folders whose modules are imported by their names alone
CONFTEST = "tests/conftest.py"
EVERYTHING = (CONFTEST, "tests/warm/", "shardwise/", "pyproject.toml", "requirements")
_IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)(?: import (\([\w\s,]*|[\w ,]*))?", re.MULTILINE)
_NAMED = re.compile(r"\bshardwise(?:\.\w+)+")
_FILE, _FOLDER = re.compile(r"[\w*.-]+"), re.compile(r"(?<=[\"'/])[\w.-]+(?=[\"'/])")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "only test files that a change can reach: what differs from BASE (the main branch), or the last commit"
    parser.addoption("--changed", nargs="?", const="", metavar="BASE", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("changed") is not None:
        config.pluginmanager.register(_Selected(config))


class _Selected:
    def __init__(self, config: pytest.Config) -> None:
        self._line = ""
        if hasattr(config, "workerinput"):
            self._files, self._cases, config.option.markexpr = config.workerinput["changed_tests"]
        else:
            commit, changed = changed_files(ROOT, config.getoption("changed"))
            self._cases = cases_of_faults(ROOT, changed)
            self._files, counted = select(Project(ROOT), changed)
            if config.option.markexpr and any(path.startswith(SHOWN) for path in changed):
                config.option.markexpr += " or documents and not cold"
            self._line = f"{counted} (changed since {commit}: {len(changed)})"
        self._collected = {*self._files, *map(file_of, self._cases)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # a worker of xdist
        node.workerinput["changed_tests"] = [*self._files], [*self._cases], node.config.option.markexpr

    def pytest_report_header(self) -> str:
        return self._line

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        name = collection_path.relative_to(ROOT).as_posix() if collection_path.is_relative_to(ROOT) else ""
        return True if is_test(name) and name not in self._collected else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects the other tests of a file that was chosen for the cases of seeded faults alone."""
        wanted = {*self._files, *self._cases}
        selected: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            names = {file_of(item.nodeid), function_of(item.nodeid), item.nodeid}
            (selected if wanted & names else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = selected

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def changed_files(root: Path, base: str = "") -> tuple[str, set[str]]:
    """The commit that the working tree is compared with, and what differs; UsageError if there is no such commit."""
    names = [base] if base else ["origin/HEAD", "main", "master", "HEAD"]
    commits = [commit.strip() for name in names for commit in _git(root, "merge-base", name, "HEAD")]
    if not commits:
        raise pytest.UsageError(f"--changed={base}: not a commit that this clone has and shares history with")
    tops = {path.partition("/")[0] for path in _git(root, "ls-files", "-z")}
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    untracked = [path for path in others if "/" not in path or path.partition("/")[0] in tops]  # no exports, no runs
    for commit in (commits[0], "HEAD~1"):
        if paths := {*_git(root, "diff", "--name-only", "-z", "--no-renames", commit), *untracked}:
            return commit, paths
    return commits[0], set()


def _git(root: Path, *words: str) -> list[str]:
    answer = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, errors="replace")
    return [each for each in answer.stdout.split("\0") if each]


def cases_of_faults(root: Path, changed: Iterable[str]) -> frozenset[str]:
    """Node ids of the tests that catch the seeded faults of changed files."""
    tables = (tomllib.loads(path.read_text()) for path in sorted((root / "tests" / "mutations").glob("*.toml")))
    return frozenset(
        case for table in tables for fault in table["fault"] if fault["file"] in changed for case in fault["tests"]
    )


def is_test(path: str) -> bool:
    return path.startswith("tests/") and path.rpartition("/")[2].startswith("test_") and path.endswith(".py")


def is_module(path: str) -> bool:
    return path.startswith(PRODUCT) and path.endswith(".py")


def closure(start: str, following: Callable[[str], Iterable[str]]) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found


class Project:
    """Which files of a clone import, or name, which. `base`: modules that every test has."""

    def __init__(self, root: Path) -> None:
        paths = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        self.files = frozenset(path for path in paths if (root / path).is_file())
        self.tests = frozenset(filter(is_test, self.files))
        programs = (path for path in self.files if path.endswith((".py", ".sh", "Makefile")))
        texts = {path: (root / path).read_text(errors="replace") for path in programs}
        self._words = {path: {*_FILE.findall(text)} for path, text in texts.items()}
        self._folders = {path: {*_FOLDER.findall(text)} for path, text in texts.items()}
        self.users: dict[str, set[str]] = defaultdict(set)  # files that import a module, or name it as one
        for path, text in texts.items():
            for module in self._imported(path, text):
                self.users[module].add(path)
            for folder in list(Path(path).parents)[:-2] if is_test(path) else ():
                self.users[f"{folder.as_posix()}/conftest.py"].add(path)
        plugins = {f"tests/factories/{word}.py" for word in self._words.get(CONFTEST, ())}
        outer = [name for name in self.users if not is_module(name)]
        of_base = (closure(each, lambda path: [name for name in outer if path in self.users[name]]) for each in plugins)
        self.base = {CONFTEST}.union(*of_base) & self.files

    def namers(self, path: str) -> set[str]:
        """Files that have the name of a file in their text; tests and modules also that of its folder, in quotes."""
        name, folder = Path(path).name, "" if path.endswith(".py") else Path(path).parent.name
        beside = {
            each for each, names in self._folders.items() if folder in names and (is_test(each) or is_module(each))
        }
        return {each for each, words in self._words.items() if name in words or each in beside} - {path}

    def _imported(self, path: str, text: str) -> Iterator[str]:
        """Modules that a file imports, or names in full."""
        names = {
            f"{module}.{name}" for module, more in _IMPORT.findall(text) for name in re.findall(r"\w+", more) or [""]
        }
        for parts in (name.strip(".").split(".") for name in names | {*_NAMED.findall(text)}):
            is_full = parts[0] == "shardwise"
            folders = [""] if is_full else [f"{path.rpartition('/')[0]}/", *BARE]
            parts = (parts[1:] or ["launch", "api"]) if is_full else parts  # what a plain `import shardwise` has
            starts = [folder + "/".join(parts[:end]) for folder in folders for end in range(len(parts), 0, -1)]
            modules = (self.files & {f"{each}.py", f"{each}/__init__.py", f"{each}/__main__.py"} for each in starts)
            yield from next(filter(None, modules), set()) - {path}


def select(project: Project, changed: Iterable[str]) -> tuple[frozenset[str], str]:
    """The test files that a change can reach, and a line that counts them or says why it is all."""
    found = {path: reached(project, path) for path in sorted(changed)}
    if whole := [path for path, tests in found.items() if not tests]:
        return project.tests, f"all {len(project.tests)} test files: {whole[0]} concerns each, or nothing names it"
    chosen = (project.tests & {*ON_ALL}).union(*found.values())
    return chosen, f"{len(chosen)} of {len(project.tests)} test files"


def reached(project: Project, path: str) -> set[str]:
    """The test files that a change of one file can reach; none: it may concern every test."""

    def following(each: str) -> set[str]:
        if is_module(each) or is_test(each):
            return project.users[each] & project.tests if each == path else set()
        return project.users[each] | project.namers(each)

    if path.startswith(EVERYTHING) or path in project.base:
        return set()
    found = {path} & project.tests if is_test(path) else closure(path, following)
    tested = {Path(test).parent for test in project.tests}
    mirrored = (Path("tests", module.removeprefix("trainer/")) for module in filter(is_module, found))
    rooms = {next((folder for folder in module.parents if folder in tested), None) for module in mirrored}
    found |= {test for test in project.tests if Path(test).parent in rooms}
    if path.startswith(SHOWN):
        found |= {test for test in project.tests if test.startswith(DOCUMENTS)}
    return found & project.tests
