"""Files of a run directory, read on any machine that sees it, during the run or after it.

    slurm-JOB.out                    output of the batch script and the supervisor, one file for each job
    attempts/N/logs/rank-R.log       output of a rank
    attempts/N/logs/launcher*.log    output of the launcher of a machine; agents.log of srun and the agents

Nothing here needs Slurm, a GPU, or the machine of the run. Long files are read from their end. Files that are missing,
incomplete or of another version are skipped: the next read finds them. Of logs and metrics, links are skipped too: in a
run directory of another user they may lead to files of the reader.
"""

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from shardwise.launch.rundir.lock import read_cancel_flag
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

TAIL_BYTES = 64 * 1024  # of metrics.jsonl: a hundred steps
NUM_SIDE_LINES = 5  # shown of a launcher's log
_BYTES_A_LINE = 400  # of logs, generously: read for the last lines
_MIN_TAIL_BYTES = 16 * 1024
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
MAX_METRICS_LINES = 10_000  # of metrics.jsonl, retained for a view or a report
LEAST_SAVE_S = 1e-3  # below it, no save was due
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
    return _point(run_dir, _read(path, Submission)) if path.is_file() else None


def read_run(run_dir: Path) -> RunFiles:
    """Everything that the files of a run contain."""
    attempt = next_attempt(run_dir) - 1
    folder = run_dir / "attempts" / str(attempt)
    position = read_position(folder)
    rows = tuple(row for row in tail_rows(run_dir / "metrics.jsonl") if row.get("attempt", attempt) == attempt)
    report = _read(run_dir / "report.json", Report)
    submission = _read(run_dir / FILE_NAME, Submission)
    starts = parse_job_starts(_read_text(run_dir / JOBS_FILE))
    chain = _read_text(run_dir / CHAIN_FILE).split()
    named = (*(submission.job_ids if submission is not None else ()), *chain, *(start.job_id for start in starts))
    steps = [rows[-1].get("step") if rows else None, position.step, report.step if report is not None else None]
    checkpoints = committed_checkpoints(run_dir)
    written = [folder / "status.json", heartbeat_path(folder, 0), run_dir / "metrics.jsonl"] if attempt else []
    return RunFiles(
        run_dir=run_dir,
        plan=_read(folder / "plan.json", Plan) or _read(run_dir / "plan.json", Plan),
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


NUM_RECENT_STEPS = 50


def recent_tokens_per_s(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Tokens per second of all ranks over these lines of metrics.jsonl together; None if none was timed."""
    timed = [row for row in rows if row.get("tokens_per_s") and row.get("step_s")]
    seconds = sum(row["step_s"] for row in timed)
    return sum(row["tokens_per_s"] * row["step_s"] for row in timed) / seconds if seconds else None


def tail_rows(path: Path, limit: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The complete rows among the last bytes of metrics.jsonl; damaged ones are skipped."""
    return [row for line in tail_lines(path, limit) if (row := parse_row(line.encode())) is not None]


def tail_lines(path: Path, limit: int = TAIL_BYTES) -> list[str]:
    """The lines among the last bytes of a file; the first of them only if it is complete."""
    try:
        with codec.open_file(path, follows_link=False) as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - limit - 1)
            stream.seek(begin)
            content = stream.read()
    except OSError:
        return []
    if begin:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace").splitlines()


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file, fewer where they are extremely long."""
    size = path.stat().st_size if path.is_file() else 0
    limit = max(_MIN_TAIL_BYTES, count * _BYTES_A_LINE)
    most = min(size, 16 * limit)
    lines = tail_lines(path, limit)
    while len(lines) < count and limit < most:
        limit *= 4
        lines = tail_lines(path, limit)
    return lines[-count:] if count else []


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
    return [path for path in found if any(map(str.strip, tail_lines(path, _MIN_TAIL_BYTES)))]


class NewLines:
    """Complete lines of a file since the last call; those that are longer than a MiB are skipped."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path, self._is_skipping = path, False
        self._offset = _end_of_last_line(path) if from_end else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that have not been read; 0 while the file cannot be seen."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        return size - self._offset if size >= self._offset else size

    def read(self) -> Iterator[bytes]:
        """Lines in the order of the file; none while it cannot be read. A file that became shorter is read again."""
        rest = b""
        with suppress(OSError), codec.open_file(self.path, follows_link=False) as stream:
            if stream.seek(0, os.SEEK_END) < self._offset:
                self._offset, self._is_skipping = 0, False
            stream.seek(self._offset)
            while content := stream.read(_CHUNK_BYTES):
                *lines, rest = (rest + content).split(b"\n")
                if lines and self._is_skipping:
                    self._offset, self._is_skipping = self._offset + len(lines.pop(0)) + 1, False
                self._offset += sum(map(len, lines)) + len(lines)
                if len(rest) > _MAX_LINE_BYTES:
                    self._offset, rest, self._is_skipping = self._offset + len(rest), b"", True
                yield from lines


class _Glance(msgspec.Struct, gc=False):
    """The fields of a line of metrics.jsonl that decide if it is retained."""

    step: int
    attempt: int = 1
    loss: float | None = None
    eval_loss: float | None = None
    step_s: float | None = None
    checkpoint_s: float | None = None
    memory_peak_bytes: int | None = None
    skipped: bool | None = None
    incidents: tuple[str, ...] = ()


class _Row(_Glance, gc=False):
    """Further figures that views calculate with; a line with text in place of one of them is damaged."""

    lr: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    host_rss_bytes: int | None = None
    memory_device_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_allocated_bytes: int | None = None
    gpu_utilization: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: int | None = None
    gpu_throttle: str | None = None


_MOST_BITS = 63  # of a figure; no sum of larger ones is exact, and some cannot even become a float
_ROW, _ANY = msgspec.json.Decoder(_Row), msgspec.json.Decoder()


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The figures of a step; None if the line is damaged."""
    try:
        _ROW.decode(line)
        row: dict[str, Any] = _ANY.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_damaged = any(isinstance(value, int) and value.bit_length() > _MOST_BITS for value in row.values())
    return None if is_damaged else row


class ThinnedLines(NamedTuple):
    """Lines of metrics.jsonl, and what all of them add up to."""

    lines: list[bytes]
    num_steps: int
    training_s: float


def thinned_lines(lines: Iterator[bytes], *, num_bytes: int) -> ThinnedLines:
    """All lines of a short file, of one of `num_bytes` at most about `MAX_METRICS_LINES`; damaged ones are left out.

    Of each stretch it keeps the lowest and the highest loss, so that no spike is lost; of the whole file scores, saves,
    skipped steps, incidents, new peaks of memory, the first steps of an attempt and the last hundred lines.
    """
    first = list(islice(lines, 100))
    stretch = num_bytes * len(first) // (sum(map(len, first)) or 1) * 2 // MAX_METRICS_LINES
    decode = msgspec.json.Decoder(_Glance).decode
    retained: dict[int, bytes] = {}
    last: deque[tuple[int, bytes]] = deque(maxlen=100)
    low = high = (math.nan, 0, b"")
    number, training_s, peak_bytes, num_early, attempt = 0, 0.0, 0, 0, 0
    for line in chain(first, lines):
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        number += 1
        training_s += row.step_s or 0.0
        if row.attempt != attempt:
            attempt, num_early = row.attempt, 0
        num_early += 1
        is_peak = row.memory_peak_bytes is not None and row.memory_peak_bytes > peak_bytes
        if is_peak:
            peak_bytes = row.memory_peak_bytes or 0
        is_news = row.skipped or row.incidents or row.eval_loss is not None
        is_named = is_peak or is_news or (row.checkpoint_s or 0.0) >= LEAST_SAVE_S
        if stretch <= 2 or num_early <= 2 or (is_named and len(retained) < 2 * MAX_METRICS_LINES):
            retained[number] = line
        last.append((number, line))
        loss = math.inf if row.loss is None else row.loss
        low = low if low[0] <= loss else (loss, number, line)
        high = high if high[0] >= loss else (loss, number, line)
        if stretch > 2 and number % stretch == 0:
            retained[low[1]], retained[high[1]] = low[2], high[2]
            low = high = (math.nan, 0, b"")
    retained.update(last)
    return ThinnedLines([retained[place] for place in sorted(retained)], number, training_s)


def _end_of_last_line(path: Path) -> int:
    try:
        with codec.open_file(path, follows_link=False) as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - _MIN_TAIL_BYTES)
            stream.seek(begin)
            return begin + stream.read().rfind(b"\n") + 1
    except OSError:
        return 0


def _point(run_dir: Path, submission: Submission | None) -> int | None:
    """Without a readable number, which version 0.7 did not write, it is that in the name of the folder."""
    if submission is not None and not isinstance(submission.point, msgspec.UnsetType):
        return submission.point
    match = re.fullmatch(_POINT, run_dir.name)
    return None if match is None else int(match[1])


def _read(path: Path, kind: type[V]) -> V | None:
    try:
        return codec.read(path, kind)
    except InputError:
        return None


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
