"""Files of a run directory, read on any machine that sees it, during the run or after it.

    slurm-JOB.out                    output of the batch script and the supervisor, one file for each job
    attempts/N/logs/rank-R.log       output of a rank
    attempts/N/logs/launcher*.log    output of the launcher of a machine; agents.log of srun and the agents

Nothing here needs Slurm, a GPU, or the machine of the run. Long files are read from their end. Files that are missing,
incomplete or of another version are skipped: the next read finds them. Of logs and metrics, links are skipped too: in a
run directory of another user they may lead to files of the reader.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shardwise.launch.rundir.lock import read_cancel_flag
from shardwise.launch.rundir.metrics import tail_lines, tail_rows
from shardwise.launch.rundir.paths import CONSOLE_LOG, committed_checkpoints, next_attempt
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.rank_files import (
    HOOK_PHASE,
    STEP_PHASES,
    TRAINING_PHASE,
    heartbeat_path,
    read_heartbeat,
)
from shardwise.trainer.spec.messages.submission import (
    CHAIN_FILE,
    FILE_NAME,
    JOBS_FILE,
    JobStart,
    Submission,
    parse_job_starts,
)
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.value import Value

NUM_SIDE_LINES = 5  # shown of a launcher's log
_SIDE_LOG_BYTES = 16 * 1024
_POINT = r"point-(\d+)"
V = TypeVar("V", bound=Value)


class RunFiles(NamedTuple):
    """The state of a run according to its files."""

    run_dir: Path
    plan: Plan | None  # of the newest attempt, else of the run
    attempt: int  # the newest; 0 before the first
    phase: str | None  # of the newest attempt
    problem: str | None  # why its last save failed
    rows: tuple[dict[str, Any], ...]  # the last lines of metrics.jsonl, of one attempt
    step: int | None
    report: Report | None  # of the attempts that ended
    submission: Submission | None
    starts: tuple[JobStart, ...]  # by Slurm
    job_ids: tuple[str, ...]  # every job of Slurm that the files name
    checkpoint: Path | None  # the newest
    heartbeat_s: float | None  # of the ranks, in seconds of the epoch
    cancelled: str | None  # when and by whom

    @property
    def has_final_report(self) -> bool:
        """True if the report includes the newest attempt."""
        return self.report is not None and self.attempt <= max(
            (record.number for record in self.report.history), default=0
        )

    @property
    def attempt_dir(self) -> Path | None:
        return self.run_dir / "attempts" / str(self.attempt) if self.attempt else None

    @property
    def point(self) -> int | None:
        """The number of this point of a sweep; None for other runs."""
        return None if self.submission is None else _point(self.run_dir, self.submission)


def is_run_dir(path: Path) -> bool:
    """True if a run was submitted or planned there."""
    return (path / FILE_NAME).is_file() or (path / "plan.json").is_file()


def point_of(run_dir: Path) -> int | None:
    """The number of a sweep's point, as `submission.json` states it; None for other runs."""
    path = run_dir / FILE_NAME
    return _point(run_dir, read_value(path, Submission)) if path.is_file() else None


def read_value(path: Path, kind: type[V]) -> V | None:
    """The value of a file; None if it is missing, incomplete, or of another version."""
    try:
        return codec.read(path, kind)
    except InputError:
        return None


def read_run(run_dir: Path) -> RunFiles:
    """Everything that the files of a run contain."""
    attempt = next_attempt(run_dir) - 1
    folder = run_dir / "attempts" / str(attempt)
    position = read_position(folder)
    rows = tuple(row for row in tail_rows(run_dir / "metrics.jsonl") if row.get("attempt", attempt) == attempt)
    report = read_value(run_dir / "report.json", Report)
    submission = read_value(run_dir / FILE_NAME, Submission)
    starts = parse_job_starts(_read_text(run_dir / JOBS_FILE))
    chain = _read_text(run_dir / CHAIN_FILE).split()
    named = (*(submission.job_ids if submission is not None else ()), *chain, *(start.job_id for start in starts))
    steps = [rows[-1].get("step") if rows else None, position.step, report.step if report is not None else None]
    checkpoints = committed_checkpoints(run_dir)
    written = [folder / "status.json", heartbeat_path(folder, 0), run_dir / "metrics.jsonl"] if attempt else []
    return RunFiles(
        run_dir=run_dir,
        plan=read_value(folder / "plan.json", Plan) or read_value(run_dir / "plan.json", Plan),
        attempt=attempt,
        phase=position.phase,
        problem=position.problem,
        rows=rows,
        step=max((step for step in steps if isinstance(step, int)), default=None),
        report=report,
        submission=submission,
        starts=starts,
        job_ids=tuple(dict.fromkeys(named)),
        checkpoint=checkpoints[-1] if checkpoints else None,
        heartbeat_s=max((changed for path in written if (changed := _changed_s(path))), default=None),
        cancelled=read_cancel_flag(run_dir),
    )


