"""A pytest plugin: `--changed[=BASE]` runs the test files that a change can reach; `make test-changed` uses it.

Of a changed file these run:

- test files that import it, or name it or a folder of it in a string, themselves or through other files of the tests;
- of a module of the product, and of one that names a changed file of data: test files that import or name it, and those
  that tests/reach.json has for it. If more than functions changed (constants, fields): also the cheapest of its users;
- of a file with seeded faults (tests/mutations): the cases that catch them, of whichever file;
- of what documents execute (SHOWN): the documents, also those of `make test-long` that install nothing.

tests/reach.json has, of the test files that execute a module, those in its folder of the tests, and the cheapest that
together execute every line of its functions. A module that it lacks counts as part of its users. A test file that it
lacks runs if it reaches the module by imports and names of programs. To renew it:

    pytest -m "not long and not gpu" --product-coverage FOLDER && python tests/factories/changed_tests.py FOLDER

Everything runs after a change of EVERYTHING, of what tests/conftest.py imports, and of a file that nothing names. What
only an expensive test of a distant module finds, and no fault is seeded for, is left to `make test`, before a merge.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import coverage
import pytest
from durations import file_of, file_seconds, function_of, read_durations
from product_coverage import combine

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "reach.json"
PRODUCT = ("launch/", "slurm/", "trainer/")
PACKAGED = (*PRODUCT, "ds_configs/", "fsdp_configs/", "examples/")  # below shardwise/: what the product can read
COMMANDS, DOCUMENTS = ("launch/commands/", "launch/cli.py", "launch/options.py"), "tests/journeys/"
SHOWN = (*COMMANDS, DOCUMENTS, "README.md", "docs/guide/", "docs/walkthrough.md", "examples/")  # what documents execute
BARE = ("tests/factories/", "benchmarks/")  # folders whose modules are imported by their names alone
CONFTEST = "tests/conftest.py"
EVERYTHING = (CONFTEST, "tests/warm/", "shardwise/", "pyproject.toml", "requirements")
DEAR_S = 15.0  # a test that lists folders of the product and takes longer runs only if a file was added or removed
PROGRAMS = (".py", ".sh", "Makefile", ".ci/run")  # what names these does not also read what they read
_LISTS = re.compile(r"ls-files|glob\(\"(?:\*\*/)?\*\.py|copytree\([A-Z]")  # folders of code
_MODULE = re.compile(r"(?:from|import) ([a-z_][\w.]*)|\b(shardwise(?:\.\w+)+)|^([a-z_.]+):[a-z_]+$")
_API = ["launch", "api"]  # what a plain `import shardwise` has
_WORD = re.compile(r"[\w.*-][\w./*-]*")
Change = IntEnum("Change", ["TEXT", "FUNCTIONS", "MORE", "EXISTENCE"])  # comments; bodies; definitions; a whole file
Table = Mapping[str, list[str]]


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
            self._files, counted = select(Project(ROOT), json.loads(TABLE.read_text()), changed)
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


def changed_files(root: Path, base: str = "") -> tuple[str, dict[str, Change]]:
    """The commit that the working tree is compared with, and what differs; UsageError if there is no such commit."""
    names = [base] if base else ["origin/HEAD", "main", "master", "HEAD"]
    commits = [commit.strip() for name in names for commit in _git(root, "merge-base", name, "HEAD")]
    if not commits:
        raise pytest.UsageError(f"--changed={base}: not a commit that this clone has and shares history with")
    tops = {path.partition("/")[0] for path in _git(root, "ls-files", "-z")}
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard")
    untracked = [path for path in others if "/" not in path or path.partition("/")[0] in tops]  # no exports, no runs
    for commit in (commits[0], "HEAD~1"):
        if paths := [*_git(root, "diff", "--name-only", "-z", "--no-renames", commit), *untracked]:
            return commit, {path: _change(root, commit, path) for path in paths}
    return commits[0], {}


def _git(root: Path, *words: str) -> list[str]:
    answer = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, errors="replace")
    return [each for each in answer.stdout.split("\0") if each]


def _change(root: Path, commit: str, path: str) -> Change:
    before, now = "".join(_git(root, "show", f"{commit}:{path}")), root / path
    if not before or not now.is_file():
        return Change.EXISTENCE
    try:
        return compared(before, now.read_text()) if path.endswith(".py") else Change.MORE
    except (SyntaxError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"{path}: {error}") from None


def cases_of_faults(root: Path, changed: Mapping[str, Change]) -> frozenset[str]:
    """Node ids of the tests that catch the seeded faults of changed files."""
    tables = (tomllib.loads(path.read_text()) for path in sorted((root / "tests" / "mutations").glob("*.toml")))
    faults = [fault for table in tables for fault in table["fault"]]
    return frozenset(
        case for fault in faults if changed.get(fault["file"], Change.TEXT) > Change.TEXT for case in fault["tests"]
    )


def compared(before: str, now: str) -> Change:
    """What differs between two versions of a module. A docstring of a class is more than text: documents show it."""
    old, new = ast.parse(before), ast.parse(now)
    for node in [*ast.walk(old), *ast.walk(new)]:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[ast.get_docstring(node) is not None :]
    if ast.dump(old) == ast.dump(new):
        return Change.TEXT
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
    for node in [*ast.walk(old), *ast.walk(new)]:
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [each for each in node.body if not isinstance(each, inner)]
    return Change.FUNCTIONS if ast.dump(old) == ast.dump(new) else Change.MORE


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
    """What the files of a clone name. `base`: modules that every test has; `dear`: test files above DEAR_S."""

    def __init__(self, root: Path) -> None:
        paths = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        self.files = frozenset(path for path in paths if (root / path).is_file())
        self.tests = frozenset(filter(is_test, self.files))
        self.users: dict[str, set[str]] = defaultdict(set)  # files that import a module, or name it as one
        self._readers: dict[str, set[str]] = defaultdict(set)  # by word
        self._lists_folders: set[str] = set()
        for path in self.files:
            if path.endswith((*PROGRAMS, ".toml")) and path != "pyproject.toml":
                try:
                    self._read(path, (root / path).read_text())
                except (SyntaxError, UnicodeDecodeError) as error:
                    raise pytest.UsageError(f"{path}: {error}") from None
        outer = [name for name in self.users if not is_module(name)]
        self.base = closure(CONFTEST, lambda path: [name for name in outer if path in self.users[name]])
        known = read_durations(root / "tests" / "durations.json")
        self.dear = {path for path in known if file_seconds(known, path) > DEAR_S}

    def readers(self, path: str, *, exact: bool = False) -> set[str]:
        """Files that name `path` or, unless `exact`, a folder of it, relative to a folder that both are in."""
        parts = path.split("/")
        pattern = "test_*.py" if is_test(path) else f"*.{parts[-1].rpartition('.')[2]}"
        found = set() if exact or pattern == "*.py" else set(self._readers.get(pattern, ()))  # who lists such files
        for anchor, end in [(at, end) for at in range(len(parts)) for end in range(at + 1, len(parts) + 1)]:
            named = self._readers.get("/".join(parts[anchor:end]), set())
            if end < len(parts) and path.endswith(".py") and not "/".join(parts[:end]).startswith(BARE):
                named = named & self._lists_folders  # for others the folder is where imports find modules
            if end == len(parts) or not exact:
                found |= {each for each in named if each.split("/")[:anchor] == parts[:anchor]}
        if not exact:  # what every test has reads files for other purposes
            found = found - self.base | self.readers(path, exact=True)
        return {each for each in found - {path} if path.startswith(PACKAGED) or not is_module(each)}

    def _read(self, path: str, text: str) -> None:
        waiting: list[ast.AST] = [ast.parse(text, path) if path.endswith(".py") else ast.Constant(text)]
        while waiting:
            match node := waiting.pop():
                case ast.Constant(value=str(value)):
                    self._read_text(path, value)
                case ast.Import(names=names):
                    self._add(path, [alias.name for alias in names])
                case ast.ImportFrom(names=names, module=module):
                    self._add(path, [f"{module or ''}.{alias.name}" for alias in names])
                case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=str(joined))):
                    while isinstance(left, ast.BinOp) and isinstance(left.right, ast.Constant):
                        joined, left = f"{left.right.value!s}/{joined}", left.left
                    waiting += [left, ast.Constant(joined)]
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    waiting += ast.iter_child_nodes(node)
        self._lists_folders |= {path} if not is_module(path) and _LISTS.search(text) else set()
        for folder in [folder.as_posix() for folder in Path(path).parents][:-2] if is_test(path) else []:
            self.users[f"{folder}/conftest.py"].add(path)

    def _read_text(self, path: str, text: str) -> None:
        names = [a or b or f"shardwise.{path.partition('/')[0]}.{c}" for a, b, c in _MODULE.findall(text)]
        self._add(path, [*names, text] if path == CONFTEST else names)
        for word in _WORD.findall(text):
            if word in self.files or (path.endswith(".py") and (word == text or "/" in word or "." in word)):
                self._readers[re.split(r"/[^/]*\*", word)[0].strip("./")].add(path)

    def _add(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            first, _, rest = name.partition(".")
            is_full = first == "shardwise"
            folders = [""] if is_full else [] if path.startswith(PRODUCT) else [f"{path.rpartition('/')[0]}/", *BARE]
            parts = [part for part in (rest if is_full else name).split(".") if part] or _API
            starts = [folder + "/".join(parts[:end]) for folder in folders for end in range(len(parts), 0, -1)]
            found = (self.files & {f"{each}.py", f"{each}/__init__.py", f"{each}/__main__.py"} for each in starts)
            for each in next(filter(None, found), set()) - {path}:
                self.users[each].add(path)


def select(project: Project, table: Table, changed: Mapping[str, Change]) -> tuple[frozenset[str], str]:
    """The test files that a change can reach, and a line that counts them or says why it is all."""
    found = {path: reached(project, table, path, change) for path, change in sorted(changed.items())}
    if whole := [path for path, tests in found.items() if tests is None]:
        return project.tests, f"all {len(project.tests)} test files: {whole[0]} concerns each, or nothing names it"
    chosen = frozenset[str]().union(*(tests or () for tests in found.values()))
    return chosen, f"{len(chosen)} of {len(project.tests)} test files"


def reached(project: Project, table: Table, path: str, change: Change) -> set[str] | None:
    """The test files that a change of one file can reach; None: it may concern every test."""

    def following(each: str) -> set[str]:
        if each != path and (is_module(each) or is_test(each)):
            return set()
        named = project.readers(each, exact=each != path and each.endswith(PROGRAMS))
        if is_module(each):
            return named if change is Change.EXISTENCE else named - project.dear | project.readers(each, exact=True)
        found = named if is_test(each) or change is Change.TEXT else named | project.users[each]
        return {name for name in found if each == path or (is_test(name) if is_module(path) else name.endswith(".py"))}

    found = closure(path, following)
    is_known = is_test(path) or project.users[path] or found != {path}
    if path.startswith(EVERYTHING) or path in project.base or not is_known:
        return None
    tests = found & project.tests
    if path.startswith(SHOWN) and change > Change.TEXT:
        tests |= {test for test in project.tests if test.startswith(DOCUMENTS)}
    for module in filter(is_module, found if change > Change.TEXT else found - {path}):
        parts = closure(module, lambda each: () if each in table else filter(is_module, project.users[each]))
        tests |= project.users[module].union(*(table.get(part, ()) for part in parts))
        if change >= Change.MORE and module == path:
            tests |= {test for user in project.users[module] for test in table.get(user, ())[:1]}
        tests |= closure(module, project.users.__getitem__) - set(table["tests"])
    return tests & project.tests


def write_table(folder: Path) -> None:
    """Writes tests/reach.json: by module its tests, the cheapest first, and as "tests" all that were measured."""
    project, known = Project(ROOT), read_durations()
    data = coverage.CoverageData(str(combine(folder)))
    data.read()
    table = {"tests": sorted(data.measured_contexts() - {""})}
    for measured in sorted(data.measured_files()):
        parts, tree = Path(measured).parts, ast.parse(Path(measured).read_text())
        module = next(end for start in range(len(parts)) if is_module(end := "/".join(parts[start:])))
        bodies = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        inner = {line for each in bodies for line in range(each.body[0].lineno, (each.end_lineno or 0) + 1)}
        lines: dict[str, set[int]] = defaultdict(set)
        for line, tests in data.contexts_by_lineno(measured).items():
            for test in filter(None, tests if line in inner else ()):
                lines[test].add(line)
        cost = {each: 0.1 if each in project.users[module] else min(600.0, file_seconds(known, each)) for each in lines}
        mirrored = f"tests/{module.removeprefix('trainer/')}".rpartition("/")[0]
        kept = [test for test in lines if test.rpartition("/")[0] == mirrored]
        table |= {module: cheapest(lines, cost, kept)} if lines else {}
    rows = [f"{json.dumps(name)}: {json.dumps(tests)}" for name, tests in table.items()]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def cheapest(lines: Mapping[str, set[int]], cost: Mapping[str, float], kept: Iterable[str] = ()) -> list[str]:
    """`kept` and the cheapest tests with which every line is executed, the cheapest first."""
    found = list(kept)
    while missing := set().union(*lines.values()) - set().union(*(lines[test] for test in found)):
        found.append(max(sorted(lines), key=lambda test: len(lines[test] & missing) / (cost[test] + 0.1)))
    return sorted(found, key=lambda test: (cost[test], test))


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
