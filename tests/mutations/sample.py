"""Random faults: which of them do tests catch, the tests of this tree or of another?

    python tests/mutations/sample.py draw
    python tests/mutations/sample.py run --coverage FILE --durations FILE --outcome FILE [--project FOLDER]

`draw` makes NUM_MUTANTS changes of one place of the product each, drawn with SEED: two of every room, the others from
all lines alike. random_mutants.json was drawn once and stays, so that the tests of before and after a change of the
tests meet the same mutants. `run` applies each to a copy of a repository and runs the test files that execute the
changed line, by `--coverage` (see `product_coverage`): those of the same folder first, then the cheapest, as far as the
budget of a mutant goes, until one fails. `select` keeps which files these are, for `run --selection`. Not drawn:
annotations, texts, `assert`, `raise`, and what stands at the top of a module.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import coverage
import msgspec

runner: Any = importlib.import_module("run")  # beside this file; benchmarks/ has one of that name
SEED = 20261128
NUM_MUTANTS = 360
MIN_PER_ROOM = 2
ROOTS = ("launch", "slurm", "trainer")
MUTANTS = Path(__file__).with_name("random_mutants.json")
ROOT = Path(__file__).parents[2]
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitOr: "&",
    ast.BitAnd: "|",
}  # fmt: skip


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the product, changed: the text `old` occurs once in the file."""

    id: str
    file: str
    line: int  # where the drawn file had it
    old: str
    new: str


class Edit(NamedTuple):
    """The piece of a file between two places, and what stands there in the mutant."""

    line: int
    start: int  # offset in the text
    end: int
    new: str


def draw(root: Path, *, seed: int, count: int, rooms: tuple[str, ...]) -> list[Mutant]:
    """Mutants of the rooms whose paths begin with one of `rooms`, the same for the same files."""
    random = Random(seed)
    by_room: dict[str, list[tuple[Path, Edit]]] = {}
    for path in sorted(path for name in ROOTS for path in (root / name).rglob("*.py")):
        if not str(path.relative_to(root)).startswith(rooms):
            continue
        for edit in edits(path.read_text()):
            by_room.setdefault(str(path.parent.relative_to(root)), []).append((path, edit))
    chosen = [each for room in by_room.values() for each in random.sample(room, min(MIN_PER_ROOM, len(room)))]
    rest = [each for room in by_room.values() for each in room if each not in chosen]
    chosen += random.sample(rest, max(0, min(count - len(chosen), len(rest))))
    mutants = (_mutant(number, path, edit, root) for number, (path, edit) in enumerate(chosen, 1))
    return [each for each in mutants if each is not None]


