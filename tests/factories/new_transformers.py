"""Compares the installed transformers with the committed outcome of the zoo; `make transformers` runs it.

    python tests/factories/new_transformers.py [TYPE ...]

prints the signatures that the product calls and that differ from those of the locked version, runs the zoo, or the
named types of it, and prints the types that are new, missing or different. Exit code 1 if something is lost: a name
that the product uses, a type that trained, a way in which a type was trained alike.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from capture_signatures import CAPTURED, signature_lines, versions
from zoo import USED
from zoo_outcome import ROOT, TYPE_TEST, WAY_TESTS, differences, newest_outcome, read_zoo

APART_TEST = "tests/runtime/test_documents_apart.py::test_packed_documents_are_learned_as_alone_or_packing_is_off"


def changed_signatures() -> Iterator[tuple[bool, str]]:
    """Lines of what differs, each with True if a name that the product uses is not there any more."""
    *_, locked = versions("transformers")
    known = (CAPTURED / f"transformers-{locked}.txt").read_text().splitlines()[1:]
    now = signature_lines("transformers", Path(str(distribution("transformers").locate_file(""))))
    names = {line.partition("(")[0] for line in now}
    for line in known:
        if line not in now:
            yield line.partition("(")[0] not in names, f"no longer: {line}"
    yield from ((False, f"new: {line}") for line in now if line not in known)


def run_zoo(names: Sequence[str], outcome: Path) -> None:
    of_used = [name for name in names if name in USED]
    cases = [f"{test}[{name}]" for test in (TYPE_TEST, APART_TEST) for name in names]
    cases += [f"{test}[{name}]" for test in WAY_TESTS for name in of_used]
    selected = cases or ["-m", "zoo", "tests/distributed", "tests/runtime"]
    options = ["-q", "-W", "default", "-n", "auto", "--maxprocesses=2", f"--outcome={outcome}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *selected], cwd=ROOT, check=False)


def main(names: Sequence[str]) -> int:
    version = re.sub(r"[^\w.]", "-", distribution("transformers").version)
    outcome, committed = ROOT / "build" / f"zoo-transformers-{version}.json", newest_outcome()
    signatures = list(changed_signatures())
    run_zoo(names, outcome)
    before, now = (
        {name: found for name, found in read_zoo(path).items() if not names or name in names}
        for path in (committed, outcome)
    )
    found = [*signatures, *differences(before, now)]
    lines = [f"{'LOST   ' if is_lost else '       '}{line}" for is_lost, line in found]
    counts = [f"{sum(each.trains for each in zoo.values())} of {len(zoo)}" for zoo in (now, before)]
    lines.append(f"transformers {version}: {counts[0]} types train ({outcome}); {counts[1]} in {committed.name}")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(is_lost for is_lost, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
