"""What the zoo came to, read from an outcome of `make test-long-zoo`, and what differs between two of them.

    python tests/factories/zoo_outcome.py OLD.json NEW.json

prints the types that are new, gone or different; exit code 1 if one that trained does not train any more, or is no
longer trained alike in a way that it was.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FILE = "tests/distributed/test_zoo.py"
TYPE_TEST = f"{_FILE}::test_a_type_is_planned_trained_like_plain_pytorch_and_exported"
NOT_TRAINED = "not trained: "


class Found(NamedTuple):
    """What was found of a type."""

    finding: str  # `packed`, `not packed: REASON` or `not trained: REASON`
    ways: tuple[str, ...] = ()  # other than alone, with all weights, from rows that are no documents end to end

    @property
    def trains(self) -> bool:
        return not self.finding.startswith(NOT_TRAINED)


def newest_outcome() -> Path:
    """The newest committed outcome."""
    *_, newest = sorted((ROOT / "benchmarks" / "results").glob("test-long-zoo-*.json"))
    return newest


def read_zoo(path: Path) -> dict[str, Found]:
    """By type, sorted. A type whose test failed is not in it."""
    findings = json.loads(path.read_text())["findings"]
    of_used = [found for test, found in findings.items() if test.startswith(f"{_FILE}::") and test != TYPE_TEST]
    ways = {way: names for found in of_used for way, names in found.items()}
    return {
        name: Found(finding, tuple(way for way, names in ways.items() if name in names))
        for name, finding in sorted((name, finding) for finding, names in findings[TYPE_TEST].items() for name in names)
    }


def differences(old: Mapping[str, Found], new: Mapping[str, Found]) -> Iterator[tuple[bool, str]]:
    """Lines, each with whether something is lost that worked."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before is None and now is not None:
            yield False, f"new: {name}: {_text(now)}"
        elif now is None and before is not None:
            yield before.trains, f"gone or failed: {name}: {_text(before)}"
        elif before is not None and now is not None and before != now:
            is_lost = (before.trains and not now.trains) or not set(before.ways) <= set(now.ways)
            yield is_lost, f"changed: {name}: {_text(before)} -> {_text(now)}"


def _text(found: Found) -> str:
    return ", ".join([found.finding, *found.ways])


def main(old: Path, new: Path) -> int:
    before, now = read_zoo(old), read_zoo(new)
    found = list(differences(before, now))
    for is_lost, line in found:
        print(f"{'LOST  ' if is_lost else '      '}{line}")  # noqa: T201  # the command's output
    print(f"{sum(each.trains for each in now.values())} of {len(now)} types train; {old.name}: ", end="")  # noqa: T201
    print(f"{sum(each.trains for each in before.values())} of {len(before)}")  # noqa: T201
    return int(any(is_lost for is_lost, _ in found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
