"""What a run's earlier attempts came to: those its report tells of, and those whose supervisor was killed with them.

A node that dies takes the supervisor with it; the scheduler starts the job again, and if the cause is in the job it
dies again. So attempts are counted over all starts of a run.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from launch.attempt.retries import MAX_SAME_STEP
from launch.rundir.files import tail_rows
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.messages.heartbeat import heartbeat_path, read_heartbeat
from trainer.spec.plan import Plan
from trainer.spec.report import AttemptRecord, Ending, Fault, Report

MAX_IDLE = 10
_MOST_BYTES = 64 << 20  # of metrics.jsonl: a hundred thousand steps


def earlier_history(run_dir: Path) -> list[AttemptRecord]:
    """Records of every attempt there was, the oldest first."""
    try:
        told = {record.number: record for record in codec.read(run_dir / "report.json", Report).history}
    except InputError:
        told = {}  # killed before it could report
    folder = run_dir / "attempts"
    numbers = {int(path.name) for path in folder.glob("*") if path.name.isdigit()} if folder.is_dir() else set()
    untold = {number: record for number in numbers - told.keys() if (record := _made_record(folder / str(number)))}
    return [record for _, record in sorted((told | untold).items())]


def refuse_endless_restarts(run_dir: Path) -> None:
    """EnvironmentFaultError where a scheduler would start a run again that ends at the same step each time.

    By its own fault three times; stopped from outside before it did a step, ten times.
    """
    history = earlier_history(run_dir)
    if not history:
        return
    last = history[-1]
    idle = sum(1 for _ in itertools.takewhile(lambda record: record.step == last.step, reversed(history)))
    if idle > MAX_IDLE:
        raise EnvironmentFaultError(
            f"{run_dir}: {MAX_IDLE} jobs in a row were stopped before they did a step, all at step {last.step}\n"
            "give them more time (slurm.time), or another partition"
        )
    if num_at_step(history, last.step) >= MAX_SAME_STEP:
        raise EnvironmentFaultError(
            f"{run_dir}: {MAX_SAME_STEP} attempts in a row ended at step {last.step}, so it is not started again: "
            f"{(last.cause or 'no reason given').splitlines()[0]}\n"
            f"see {run_dir}/attempts/{last.number}/logs; once it is mended, submit it again or add --resume"
        )


def num_at_step(history: Sequence[AttemptRecord], step: int) -> int:
    """How many of the last attempts, without a break, ended badly at this step."""
    count = 0
    for record in reversed(history):
        if record.fault is None or record.step != step:
            break
        count += 1
    return count


def _made_record(attempt_dir: Path) -> AttemptRecord | None:
    """Of an attempt whose supervisor was killed; None where it had not begun."""
    try:
        candidate = codec.read(attempt_dir / "plan.json", Plan).chosen
    except InputError:
        return None
    beats = [beat for rank in range(candidate.num_ranks) if (beat := read_heartbeat(attempt_dir, rank)) is not None]
    if not beats:
        return None
    return AttemptRecord(
        number=int(attempt_dir.name),
        strategy=candidate.strategy.name,
        num_ranks=candidate.num_ranks,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        resumed_from_step=_first_step(attempt_dir.parent.parent, int(attempt_dir.name)),
        step=max(beat.step for beat in beats),
        ending=Ending.FAILED,
        fault=Fault.KILLED,
        cause="the process that started the ranks was killed",
        duration_s=_seconds_seen(attempt_dir, candidate.num_ranks),
        predicted_peak_bytes=candidate.memory.peak_allocated_bytes,
    )


def _first_step(run_dir: Path, attempt: int) -> int | None:
    """The step that an attempt went on from, as its first line of metrics tells; None: from the beginning, or none."""
    for line in tail_rows(run_dir / "metrics.jsonl", limit=_MOST_BYTES):
        if line.get("attempt") == attempt and "step" in line:
            return int(line["step"]) - 1 or None
    return None


def _seconds_seen(attempt_dir: Path, num_ranks: int) -> float:
    """From the plan to the last sign of life."""
    signs = [path for rank in range(num_ranks) if (path := heartbeat_path(attempt_dir, rank)).is_file()]
    newest = max(path.stat().st_mtime for path in signs)
    return max(0.0, newest - (attempt_dir / "plan.json").stat().st_mtime)
