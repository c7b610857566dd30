"""Errors of the predictions on 195 published measurements, compared with their targets, and on 100 others.

    python benchmarks/accuracy.py [--rows] [--ours | --write]
    make bench runs the same as `accuracy`

--rows lists every row; --ours omits the other tools, which load torch; --write updates the tables of
docs/accuracy.md and stores the figures under benchmarks/results/. The exit code is 1 if a figure misses its target.

Each row is scored only on the counters that its source measured: torch's peak, steady and reserved bytes, nvidia-smi
bytes, tokens per second, and whether the run went out of memory. An error is prediction / measurement - 1; 90 % of the
absolute errors are at most the 90th percentile. docs/accuracy.md explains the figures and lists what no row measures.
`accuracy_tools` scores two other tools on the same rows.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardwise.trainer.planning.search.certainty import Compared

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "measured_public.jsonl"
UNFITTED_ROWS = ROOT / "benchmarks" / "measured_unfitted.jsonl"
GIB = 2**30
# Two runs whose measured speeds differ by less count as equally fast.
SAME_SPEED = 0.05


class Row(NamedTuple):
    """A published measurement and the prediction for its case."""

    id: str
    reference: str
    case: dict[str, Any]
    truth: dict[str, Any]
    prediction: dict[str, Any]


class Score(NamedTuple):
    """One figure over `num_rows` and its target: `at_most` or `at_least`, None if it has none."""

    name: str
    value: float
    num_rows: int
    at_most: float | None = None
    at_least: float | None = None
    is_share: bool = True

    @property
    def is_met(self) -> bool:
        above = self.at_most is not None and self.value > self.at_most
        below = self.at_least is not None and self.value < self.at_least
        return not (above or below)


def read_rows(path: Path = ROWS, *, reference: str | None = None) -> list[Row]:
    """Every measurement with its prediction, as one of its own trainer or of `reference`."""
    from shardwise.trainer.planning.cases import estimate_case

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [row["case"] if reference is None else row["case"] | {"stack": reference} for row in rows]
    return [
        Row(row["id"], row["case"]["stack"], row["case"], row["truth"], estimate_case(case))
        for row, case in zip(rows, cases, strict=True)
    ]


def errors(rows: Iterable[Row], counter: str) -> list[tuple[Row, float]]:
    """The signed relative error of each row that measured `counter`, a key of `truth`."""
    return [
        (row, predicted(row, counter) / row.truth[counter] - 1)
        for row in rows
        if counter in row.truth and "error" not in row.prediction
    ]


def predicted(row: Row, counter: str) -> float:
    """The prediction of a counter, in the counter's unit."""
    if counter == "tokens_per_s_per_gpu":
        return float(row.prediction["speed"][counter])
    return float(row.prediction["memory"][counter.replace("_gib", "_bytes")]) / GIB


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, interpolated; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def score_counter(
    rows: Sequence[Row],
    counter: str,
    name: str,
    *,
    median: float | None = None,
    p90: float | None = None,
    stack_median: float | None = None,
) -> list[Score]:
    """Median and 90th percentile of the absolute errors of a counter over all rows, then the median of each trainer."""
    by_stack: dict[str, list[float]] = defaultdict(list)
    for row, error in errors(rows, counter):
        by_stack[row.reference].append(abs(error))
    every = [error for values in by_stack.values() for error in values]
    scores = [
        Score(f"{name}, median", percentile(every, 0.5), len(every), at_most=median),
        Score(f"{name}, 90th percentile", percentile(every, 0.9), len(every), at_most=p90),
    ]
    for reference, values in sorted(by_stack.items()):
        scores.append(
            Score(f"{name}, median of {reference}", statistics.median(values), len(values), at_most=stack_median)
        )
    return scores


def score_fits(rows: Sequence[Row]) -> list[Score]:
    """How often the verdict is wrong: the costly error first."""
    predicted_rows = [row for row in rows if "error" not in row.prediction]
    crashed = [row for row in predicted_rows if row.truth.get("oom")]
    ran = [row for row in predicted_rows if not row.truth.get("oom")]
    missed = sum(row.prediction["fits"] for row in crashed)
    refused = sum(not row.prediction["fits"] for row in ran)
    return [
        Score("measured OOM called fitting", missed, len(crashed), at_most=0, is_share=False),
        Score("measured success called not fitting", refused / max(1, len(ran)), len(ran), at_most=0.05),
    ]