class Position(NamedTuple):
    """The position of an attempt; None where it is unknown."""

    phase: str | None = None
    step: int | None = None
    problem: str | None = None  # why the last save failed


def read_position(attempt_dir: Path) -> Position:
    """By status.json, and by rank 0's heartbeat, which is written on a full disk too."""
    status, beat = _read_json(attempt_dir / "status.json"), read_heartbeat(attempt_dir, 0)
    phase, step = status.get("phase"), status.get("step")
    phase, step = phase if isinstance(phase, str) else None, step if isinstance(step, int) else None
    if beat is None:
        return Position(phase, step)
    if step is None or beat.step > step:
        phase = TRAINING_PHASE if beat.phase in STEP_PHASES or beat.phase == HOOK_PHASE else beat.phase
    return Position(phase, max(beat.step, step or 0), beat.problem or None)


def outputs_of(files: RunFiles) -> tuple[Path, ...]:
    """Output files of the run's jobs of Slurm, that of the newest start last."""
    found = sorted(files.run_dir.glob("slurm-*.out"), key=_changed_s)
    newest = files.run_dir / f"slurm-{files.starts[-1].job_id}.out" if files.starts else None
    return tuple(sorted(found, key=lambda path: path == newest))


def main_log(files: RunFiles, *, rank: int | None = None, attempt: int | None = None) -> Path | None:
    """The log to show: Slurm's output, else the run's console, else rank 0's log, or the requested one; None: no log.

    InputError for an attempt or a rank that does not exist.
    """
    number = files.attempt if attempt is None else attempt
    if attempt is not None and not (files.run_dir / "attempts" / str(attempt)).is_dir():
        has = f"it has {files.attempt}" if files.attempt else "it has none yet"
        raise InputError(f"--attempt {attempt}: {files.run_dir} has no such attempt; {has}")
    if rank is None and attempt is None and (outputs := outputs_of(files)):
        return outputs[-1]
    if rank is None and attempt is None and (log := files.run_dir / CONSOLE_LOG).is_file():
        return log
    logs = files.run_dir / "attempts" / str(number) / "logs"
    path = logs / f"rank-{rank or 0}.log"
    if path.is_file():
        return path
    ranks = [int(each.stem.removeprefix("rank-")) for each in logs.glob("rank-*.log")] if logs.is_dir() else []
    if rank is not None and ranks:
        raise InputError(f"--rank {rank}: attempt {number} has ranks 0 to {max(ranks)}")
    return None


def side_logs(files: RunFiles, *, attempt: int | None = None) -> list[Path]:
    """Logs of the launchers and the agents of an attempt, without empty ones."""
    logs = files.run_dir / "attempts" / str(files.attempt if attempt is None else attempt) / "logs"
    found = [*sorted(logs.glob("launcher*.log")), *sorted(logs.glob("agents.log"))]
    return [path for path in found if any(map(str.strip, tail_lines(path, _SIDE_LOG_BYTES)))]


def _point(run_dir: Path, submission: Submission | None) -> int | None:
    """Without a readable number, which version 0.7 did not write, it is that in the name of the folder."""
    if submission is not None and not isinstance(submission.point, msgspec.UnsetType):
        return submission.point
    match = re.fullmatch(_POINT, run_dir.name)
    return None if match is None else int(match[1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(codec.read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return codec.read_file(path).decode(errors="replace")
    except OSError:
        return ""


def _changed_s(path: Path) -> float:
    """The time of the last write; the file is opened first, or NFS returns an earlier time."""
    try:
        with codec.open_file(path, follows_link=False) as stream:
            return os.fstat(stream.fileno()).st_mtime
    except OSError:
        return 0.0
