"""Proof on a card: predictions beside what is measured, small cards, FP8, other trainers, and our own path.

    python benchmarks/gpu.py [PIECE ...] [--minutes 9] [--out DIR] [--list] [--again] [--write]
    make bench-gpu                       the same for all pieces, one after the other, until nothing is left

A call ends within its minutes and says how many steps are left; the next call goes on with them. Models have drawn
weights and rows drawn tokens: nothing is downloaded. Without a GPU everything is rehearsed in a tiny form on the CPU.
What was measured is kept in DIR (runs/bench-gpu); --write puts it into benchmarks/results/ and docs/benchmarks.md,
and measured peaks into tests/calibration/, where tests predict them again.

Exit code 0: nothing is left. 75: some steps are, call again. 1: nothing is left and a step failed, or what is left
never fits. 130: it was interrupted.
"""

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "benchmarks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import msgspec  # noqa: E402  (the path comes first)
from on_gpu import prediction  # noqa: E402
from on_gpu.all_pieces import PIECES  # noqa: E402
from on_gpu.bench import Bench  # noqa: E402
from on_gpu.case import Case  # noqa: E402
from on_gpu.goals import goals_table  # noqa: E402
from on_gpu.pieces import StepLog, go_through  # noqa: E402
from on_gpu.prediction_cases import CASES  # noqa: E402
from on_gpu.prediction_peaks import portable_hardware, write_peaks  # noqa: E402
from on_gpu.prediction_runs import peaks_of  # noqa: E402
from on_gpu.provenance import provenance_table  # noqa: E402
from on_gpu.side_by_side import run_side_by_side  # noqa: E402
from written_page import with_tables  # noqa: E402

from launch.console import Console  # noqa: E402
from launch.supervisor import StopRequest  # noqa: E402
from trainer.spec.errors import ExitCode  # noqa: E402

DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
CALIBRATION = ROOT / "tests" / "calibration"
MINUTES = 9.0


def main() -> int:
    options = _options()
    if options.list:
        for piece in PIECES:
            sys.stdout.write(f"{piece.name:12} {piece.about}\n")
        return 0
    console, stop = Console(sys.stdout), StopRequest()
    until_s = time.monotonic() + options.minutes * 60
    wanted = [piece for piece in PIECES if not options.piece or piece.name in options.piece]
    with stop.listening():
        out = options.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        bench = Bench(out, is_tiny=options.tiny, console=console, stop=stop)
        log = StepLog(out / ("steps-tiny.jsonl" if bench.is_tiny else "steps.jsonl"))
        left = failed = new = 0
        for piece in wanted:
            if options.together and piece is prediction.PIECE:
                run_side_by_side(
                    piece, bench, log, _chosen(options.only), most=options.together, until_s=until_s, timeout_s=240
                )
                continue
            progress = go_through(
                piece, bench, log, until_s=until_s, is_again=options.again, most=options.first, only=options.only
            )
            failed += sum(1 for row in log.rows(piece).values() if "error" in row)
            left += progress.num_left
            new += progress.num_new
            console.line(f"{piece.name}: {progress.num_done} steps done, {progress.num_left} left")
    path = _results_path(bench)
    content = msgspec.json.format(msgspec.json.encode(results(bench, log)), indent=1)
    (out / path.name).write_bytes(content + b"\n")
    if options.write:
        path.write_bytes(content + b"\n")
        write_tables(bench, log)
        peaks = peaks_of(log.rows(prediction.PIECE))
        kept = write_peaks(CALIBRATION, _device_slug(bench), f"{datetime.now(UTC):%Y-%m-%d}", peaks)
        console.line(f"wrote {path}, {DOCUMENT}" + (f" and {kept}" if kept else ""))
    if stop.kind is not None:
        return int(ExitCode.INTERRUPTED)
    if left and not new:
        console.line(f"no step that is left fits into {options.minutes:g} minutes, or --first leaves them out")
        return 1
    if left:
        return int(ExitCode.REQUEUE)
    return 1 if failed else 0


def _chosen(only: str) -> list[Case]:
    return [case for case in CASES if re.search(only, case.name)]


def results(bench: Bench, log: StepLog) -> dict[str, object]:
    """Everything that is known, for a results file."""
    return {
        "kind": "rehearsal on a CPU" if bench.is_tiny else "measured on a GPU",
        "device": bench.device_name,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": "python benchmarks/gpu.py",
        "versions": bench.versions,
        "hardware": msgspec.to_builtins(portable_hardware(bench.hardware)),
        "pieces": {piece.name: log.rows(piece) for piece in PIECES},
    }


def write_tables(bench: Bench, log: StepLog) -> None:
    """Renews docs/benchmarks.md."""
    tables = {name: table for piece in PIECES for name, table in piece.tables(log.rows(piece)).items()}
    goals = {piece.name: piece.goals(log.rows(piece)) for piece in PIECES}
    tables["goals"] = goals_table(goals, is_rehearsal=bench.is_tiny)
    tables["provenance"] = provenance_table(bench, {piece.name: log.rows(piece) for piece in PIECES})
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8"), tables), encoding="utf-8")


def _results_path(bench: Bench) -> Path:
    return RESULTS / f"{_device_slug(bench)}-{datetime.now(UTC):%Y-%m-%d}.json"


def _device_slug(bench: Bench) -> str:
    """A rehearsal is told by the widest instructions of its CPU, which decide how products are computed."""
    name = " ".join(("cpu rehearsal", *bench.hardware.host.cpu_flags[-1:])) if bench.is_tiny else bench.device_name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [piece.name for piece in PIECES]
    parser.add_argument("piece", nargs="*", choices=[*names, []], help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no step begins that would end later")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "bench-gpu", help="models, rows and what was measured"
    )
    parser.add_argument("--first", type=int, help="only so many steps of each piece")
    parser.add_argument("--only", default="", metavar="REGEX", help="only steps whose name has this in it")
    parser.add_argument(
        "--together",
        type=int,
        default=0,
        metavar="N",
        help="cases of prediction N at a time: their memory alone counts",
    )
    parser.add_argument("--again", action="store_true", help="measure what is known already")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models, also on a GPU")
    parser.add_argument("--list", action="store_true", help="name the pieces")
    parser.add_argument(
        "--write", action="store_true", help="renew benchmarks/results/, tests/calibration/ and the page"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