def score_order(rows: Sequence[Row]) -> Score:
    """How often two runs of one trainer, model and machine that differ in measured speed are ranked correctly."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "tokens_per_s_per_gpu" in row.truth and "error" not in row.prediction:
            key = (row.reference, row.case["model"], row.case["hardware"])
            groups[json.dumps(key, sort_keys=True)].append(row)
    right = pairs = 0
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            slow, fast = sorted((one, other), key=lambda row: row.truth["tokens_per_s_per_gpu"])
            if fast.truth["tokens_per_s_per_gpu"] > (1 + SAME_SPEED) * slow.truth["tokens_per_s_per_gpu"]:
                pairs += 1
                right += predicted(fast, "tokens_per_s_per_gpu") > predicted(slow, "tokens_per_s_per_gpu")
    return Score("pairs ordered right by tokens/s", right / pairs if pairs else 1.0, pairs, at_least=0.96)


def constants_behind(rows: Sequence[Row]) -> tuple[str, ...]:
    """The constants of the speed model that affect a predicted speed of the rows."""
    cases = [row.case for row in rows if "tokens_per_s_per_gpu" in row.truth and "error" not in row.prediction]
    names = _constant_names()
    assert names, "trainer/planning/speed/constants.py has no constants"
    plain = _speeds(cases)
    return tuple(name for name in names if _speeds_with(name, cases) != plain)


def _constant_names() -> list[str]:
    from shardwise.trainer.planning.speed import constants as speed_constants

    return [name for name, value in vars(speed_constants).items() if name.isupper() and isinstance(value, float)]


def _speeds(cases: Sequence[dict[str, Any]]) -> list[float]:
    from shardwise.trainer.planning.cases import estimate_case

    return [estimate_case(case)["speed"]["tokens_per_s_per_gpu"] for case in cases]


def _speeds_with(name: str, cases: Sequence[dict[str, Any]]) -> list[float]:
    """The same with one constant a tenth larger, in every module that imported it."""
    from shardwise.trainer.planning.configuration import forget

    processes = [module for module in list(sys.modules.values()) if _is_speed_module(module) and hasattr(module, name)]
    value = getattr(processes[0], name)
    try:
        for module in processes:
            setattr(module, name, 1.1 * value)
        forget()
        return _speeds(cases)
    finally:
        for module in processes:
            setattr(module, name, value)
        forget()


def _is_speed_module(module: object) -> bool:
    return getattr(module, "__name__", "").startswith("shardwise.trainer.planning.speed.")


def score_constants(rows: Sequence[Row]) -> list[Score]:
    """The number of constants in use: a model with one for every few rows would be overfitted."""
    num_all = len(_constant_names())
    behind = constants_behind(rows)
    return [
        Score("physical constants behind these speeds", len(behind), 0, at_most=15, is_share=False),
        Score("constants that no row reads (offload, SVD, CPU, ...)", num_all - len(behind), 0, is_share=False),
    ]


def score_unfitted(rows: Sequence[Row]) -> list[Score]:
    """Throughputs that no constant was fitted on, by trainer."""
    by_stack: dict[str, list[float]] = defaultdict(list)
    for row, error in errors(rows, "tokens_per_s_per_gpu"):
        by_stack[row.reference].append(abs(error))
    return [
        Score(f"tokens/s, not fitted on, {statistic} of {reference}", percentile(values, share), len(values))
        for reference, values in sorted(by_stack.items())
        for statistic, share in (("median", 0.5), ("90th percentile", 0.9))
    ]


def factor(error: float) -> float:
    """The factor between prediction and measurement, less one, of prediction / measurement - 1."""
    return max(1 + error, 1 / (1 + error)) - 1


class Unfitted(NamedTuple):
    """Errors of one kind of prediction that no constant was fitted to, and the error that plans state for it."""

    name: str
    errors: tuple[float, ...]
    stated: "Compared"

    @property
    def nine_in_ten(self) -> float:
        return percentile(self.errors, 0.9)


def unfitted() -> list[Unfitted]:
    """Speeds by kind of run, and peaks by method and sharding, of machines and trainers that nothing was fitted to.

    Peaks are those of the fitted rows, predicted without the properties of their trainer.
    """
    import judging

    from shardwise.trainer.planning.search.certainty import PEAK, SPEED, SpeedKind, speed_kind

    speeds: dict[SpeedKind, list[float]] = defaultdict(list)
    for row, error in errors([*read_rows(UNFITTED_ROWS), *judging.read_rows()], "tokens_per_s_per_gpu"):
        machine = row.case["hardware"]
        kind = speed_kind(machine["gpu"], num_nodes=machine["nodes"], has_experts=judging.has_experts(row))
        speeds[kind].append(factor(error))
    peaks: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for row, error in errors(read_rows(reference="unknown"), "peak_allocated_gib"):
        train = row.case["train"]
        peaks[train["sharding"] == "fsdp", train["method"]].append(factor(error))
    return [
        *(Unfitted(f"tokens/s, {kind}", tuple(speeds[kind]), stated) for kind, stated in SPEED.items()),
        *(
            Unfitted(f"peak allocated, {method}, {'FSDP' if is_sharded else 'one GPU'}", tuple(found), stated)
            for (is_sharded, method), stated in PEAK.items()
            for found in [peaks[is_sharded, method]]
        ),
    ]


def unfitted_figure(kind: Unfitted) -> dict[str, object]:
    """A kind as a row of a table."""
    return {
        "not fitted": kind.name,
        "rows": len(kind.errors),
        "median": f"{percentile(kind.errors, 0.5):.1%}",
        "90th percentile": f"{kind.nine_in_ten:.1%}",
        "a plan states": f"within {kind.stated.error:.0%}",
    }


def score_rows(rows: Sequence[Row]) -> list[Score]:
    """Every figure that docs/accuracy.md shows."""
    return [
        *score_counter(rows, "peak_allocated_gib", "peak allocated", median=0.02, p90=0.08, stack_median=0.08),
        *score_counter(rows, "steady_allocated_gib", "steady allocated", median=0.01),
        *score_counter(rows, "peak_reserved_gib", "peak reserved"),
        *score_counter(rows, "device_gib", "device", median=0.06),
        *score_fits(rows),
        *score_counter(rows, "tokens_per_s_per_gpu", "tokens/s", median=0.05, p90=0.15),
        score_order(rows),
        *score_unfitted(read_rows(UNFITTED_ROWS)),
        *score_constants(rows),
    ]


def figure(score: Score) -> dict[str, object]:
    """A score as a row of a table."""
    write = "{:.2%}" if score.is_share else "{:g}"
    limit, sign = (score.at_most, "at most") if score.at_least is None else (score.at_least, "at least")
    is_empty = score.is_share and not score.num_rows
    return {
        "figure": score.name,
        "rows": score.num_rows if score.num_rows or is_empty else "",
        "value": "not measured" if is_empty else write.format(score.value),
        "target": "" if limit is None else f"{sign} {limit:.0%}" if score.is_share else f"{sign} {limit:g}",
        "verdict": "" if limit is None else "met" if score.is_met else "MISSED",
    }


def row_line(row: Row) -> str:
    """A row: its measurements and the errors of the predictions."""
    if "error" in row.prediction:
        return f"{row.id} {row.reference}: {row.prediction['error']}"
    off = [
        f"{counter} {row.truth[counter]:g} {predicted(row, counter) / row.truth[counter] - 1:+.1%}"
        for counter in row.truth
        if counter != "oom"
    ]
    verdict = f"fits {row.prediction['fits']}{', measured OOM' if row.truth.get('oom') else ''}"
    train = row.case["train"]
    what = f"{train['method']} {train['sharding']} {train['micro_batch']}x{train['seq_len']}"
    return f"{row.id} {row.reference} {what} {row.prediction['memory']['peak_event']}: {'; '.join([*off, verdict])}"


def text_table(rows: Sequence[dict[str, object]]) -> str:
    """Rows as aligned columns."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def run_accuracy(*, write: bool, list_rows: bool = False, only_ours: bool = False) -> bool:
    """Prints our scores and those of the other tools; false if one of ours misses its target."""
    rows = read_rows()
    if list_rows:
        print(*map(row_line, rows), sep="\n")
    scores, unpredicted = score_rows(rows), [row for row in rows if "error" in row.prediction]
    print(f"\naccuracy, {len(rows)} published measurements, {len(unpredicted)} without a prediction")
    print(text_table([figure(score) for score in scores]))
    print(f"\n{text_table([unfitted_figure(kind) for kind in unfitted()])}")
    _judge()
    if not only_ours:
        _compare(rows, scores, write=write)
    return not unpredicted and all(score.is_met for score in scores)


def _judge() -> None:
    """Prints the scores of rows that nothing was fitted to."""
    from judging import read_rows as read_judging
    from judging import table, verdicts

    rows = read_judging()
    print(f"\n{text_table(table(rows))}\n{verdicts(rows)}")


def _compare(rows: Sequence[Row], scores: Sequence[Score], *, write: bool) -> None:
    from accuracy_page import write_page, write_results
    from accuracy_tools import score_tools, tool_versions

    tools = score_tools(rows)
    print(f"\n{text_table(tools)}")
    if write:
        write_page(scores, tools, versions=tool_versions())
        write_results(scores, tools)


def main() -> int:
    """Scores every row; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="list every row")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--ours", action="store_true", help="omit the other tools, which load torch")
    group.add_argument("--write", action="store_true", help="update docs/accuracy.md and store the figures")
    options = parser.parse_args()
    return 0 if run_accuracy(write=options.write, list_rows=options.rows, only_ours=options.ours) else 1


if __name__ == "__main__":
    sys.exit(main())
