"""What the zoo came to, read from an outcome of `make test-long-zoo`, and what differs between two outcomes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FILE = "tests/distributed/test_zoo.py"
TYPE_TEST = f"{_FILE}::test_a_type_is_planned_trained_like_plain_pytorch_and_exported"
WAY_TESTS = tuple(
    f"{_FILE}::test_a_type_in_use_{what}"
    for what in ("trains_alike_on_ranks", "trains_adapters_like_peft", "learns_packed_rows_like_their_documents")
)
NOT_TRAINED = "not trained: "


class Found(NamedTuple):
    finding: str  # `packed`, `not packed: REASON` or `not trained: REASON`
    ways: tuple[str, ...] = ()  # other than alone, with all weights, from rows that are no documents end to end

    @property
    def trains(self) -> bool:
        return not self.finding.startswith(NOT_TRAINED)


def newest_outcome() -> Path:
    *_, newest = sorted((ROOT / "benchmarks" / "results").glob("test-long-zoo-*.json"))
    return newest


def read_zoo(path: Path) -> dict[str, Found]:
    """By type, sorted. A type whose test failed is not in it."""
    findings = json.loads(path.read_text())["findings"]
    ways = {way: names for test in WAY_TESTS for way, names in findings.get(test, {}).items()}
    return {
        name: Found(finding, tuple(way for way, names in ways.items() if name in names))
        for name, finding in sorted((name, finding) for finding, names in findings[TYPE_TEST].items() for name in names)
    }


def differences(old: Mapping[str, Found], new: Mapping[str, Found]) -> Iterator[tuple[bool, str]]:
    """Lines of what differs, each with True if something is lost that worked."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before is None and now is not None:
            yield False, f"new: {name}: {_text(now)}"
        elif now is None and before is not None:
            yield before.trains, f"missing or failed: {name}: {_text(before)}"
        elif before is not None and now is not None and before != now:
            is_lost = (before.trains and not now.trains) or not set(before.ways) <= set(now.ways)
            yield is_lost, f"changed: {name}: {_text(before)} -> {_text(now)}"


def _text(found: Found) -> str:
    return ", ".join([found.finding, *found.ways])
