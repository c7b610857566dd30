"""Which files hold what a run said, and reading them as they grow.

    slurm-JOB.out                    what the batch script and the supervisor said, of each job
    attempts/N/logs/rank-R.log       what a rank said
    attempts/N/logs/launcher*.log    what the launcher of a machine said, agents.log what srun and the agents said

A file is read by lines: the beginning of a line that is being written is left for the next look. What replaces it (a
new attempt, the job that goes on) is read from its beginning.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from launch.rundir.files import RunFiles, outputs_of, tail_lines
from trainer.spec.errors import InputError

BYTES_A_LINE = 400  # of logs, generously: what is read for the last lines
NUM_LAST_WORDS = 5
_LEAST_TAIL = 16 * 1024
_CHUNK_BYTES = 1 << 20


def main_log(files: RunFiles, *, rank: int | None = None, attempt: int | None = None) -> Path | None:
    """The file that tells most: Slurm's output, else rank 0's log, or what is asked for; None while there is none.

    InputError where an attempt or a rank is asked for that there is not.
    """
    number = files.attempt if attempt is None else attempt
    if attempt is not None and not (files.run_dir / "attempts" / str(attempt)).is_dir():
        has = f"it has {files.attempt}" if files.attempt else "it has none yet"
        raise InputError(f"--attempt {attempt}: {files.run_dir} has no such attempt; {has}")
    if rank is None and attempt is None and (outputs := outputs_of(files)):
        return outputs[-1]
    logs = files.run_dir / "attempts" / str(number) / "logs"
    path = logs / f"rank-{rank or 0}.log"
    if path.is_file():
        return path
    if rank is not None and logs.is_dir() and any(logs.glob("rank-*.log")):
        last = max(int(each.stem.removeprefix("rank-")) for each in logs.glob("rank-*.log"))
        raise InputError(f"--rank {rank}: attempt {number} has ranks 0 to {last}")
    return None


def side_logs(files: RunFiles, *, attempt: int | None = None) -> list[Path]:
    """Logs of the launchers and the agents of an attempt that say something."""
    logs = files.run_dir / "attempts" / str(files.attempt if attempt is None else attempt) / "logs"
    found = [*sorted(logs.glob("launcher*.log")), *sorted(logs.glob("agents.log"))]
    return [path for path in found if any(map(str.strip, tail_lines(path, _LEAST_TAIL)))]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file."""
    size = path.stat().st_size if path.is_file() else 0
    limit = max(_LEAST_TAIL, count * BYTES_A_LINE)
    lines = tail_lines(path, limit)
    while len(lines) < count and limit < size:
        limit *= 4
        lines = tail_lines(path, limit)
    return lines[-count:] if count else []


class Growing:
    """New whole lines of one file since the last look."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.path = path
        self._offset = _end_of_last_line(path) if from_end else 0

    def read_new(self) -> Sequence[str]:
        """What has come; a file that became shorter is read from its beginning."""
        try:
            with self.path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:
                    self._offset = 0
                stream.seek(self._offset)
                content = stream.read(_CHUNK_BYTES)
        except OSError:
            return ()
        whole = content[: content.rfind(b"\n") + 1] if len(content) < _CHUNK_BYTES or b"\n" in content else content
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def _end_of_last_line(path: Path) -> int:
    """Where the last whole line ends."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - _LEAST_TAIL)
            stream.seek(begin)
            return begin + stream.read().rfind(b"\n") + 1
    except OSError:
        return 0
