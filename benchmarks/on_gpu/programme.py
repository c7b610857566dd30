"""The programme: steps in the order of their importance, the log that a later call resumes from, and how steps run.

A finished step is a line of `steps-DEVICE.jsonl`; a later call continues with the steps that have none. A line counts
only for the versions of shardwise and torch that it was measured with. Steps that measure only memory run concurrently
while the sum of their planned needs fits the card; a step that measures speed runs alone.
"""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome, Row, row_of, without_shared_figures

END_S = 5.0  # before the time limit, when running steps are ended
POLL_S = 0.2


class Step(NamedTuple):
    """One measurement."""

    part: str
    name: str  # unique within its part
    run: Callable[[], Row]
    expected_s: float  # upper bound on a GPU: the step does not begin if fewer seconds are left
    need_bytes: Callable[[], int] | None = None  # of the card; None: it must run alone


class Progress(NamedTuple):
    """The outcome of one call."""

    num_new: int = 0
    num_left: int = 0
    is_time_over: bool = False


def case_step(
    part: str, bench: Bench, case: Case, *, is_timed: bool = False, judge: Callable[[Row], Row] | None = None
) -> Step:
    """The step that plans and runs a case; `judge` adds its verdict to the row."""

    def run() -> Row:
        row = row_of(bench.run(case))
        return row if judge is None else row | judge(row)

    need_bytes = None if is_timed else lambda: bench.need_bytes(case)
    return Step(part, case.name, run, bench.expected_s(case), need_bytes)


class StepLog:
    """The rows of finished steps, by part and name; a line is appended as soon as its step ends."""

    def __init__(self, path: Path, *, versions: Mapping[str, str]) -> None:
        self._path = path
        self._key = ", ".join(f"{name} {versions.get(name)}" for name in ("shardwise", "torch"))
        self._rows: dict[tuple[str, str], Row] = {}
        for line in _read_lines(path):
            if line["versions"] == self._key:
                self._rows[line["part"], line["step"]] = line["row"]

    def rows(self, part: str) -> dict[str, Row]:
        """The rows of a part by the name of their step, in the order in which they ended."""
        return {step: row for (of, step), row in self._rows.items() if of == part}

    def has(self, step: Step) -> bool:
        return (step.part, step.name) in self._rows

    def add(self, step: Step, row: Row) -> None:
        self._rows[step.part, step.name] = row
        line = {"part": step.part, "step": step.name, "versions": self._key, "row": row}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def run_steps(steps: Sequence[Step], bench: Bench, log: StepLog, *, until_s: float, together: int = 1) -> Progress:
    """Runs the steps that have no row, in order, until `until_s` of the monotonic clock.

    At most `together` run at once. A step that raises has a row with its error, and the others continue. A step that
    ran out of memory while others shared the card is repeated alone.
    """
    together = together if bench.card_bytes else 1
    waiting = [step for step in steps if not log.has(step)]
    running: dict[Future[Row], tuple[Step, int]] = {}
    num_new = num_left = 0
    is_time_over = False

    def may_begin(need_bytes: int | None) -> bool:
        if not running:
            return True
        taken = [need for _, need in running.values()]
        is_alone = need_bytes is None or any(need == bench.card_bytes for need in taken)
        return not is_alone and len(running) < together and sum(taken) + (need_bytes or 0) <= bench.card_bytes

    with ThreadPoolExecutor(max_workers=max(1, together)) as pool:
        while waiting or running:
            left_s = until_s - time.monotonic()
            is_time_over = is_time_over or (left_s < END_S and bench.stop.kind is None)
            if is_time_over or bench.stop.kind is not None:
                num_left += len(waiting)
                waiting = []
                bench.end()
            elif waiting and waiting[0].expected_s > left_s:
                num_left += 1
                waiting.pop(0)
                continue
            elif waiting and may_begin(need := _need_of(waiting[0])):
                step, is_shared = waiting.pop(0), together > 1 and need is not None
                taken = bench.card_bytes if need is None else need
                running[pool.submit(_timed, step, bench, is_shared=is_shared)] = (step, taken)
                continue
            for future in wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED).done:
                step, _ = running.pop(future)
                row = future.result()
                if bench.stop.kind is not None:
                    num_left += 1
                elif _needs_the_card(step, row):
                    waiting.insert(0, step._replace(need_bytes=None))
                else:
                    log.add(step, row)
                    num_new += 1
                    bench.console.line(f"{step.part}: {step.name}: {outcome_line(row)} ({row['took_s']:.0f} s)")
    return Progress(num_new, num_left, is_time_over)


def calls_of(steps: Sequence[Step], *, seconds: Sequence[float]) -> list[list[Step]]:
    """The steps that begin in each of several calls if each takes its upper bound and none run concurrently."""
    waiting, calls = list(steps), []
    for limit_s in seconds:
        left_s, begun, later = limit_s - END_S, list[Step](), list[Step]()
        for step in waiting:
            if step.expected_s <= left_s:
                left_s -= step.expected_s
                begun.append(step)
            else:
                later.append(step)
        calls.append(begun)
        waiting = later
    return calls


def outcome_line(row: Row) -> str:
    """Outcome of a step, as short text."""
    verdict = row.get("verdict") or row.get("outcome") or "done"
    reason = row.get("error") or row.get("reason") or row.get("result", {}).get("reason")
    return f"{verdict}: {reason}" if reason else str(verdict)


def _timed(step: Step, bench: Bench, *, is_shared: bool) -> Row:
    """The row of a step with its duration, without folders of this machine."""
    started = time.monotonic()
    try:
        row = step.run()
    except Exception as error:  # noqa: BLE001  # any error: the other steps still run
        row = {"outcome": str(Outcome.FAILED), "error": f"{type(error).__name__}: {error}"}
    row = without_shared_figures(row) if is_shared else row
    row = without_folders(row, (bench.work, Path(sys.prefix), Path.home(), Path(__file__).resolve().parents[2]))
    return row | {"took_s": round(time.monotonic() - started, 1)}


def _need_of(step: Step) -> int | None:
    """Planned bytes of a step on the card; None if it must run alone.

    Planning creates the step's model and rows in this thread, so that steps with one model never create it twice.
    """
    if step.need_bytes is None:
        return None
    try:
        return step.need_bytes()
    except Exception:  # noqa: BLE001  # the step itself raises it again, and records it in its row
        return None


def _needs_the_card(step: Step, row: Row) -> bool:
    """True if a step must be repeated alone: it ran out of memory, perhaps because of concurrent steps."""
    is_out, has_cap = row.get("outcome") == Outcome.OUT_OF_MEMORY, row.get("cap_bytes") is not None
    return is_out and not has_cap and bool(row.get("result", {}).get("is_shared")) and step.need_bytes is not None


def without_folders(row: Row, folders: Sequence[Path]) -> Row:
    """The row with each of these folders written as `...`."""
    text = json.dumps(row)
    for folder in (each for each in folders if len(each.parts) > 1):
        text = text.replace(json.dumps(str(folder))[1:-1], "...")
    plain: Row = json.loads(text)
    return plain


def matching(steps: Sequence[Step], only: str, *, first: int | None = None) -> list[Step]:
    """The steps with this pattern in `part: name`, at most `first` of each part, in their order."""
    taken, found = Counter[str](), list[Step]()
    for step in steps:
        if re.search(only, f"{step.part}: {step.name}") and (first is None or taken[step.part] < first):
            taken[step.part] += 1
            found.append(step)
    return found


def _read_lines(path: Path) -> Iterator[Row]:
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the process was killed
