"""Random faults: which of them do tests catch, the tests of this tree or of another?

    python tests/mutations/sample.py --coverage FILE --durations FILE --outcome FILE [--project FOLDER]

Each of random_mutants.json, which was drawn once so that the tests of before and after a change meet the same, is
applied to a copy of a repository. The test files that execute the changed line, by `--coverage` (see
`product_coverage`), run there until one fails: the nearest first, then the cheapest, as far as the budget goes.
"""

import argparse
import importlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coverage
import msgspec

runner: Any = importlib.import_module("run")  # beside this file; benchmarks/ has one of that name
MUTANTS = Path(__file__).with_name("random_mutants.json")


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the product, changed: the text `old` occurs once in the file."""

    id: str
    file: str
    line: int  # where the drawn file had it
    old: str
    new: str


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--coverage", type=Path, required=True, metavar="FILE", help="data of --product-coverage")
    parser.add_argument("--durations", type=Path, required=True, metavar="FILE", help="seconds of those tests")
    parser.add_argument("--outcome", type=Path, required=True, metavar="FILE", help="what became of each, as JSON")
    parser.add_argument("--project", type=Path, default=MUTANTS.parents[2], metavar="FOLDER", help="whose tests")
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these mutants alone")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run side by side")
    options = parser.parse_args()
    root, data = options.project.resolve(), coverage.CoverageData(str(options.coverage))
    data.read()
    seconds = {file: sum(each.values()) for file, each in json.loads(options.durations.read_text()).items()}
    done: dict[str, Any] = {}
    jobs = []
    for mutant in msgspec.json.decode(MUTANTS.read_bytes(), type=list[Mutant]):
        if options.only and mutant.id not in options.only:
            continue
        if (root / mutant.file).read_text().count(mutant.old) != 1:
            done[mutant.id] = {"outcome": "does not apply"}
        elif tests := tests_of(mutant, root, data, seconds, options.budget):
            facts = {"id": mutant.id, "file": mutant.file, "old": mutant.old, "new": mutant.new}
            fault = runner.Fault(**facts, consequence="", tests=tests)
            jobs.append(runner.Job(name=mutant.id, tests=tests, fault=fault))
        else:
            done[mutant.id] = {"outcome": "not executed"}

    def keep(name: str, result: Any) -> None:
        done[name] = msgspec.to_builtins(result)
        options.outcome.write_text(json.dumps(done, indent=1) + "\n")

    runner.run_copies(root, jobs, num_side_by_side=options.jobs, limit_s=3 * options.budget, on_result=keep)


if __name__ == "__main__":
    main()
