"""The table of every causal type in docs/architectures.md, from the newest outcome of `make test-long-zoo`.

python benchmarks/zoo_page.py            prints the table
python benchmarks/zoo_page.py --write    writes it into docs/architectures.md
python benchmarks/zoo_page.py --check    checks that the page is up to date (exit code 1 if it is not)
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "benchmarks", ROOT / "tests" / "factories"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from written_page import markdown_table, run_page  # noqa: E402  (the path comes first)
from zoo_outcome import NOT_TRAINED, Found, newest_outcome, read_zoo  # noqa: E402

DOCUMENT = ROOT / "docs" / "architectures.md"


def tables() -> dict[str, str]:
    """The generated parts of the page by the name of their markers."""
    path = newest_outcome()
    found, versions = read_zoo(path), json.loads(path.read_text())["versions"]
    num_trained, num_packed = (sum(map(each, found.values())) for each in (lambda row: row.trains, _is_packed))
    counts = (
        f"With transformers {versions['transformers']}, {num_trained} of {len(found)} types train, {num_packed} of them"
        f" from packed rows ([outcome](../benchmarks/results/{path.name})).\n"
    )
    rows = [[f"`{name}`", *_cells(row)] for name, row in found.items()]
    return {"zoo-counts": counts, "zoo": markdown_table(["type", "trains", "packing", "also equal under"], rows)}


def _is_packed(row: Found) -> bool:
    return row.finding == "packed"


def _cells(row: Found) -> list[str]:
    if not row.trains:
        return [f"no: {row.finding.removeprefix(NOT_TRAINED)}", "", ""]
    packing = "yes" if _is_packed(row) else f"off: {row.finding.removeprefix('not packed: ')}"
    return ["yes", packing, ", ".join(row.ways)]


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary=str(__doc__).splitlines()[0]))
