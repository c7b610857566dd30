"""Half an hour on a GPU: does everything run, are predictions right, how fast is it compared with other trainers.

    python benchmarks/gpu.py [--minutes 30] [--out DIR] [--only REGEX] [--peers DIR] [--list] [--write]

One programme, the most valuable first: (1) an 8B model with all parameters at the planner's own choice, (2) FP8,
(3) 8B with state in host RAM, and QLoRA under small caps, (4) LoRA of 8B compared with other trainers, (5) the first
twenty predictions and measurements, (6) all parameters and QLoRA of 8B compared with other trainers, (7) caps at the
prediction and below it, and the other predictions, (8) small cards under --vram, (9) every engine and method. --list
shows which steps three calls of ten minutes hold, by an upper bound of their seconds.

A call ends within its time limit; the next one continues with the remaining steps. Models have random weights: nothing
is downloaded. Without a GPU, all of it is rehearsed with tiny models on the CPU.

DIR (runs/bench-gpu) contains steps-DEVICE.jsonl, DEVICE.json (every figure, with hardware and versions) and calibration
lines. --write copies them to benchmarks/results/ and tests/calibration/ and updates docs/benchmarks.md.

Exit code 0: no step failed (the last line has the number of remaining ones). 1: a step failed. 130: interrupted.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "benchmarks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import msgspec  # noqa: E402  (the path comes first)
from on_gpu import engines, fp8, headline, peers, predicted, small_cards  # noqa: E402
from on_gpu.bench import LEAST_ROWS, Bench, job_of, portable_hardware  # noqa: E402
from on_gpu.case import Outcome, Row, result_of  # noqa: E402
from on_gpu.models import model_config  # noqa: E402
from on_gpu.peaks import ROWS_NAME, Peak, write_peaks  # noqa: E402
from on_gpu.programme import Step, StepLog, calls_of, matching, run_steps  # noqa: E402
from written_page import markdown_table, with_tables  # noqa: E402

from shardwise.launch.attempt.supervisor import StopRequest  # noqa: E402
from shardwise.launch.terminal import Console  # noqa: E402
from shardwise.trainer.spec.errors import ExitCode  # noqa: E402
from shardwise.trainer.spec.units import format_bytes  # noqa: E402

DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS, CALIBRATION = ROOT / "benchmarks" / "results", ROOT / "tests" / "calibration"
MINUTES = 30.0
LISTED_CALL_S, NUM_LISTED_CALLS = 600.0, 3
CORES_EACH, MOST_TOGETHER = 2, 7  # of concurrent runs: starting one needs cores, not the card
NOT_MEASURED = "Not measured on a GPU yet: no figure here is from one.\n"


class Part(NamedTuple):
    """A part of the programme; caps have a separate table."""

    name: str
    about: str
    summary: Callable[[Mapping[str, Row]], str]
    table: Callable[[Mapping[str, Row]], str]


PARTS = (
    Part(headline.PART, "An 8B model on one card", headline.summary, headline.table),
    Part(engines.PART, "Every engine and method", engines.summary, engines.table),
    Part(predicted.PART, "Predicted and measured", predicted.summary, predicted.table),
    Part(predicted.CAPS, "Caps at the prediction and 3 % below", predicted.caps_summary, predicted.caps_table),
    Part(peers.PART, "Compared with TRL, Unsloth, Axolotl and plain Accelerate", peers.summary, peers.table),
    Part(fp8.PART, "FP8 and bf16", fp8.summary, fp8.table),
    Part(small_cards.PART, "Small cards", small_cards.summary, small_cards.table),
)


def programme(bench: Bench) -> list[Step]:
    """All steps, the most valuable first."""
    full, *others = headline.steps(bench)
    measured, contests = predicted.steps(bench), peers.steps(bench)
    twenty, rest = measured[: predicted.NUM_FIRST], measured[predicted.NUM_FIRST :]
    lora, other_contests = contests[: len(peers.TRAINERS)], contests[len(peers.TRAINERS) :]
    later = (step for part in (small_cards, engines) for step in part.steps(bench))
    return [full, *fp8.steps(bench), *others, *lora, *twenty, *other_contests, *rest, *later]


def main() -> int:
    options = _options()
    console, stop = Console(sys.stdout), StopRequest()
    until_s = time.monotonic() + options.minutes * 60
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with stop.listening():
        bench = Bench(
            out, is_tiny=options.tiny, console=console, stop=stop, is_listed=options.list, peers=options.peers
        )
        log = StepLog(out / f"steps-{slug_of(bench)}.jsonl", versions=bench.versions)
        steps = matching(programme(bench), options.only, first=options.first)
        if options.list:
            console.line(calls_table(steps, log))
            return 0
        together = options.together or _together(bench)
        console.line(f"{len(steps)} steps on {bench.device_name}, up to {together} concurrently")
        progress = run_steps(steps, bench, log, until_s=until_s, together=together)
    rows = {part.name: log.rows(part.name) for part in PARTS}
    write_results(bench, rows, out, is_published=options.write)
    console.line(summary_table(rows))
    console.line(f"{progress.num_new} steps done, {progress.num_left} left: the next call continues with them")
    if stop.kind is not None and not progress.is_time_over:
        return int(ExitCode.INTERRUPTED)
    return 1 if num_failed(rows) else 0


def calls_table(steps: Sequence[Step], log: StepLog) -> str:
    """The steps that are left and fit into each of three calls of ten minutes, with an upper bound of their seconds."""
    lines, held = [], 0
    waiting = [step for step in steps if not log.has(step)]
    for number, call in enumerate(calls_of(waiting, seconds=[LISTED_CALL_S] * NUM_LISTED_CALLS), start=1):
        held += len(call)
        lines.append(
            f"call {number} of {LISTED_CALL_S / 60:g} minutes: at most {sum(s.expected_s for s in call):.0f} s"
        )
        lines += [f"  {step.expected_s:4.0f} s  {step.part}: {step.name}" for step in call]
    return "\n".join([*lines, f"{held} of {len(waiting)} steps; those that only measure memory run concurrently"])


def num_failed(rows: Mapping[str, Mapping[str, Row]]) -> int:
    """Steps that raised, or whose run neither finished nor ran out of memory."""
    return sum(row.get("outcome") == Outcome.FAILED for of_part in rows.values() for row in of_part.values())


def write_results(bench: Bench, rows: Mapping[str, Mapping[str, Row]], out: Path, *, is_published: bool) -> None:
    """Writes results and calibration lines into `out` and, if published, into the repository, with the page.

    A rehearsal publishes only its counts: figures of tiny models on a CPU are of no use to a reader.
    """
    name, date = slug_of(bench), f"{datetime.now(UTC):%Y-%m-%d}"
    facts = provenance(bench, date)
    _write_json(out / f"{name}.json", facts | {"parts": rows})
    peaks = peaks_of(bench, rows[predicted.PART])
    write_peaks(out, f"calibration-{name}", date, peaks)
    if not is_published:
        return
    counts = {part.name: _counts(rows[part.name]) for part in PARTS}
    for older in RESULTS.glob(f"{name}-????-??-??.json"):
        older.unlink()
    _write_json(RESULTS / f"{name}-{date}.json", facts | {"parts": counts if bench.is_tiny else rows})
    if len(rows[predicted.PART]) >= len(predicted.CASES):  # an incomplete set does not replace an older file
        write_peaks(CALIBRATION, name, date, peaks)
    page = DOCUMENT.read_text(encoding="utf-8")
    if not bench.is_tiny or NOT_MEASURED in page:  # a rehearsal does not replace measurements
        DOCUMENT.write_text(with_tables(page, page_tables(bench, rows, date)), encoding="utf-8")


def provenance(bench: Bench, date: str) -> dict[str, object]:
    """Device, date, versions and hardware of the figures."""
    return {
        "kind": "rehearsal on a CPU" if bench.is_tiny else "measured on a GPU",
        "device": bench.device_name,
        "date": date,
        "command": "python benchmarks/gpu.py",
        "versions": bench.versions,
        "hardware": msgspec.to_builtins(portable_hardware(bench.hardware)),
    }


def page_tables(bench: Bench, rows: Mapping[str, Mapping[str, Row]], date: str) -> dict[str, str]:
    """The generated parts of docs/benchmarks.md by the name of their markers."""
    gpu = bench.hardware.gpus[0] if bench.hardware.gpus else None
    host = bench.hardware.host
    memory = "" if gpu is None else f", {format_bytes(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}"
    lines = [
        ("kind", "a rehearsal with tiny models" if bench.is_tiny else "measured"),
        ("device", bench.device_name + memory),
        ("host", f"{host.cpu_name or 'CPU'}, {host.num_cores or '?'} cores"),
        ("date", date),
        ("versions", ", ".join(f"{name} {version}" for name, version in bench.versions.items())),
        *((f"steps of `{part.name}`", _format_counts(rows[part.name])) for part in PARTS),
    ]
    tables = {"provenance": markdown_table(("", ""), lines), "measured": NOT_MEASURED}
    if not bench.is_tiny:
        blocks = (f"### {part.about}\n\n{part.table(rows[part.name])}" for part in PARTS if rows[part.name])
        tables["measured"] = "\n".join(blocks)
    return tables


def summary_table(rows: Mapping[str, Mapping[str, Row]]) -> str:
    """One line per part, for the console."""
    width = max(len(part.name) for part in PARTS)
    lines = (f"  {part.name:{width}}  {part.summary(rows[part.name])}" for part in PARTS if rows[part.name])
    return "\n".join(["", *lines])


def peaks_of(bench: Bench, rows: Mapping[str, Row]) -> list[Peak]:
    """The calibration lines of the predicted cases that ran or ran out of memory."""
    cases = {case.name: case for case in predicted.CASES}
    hardware, found = portable_hardware(bench.hardware), []
    for name, row in rows.items():
        result = result_of(row)
        if name not in cases or result is None or result.outcome not in (Outcome.RAN, Outcome.OUT_OF_MEMORY):
            continue
        case = cases[name]
        job = job_of(case, model=case.model, rows=ROWS_NAME, seq_len=bench.seq_len_of(case))
        found.append(
            Peak(
                name=name,
                outcome=result.outcome,
                job=job,
                num_rows=max(LEAST_ROWS, case.sequences_per_step),
                model_config=model_config(case.model, is_tiny=True) if bench.is_tiny else None,
                hardware=hardware,
                versions=bench.versions,
                measured=result.measured.memory,
            )
        )
    return found


def slug_of(bench: Bench) -> str:
    """The name of a device for file names; for a CPU its widest instructions, which determine its product kernels."""
    name = bench.device_name if bench.hardware.gpus else " ".join(bench.hardware.host.cpu_flags[-1:])
    kind = "" if not bench.is_tiny else "rehearsal " if bench.hardware.gpus else "cpu rehearsal "
    name = f"{kind}{name}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _together(bench: Bench) -> int:
    cores = bench.hardware.host.num_cores or 1
    return max(1, min(MOST_TOGETHER, cores // CORES_EACH)) if bench.hardware.gpus else 1


def _counts(rows: Mapping[str, Row]) -> dict[str, int]:
    outcomes = [str(row.get("outcome")) for row in rows.values()]
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}


def _format_counts(rows: Mapping[str, Row]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in _counts(rows).items()) or "none"


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def _folder(text: str) -> Path:
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return folder


def _options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES, help="time limit; default 30")
    add("--out", type=Path, default=ROOT / "runs" / "bench-gpu", help="models, rows and results")
    add("--only", default="", metavar="REGEX", help="steps with this in `part: name`")
    add("--first", type=int, metavar="N", help="the first N steps of each part")
    add("--together", type=int, metavar="N", help="concurrent runs if only memory counts; default by cores")
    add("--peers", type=_folder, metavar="DIR", help="packages of other trainers: DIR/unsloth, DIR/axolotl")
    add("--list", action="store_true", help="show the steps of three calls of ten minutes, and run none")
    add("--tiny", action="store_true", help="rehearse with tiny models, also on a GPU")
    add("--write", action="store_true", help="update benchmarks/results/, tests/calibration/ and docs/benchmarks.md")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