def edits(text: str) -> Iterator[Edit]:
    """Every edit of a module's functions."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def edit(node: ast.expr | ast.stmt, new: str) -> Edit:
        end = place(node.end_lineno or 0, node.end_col_offset or 0)
        return Edit(node.lineno, place(node.lineno, node.col_offset), end, new)

    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node, new in _changes(statement):
                    yield edit(node, new)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The nodes below `node` that can be changed, each with the text of the changed one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assert | ast.Raise):
        return  # functions are walked by themselves
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from _changes(node.value)
        return
    if isinstance(node, ast.expr | ast.stmt):
        new = _changed(node)
        if new is not None:
            yield node, new
    if isinstance(node, ast.If | ast.IfExp | ast.While) and _changed(node.test) is None:
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _changes(child)


def _changed(node: ast.expr | ast.stmt) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return f"({ast.unparse(left)} {_COMPARISONS[type(operator)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            parts = [part for side in (left, right) for part in ast.walk(side)]
            if any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in parts):
                return None  # a text, or the name of a path: other operators than + and / raise an error at once
            return f"({ast.unparse(left)} {_OPERATORS[type(operator)]} {ast.unparse(right)})"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            return f"({word.join(f'({ast.unparse(value)})' for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() | float() as value):
            return str(value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "pass"
    return None


def _mutant(number: int, path: Path, edit: Edit, root: Path) -> Mutant | None:
    """The mutant with as many lines around the edit as make its text occur once; None if it is no valid module."""
    text = path.read_text()
    start, end = text.rfind("\n", 0, edit.start) + 1, text.find("\n", edit.end)
    while text.count(text[start:end]) != 1:
        start, end = text.rfind("\n", 0, max(0, start - 1)) + 1, text.find("\n", end + 1)
    old = text[start:end]
    new = text[start : edit.start] + edit.new + text[edit.end : end]
    try:
        ast.parse(text.replace(old, new))
    except SyntaxError:
        return None
    room = ".".join(path.relative_to(root).with_suffix("").parts)
    return Mutant(id=f"m{number:03d}-{room}", file=str(path.relative_to(root)), line=edit.line, old=old, new=new)


def tests_of(
    mutant: Mutant, root: Path, data: coverage.CoverageData, seconds: Mapping[str, float], budget_s: float
) -> tuple[str, ...]:
    """The test files of `data` that execute the changed lines, the nearest and cheapest first, up to `budget_s`."""
    path = root / mutant.file
    before = path.read_text().partition(mutant.old)[0].count("\n") + 1
    changed = range(before, before + mutant.old.count("\n") + 1)
    contexts = {
        context
        for line, found in data.contexts_by_lineno(str(path)).items()
        if line in changed
        for context in found
        if context.startswith("tests/") and (root / context).is_file()
    }
    files = sorted(contexts, key=lambda file: (-_nearness(file, mutant.file), seconds.get(file, 60.0)))
    spent = list(itertools.accumulate(seconds.get(file, 60.0) for file in files))
    return tuple(file for number, file in enumerate(files) if number == 0 or spent[number] <= budget_s)


def _nearness(test_file: str, product_file: str) -> int:
    """How many folders of the product file the path of the test file has too, from the first on."""
    folders = product_file.removeprefix("trainer/").split("/")[:-1]
    pairs = zip(test_file.split("/")[1:-1], folders, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["draw", "select", "run"])
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="combined data of --product-coverage")
    parser.add_argument("--selection", type=Path, metavar="FILE", help="of `select`: which files execute which mutant")
    parser.add_argument("--until", type=int, default=10**6, metavar="N", help="stop when N mutants were caught")
    parser.add_argument("--durations", type=Path, metavar="FILE", help="seconds of the tests of that repository")
    parser.add_argument("--project", type=Path, default=ROOT, metavar="FOLDER", help="whose tests (default: these)")
    parser.add_argument("--outcome", type=Path, metavar="FILE", help="what became of each mutant, as JSON")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these mutants alone")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="of tests for each mutant")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these tests for every mutant, without --coverage")
    parser.add_argument("--mutants", type=Path, default=MUTANTS, metavar="FILE", help="other than those kept here")
    parser.add_argument("--seed", type=int, default=SEED, help="of `draw`")
    parser.add_argument("--count", type=int, default=NUM_MUTANTS, help="of `draw`")
    parser.add_argument("--rooms", nargs="+", default=list(ROOTS), metavar="PATH", help="of `draw`: folders or files")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run side by side")
    options = parser.parse_args()
    if options.action == "draw":
        mutants = draw(ROOT, seed=options.seed, count=options.count, rooms=tuple(options.rooms))
        options.mutants.write_bytes(msgspec.json.format(msgspec.json.encode(mutants), indent=1) + b"\n")
        return 0
    root = options.project.resolve()
    drawn = msgspec.json.decode(options.mutants.read_bytes(), type=list[Mutant])
    mutants = [each for each in drawn if not options.only or each.id in options.only]
    tests = selected(options, root, mutants)
    if options.action == "select":
        options.outcome.write_text(json.dumps(tests, indent=0) + "\n")
    else:
        run(options, root, mutants, tests)
    return 0


def selected(options: argparse.Namespace, root: Path, mutants: Sequence[Mutant]) -> dict[str, tuple[str, ...]]:
    """The tests of each mutant: those that are named, those that `select` kept, or those that execute it."""
    if options.tests:
        return dict.fromkeys((mutant.id for mutant in mutants), tuple(options.tests))
    if options.selection is not None:
        return {name: tuple(tests) for name, tests in json.loads(options.selection.read_text()).items()}
    data = coverage.CoverageData(str(options.coverage))
    data.read()
    seconds = {file: sum(each.values()) for file, each in json.loads(options.durations.read_text()).items()}
    return {mutant.id: tests_of(mutant, root, data, seconds, options.budget) for mutant in mutants}


def run(options: argparse.Namespace, root: Path, mutants: Sequence[Mutant], tests: Mapping[str, Sequence[str]]) -> None:
    """Runs the mutants, and keeps the outcome of each as soon as it is known."""
    done = json.loads(options.outcome.read_text()) if options.outcome.exists() else {}
    jobs = []
    for mutant in mutants:
        if mutant.id in done:
            continue
        if (root / mutant.file).read_text().count(mutant.old) != 1:
            done[mutant.id] = {"outcome": "does not apply"}
        elif not tests[mutant.id]:
            done[mutant.id] = {"outcome": "not executed"}
        else:
            fault = runner.Fault(
                id=mutant.id, file=mutant.file, consequence="", old=mutant.old, new=mutant.new, tests=tests[mutant.id]
            )
            jobs.append(runner.Job(name=mutant.id, tests=fault.tests, fault=fault))

    def keep(name: str, result: Any) -> None:
        done[name] = msgspec.to_builtins(result)
        options.outcome.write_text(json.dumps(done, indent=1) + "\n")
        if sum(each["outcome"] == "caught" for each in done.values()) >= options.until:
            raise runner.StoppedError

    with contextlib.suppress(runner.StoppedError):
        runner.run_copies(root, jobs, num_side_by_side=options.jobs, limit_s=3 * options.budget, on_result=keep)


if __name__ == "__main__":
    sys.exit(main())
