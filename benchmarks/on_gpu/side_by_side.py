"""Cases of piece `prediction` side by side on one card, each in a process of its own.

What a process allocates is its own, so that peaks count as they do alone. Speed, and what the whole card holds, are of
everything that runs there: they are left out of these rows.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.pieces import Piece, Row, StepLog
from trainer.spec.errors import ShardwiseError

SCRIPT = Path(__file__).resolve().parents[1] / "gpu.py"
CARD_SHARE = 0.97  # of the card's memory, for all that run at once
LOOK_EVERY_S = 0.2


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    folder: Path
    need_bytes: int


def run_side_by_side(
    piece: Piece, bench: Bench, log: StepLog, cases: Sequence[Case], *, most: int, until_s: float, timeout_s: float
) -> None:
    """Runs the cases that are not done, and the caps of those that are capped; adds their rows to the log."""
    done = log.rows(piece)
    waiting = {case.name: case for case in cases if case.name not in done}
    with ThreadPoolExecutor() as pool:  # each draws in a process of its own
        list(pool.map(bench.model_of, {case.model for case in waiting.values()}))
    needs = {name: _need_bytes(bench, case) for name, case in waiting.items()}
    running: dict[str, _Running] = {}
    card_bytes = CARD_SHARE * max((gpu.memory_bytes for gpu in bench.hardware.gpus), default=0)
    while waiting or running:
        is_late = time.monotonic() + timeout_s / 3 > until_s or bench.stop.kind is not None
        for name in () if is_late else tuple(waiting):
            room = card_bytes - sum(each.need_bytes for each in running.values())
            if len(running) < most and (needs[name] <= room or not running):
                running[name] = _start(piece, bench, waiting.pop(name), needs[name], len(running), timeout_s)
        if is_late and not running:
            break
        time.sleep(LOOK_EVERY_S)
        for name in [name for name, each in running.items() if each.process.poll() is not None]:
            ended = running.pop(name)
            for step, row in _rows(ended.folder / ("steps-tiny.jsonl" if bench.is_tiny else "steps.jsonl")):
                log.add(piece, step, without_shared_figures(row))
                bench.console.line(f"{piece.name}: {step}: {row.get('error') or row.get('outcome', 'done')}")


def _need_bytes(bench: Bench, case: Case) -> int:
    """What a case is planned to take; 0 where it is refused."""
    try:
        return bench.plan_of(case).chosen.memory.need_bytes
    except ShardwiseError:
        return 0


def _start(piece: Piece, bench: Bench, case: Case, need_bytes: int, number: int, timeout_s: float) -> _Running:
    folder = bench.work / "side-by-side" / re.sub(r"[^A-Za-z0-9.]+", "-", case.name)
    folder.mkdir(parents=True, exist_ok=True)
    for shared in ("models", "rows"):
        (bench.work / shared).mkdir(exist_ok=True)
        if not (folder / shared).exists():
            (folder / shared).symlink_to(bench.work / shared)
    only = f"^(smallest card \\d+: )?{re.escape(case.name)}$"
    words = [sys.executable, str(SCRIPT), piece.name, "--only", only, "--out", str(folder)]
    words += ["--minutes", f"{timeout_s / 60:g}", *(["--tiny"] if bench.is_tiny else [])]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    return _Running(process, folder, need_bytes)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    for line in path.read_text().splitlines() if path.is_file() else ():
        step = json.loads(line)
        yield step["step"], step["row"]


def without_shared_figures(row: Row) -> Row:
    """A row of a case without what it shared with its neighbours; other rows as they are."""
    result: Mapping[str, Row] | None = row.get("result")
    if result is None:
        return row
    measured = result["measured"]
    memory = {name: value for name, value in measured.get("memory", {}).items() if name != "device_bytes"}
    return row | {"result": {**result, "measured": {**measured, "memory": memory, "speed": {}}, "step_s": []}}
