"""Errors of the predictions on measurements that nothing was fitted to: rows of measured_judging.jsonl.

    python benchmarks/judging.py [--rows | --odd]
    python benchmarks/accuracy.py prints the same table after its own

A row whose source has an even SHA-256 may be read to find what the model lacks. The others are scored once, at the end:
`--odd` writes their scores to benchmarks/results/judging-odd-DATE.json, and refuses once that file exists.

An error is prediction / measurement - 1; median and 90th percentile are of absolute errors. A run is below parity if it
was slower, or needed more memory, than predicted, by more than 1 %. The stated range is the one that a plan for this
configuration prints: of the time of a step, and of the peak.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from accuracy import ROOT, Row, percentile, predicted, row_line, text_table

ROWS = ROOT / "benchmarks" / "measured_judging.jsonl"
RESULTS = ROOT / "benchmarks" / "results"
PARITY = 0.01  # sources state three digits
COUNTERS = {
    "tokens_per_s_per_gpu": "tokens/s",
    "peak_reserved_gib": "peak reserved",
    "peak_allocated_gib": "peak allocated",
}


class Judged(NamedTuple):
    """A measured counter and its prediction; `stated` is the error that a plan prints, None if it has none."""

    row: Row
    counter: str
    ratio: float  # prediction / measurement
    stated: float | None

    @property
    def is_below_parity(self) -> bool:
        return is_below(self.counter, self.ratio)

    @property
    def is_in_range(self) -> bool | None:
        return None if self.stated is None else max(self.ratio, 1 / self.ratio) <= 1 + self.stated


def is_below(counter: str, ratio: float) -> bool:
    """True if a run was slower, or needed more memory, than predicted, by more than `PARITY`."""
    return ratio > 1 + PARITY if counter == "tokens_per_s_per_gpu" else ratio < 1 - PARITY


def is_even(source: str) -> bool:
    """True of rows that may be read before the end."""
    return hashlib.sha256(source.encode()).digest()[-1] % 2 == 0


def raw_rows(*, even: bool) -> list[dict[str, Any]]:
    """The lines of one half of the file."""
    rows = (json.loads(line) for line in ROWS.read_text().splitlines())
    return [row for row in rows if is_even(row["source"]) == even]


def read_rows(*, even: bool = True) -> list[Row]:
    """One half of the rows, with their predictions."""
    from shardwise.trainer.planning.cases import estimate_case

    return [
        Row(row["id"], row["case"]["stack"], row["case"], row["truth"], estimate_case(row["case"]))
        for row in raw_rows(even=even)
    ]


def judge(rows: Sequence[Row]) -> list[Judged]:
    """Every measured counter of rows that have a prediction."""
    return [
        Judged(row, counter, predicted(row, counter) / row.truth[counter], _stated(row, counter))
        for row in rows
        if "error" not in row.prediction
        for counter in COUNTERS
        if counter in row.truth
    ]


def _stated(row: Row, counter: str) -> float | None:
    from shardwise.trainer.planning.candidates import prediction_error
    from shardwise.trainer.planning.cases import read_case
    from shardwise.trainer.planning.search.certainty import PEAK, usual_error

    read = read_case(row.case)
    sharding, method = read.configuration.strategy.sharding, read.configuration.method
    if counter == "tokens_per_s_per_gpu":
        usual = usual_error(read.device, has_experts=has_experts(row))
        return None if usual is None else max(usual, prediction_error(read.configuration))
    kind = PEAK.get((sharding.uses_fsdp, method))
    return None if kind is None else kind.error


def _gpu(row: Row) -> str:
    return str(row.case["hardware"]["gpu"])


def _is_well_known(row: Row) -> bool:
    from shardwise.trainer.planning.search.certainty import is_well_known

    return is_well_known(_gpu(row))


def has_experts(row: Row) -> bool:
    """True of a mixture of experts."""
    return "moe" in row.case["model"]["model_type"]


def groups(rows: Sequence[Row]) -> dict[str, Callable[[Row], bool]]:
    """The groups of a table: all, then by kind of card, model, size, card and trainer."""
    found: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "A100, H100, H200": _is_well_known,
        "other cards": lambda row: not _is_well_known(row),
        "dense": lambda row: not has_experts(row),
        "mixture of experts": has_experts,
        "several nodes": lambda row: row.case["hardware"]["nodes"] > 1,
    }
    for gpu in sorted({_gpu(row) for row in rows}):
        found[gpu] = lambda row, gpu=gpu: _gpu(row) == gpu  # type: ignore[misc]
    for trainer in sorted({row.reference for row in rows}):
        found[trainer] = lambda row, trainer=trainer: row.reference == trainer  # type: ignore[misc]
    return found


def table(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One line for each group and counter that has a row."""
    judged, lines = judge(rows), []
    for name, belongs in groups(rows).items():
        for counter, label in COUNTERS.items():
            found = [each for each in judged if each.counter == counter and belongs(each.row)]
            if found:
                lines.append({"rows of": name, "counter": label, **_figures(found)})
    return lines


def _figures(found: Sequence[Judged]) -> dict[str, object]:
    errors, ranged = [abs(each.ratio - 1) for each in found], [each.is_in_range for each in found]
    stated = [each for each in ranged if each is not None]
    return {
        "rows": len(found),
        "median": f"{percentile(errors, 0.5):.1%}",
        "90th percentile": f"{percentile(errors, 0.9):.1%}",
        "below parity": f"{sum(each.is_below_parity for each in found) / len(found):.0%}",
        "in the stated range": f"{sum(stated) / len(stated):.0%}" if stated else "none stated",
    }


def verdicts(rows: Sequence[Row]) -> str:
    """Runs that are not in the table: without a prediction, and out of memory."""
    unknown = [row for row in rows if "error" in row.prediction]
    crashed = [row for row in rows if row.truth.get("oom") and "error" not in row.prediction]
    wrong = sum(row.prediction["fits"] for row in crashed)
    return (
        f"{len(unknown)} rows without a prediction; out of memory: {len(crashed)}, of which {wrong} were called fitting"
    )


def stored_odd() -> dict[str, Any] | None:
    """The scores of the odd rows; None before they were scored."""
    found = sorted(RESULTS.glob("judging-odd-*.json"))
    scores: dict[str, Any] | None = json.loads(found[-1].read_text()) if found else None
    return scores


def score_odd() -> Path:
    """Scores the odd rows and stores the scores; FileExistsError if that was done before."""
    if stored_odd() is not None:
        raise FileExistsError("the odd rows were scored before: benchmarks/results/judging-odd-*.json")
    rows, date = read_rows(even=False), f"{datetime.now(UTC):%Y-%m-%d}"
    path = RESULTS / f"judging-odd-{date}.json"
    content = {"date": date, "rows": len(rows), "verdicts": verdicts(rows), "table": table(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def main() -> int:
    """Prints the table of one half of the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rows", action="store_true", help="list every even row")
    group.add_argument("--odd", action="store_true", help="score the odd rows, once")
    options = parser.parse_args()
    if options.odd:
        try:
            print(f"wrote {score_odd().relative_to(ROOT)}")
        except FileExistsError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        return 0
    rows = read_rows()
    if options.rows:
        print(*map(row_line, rows), sep="\n")
    print(f"\n{text_table(table(rows))}\n{verdicts(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
