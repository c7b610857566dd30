"""The cancel flag of a run: the file `cancelled` in its directory.

A stop with a checkpoint usually means "continue later": a scheduler queues the job again, or the next job of a chain
starts. The flag prevents both: the supervisor ends the run as after Ctrl-C, and a job that was cancelled with it ends
at once when it starts. The flag lists these jobs. Any other start of the run, by a person, removes the flag.
"""

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from trainer.spec.codec import write_bytes
from trainer.spec.errors import EnvironmentFaultError

MARK = "cancelled"


def is_cancelled(run_dir: Path) -> bool:
    """Whether a person has cancelled this run."""
    return (run_dir / MARK).is_file()


def read_mark(run_dir: Path) -> str | None:
    """When and by whom the run was cancelled, in words; None where it was not."""
    try:
        return (run_dir / MARK).read_text(errors="replace").partition("\n")[0] or "cancelled"
    except OSError:
        return None


def mark_cancelled(run_dir: Path, *, now: datetime, job_ids: Sequence[str] = ()) -> None:
    """Leaves the mark for these jobs of Slurm; EnvironmentFaultError where it cannot be written."""
    lines = [f"cancelled {now:%Y-%m-%dT%H:%M:%SZ} by {_who()}", " ".join(["jobs", *job_ids])]
    try:
        write_bytes(run_dir / MARK, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def must_end_at_start(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether what starts here is a job that was cancelled; anything else that starts takes the mark away."""
    try:
        words = (run_dir / MARK).read_text(errors="replace").split()
    except OSError:
        return False
    if "jobs" in words and own_job(environment) in words[words.index("jobs") + 1 :]:
        return True
    clear_mark(run_dir)
    return False


def clear_mark(run_dir: Path) -> None:
    """Takes the mark away where there is one."""
    (run_dir / MARK).unlink(missing_ok=True)


def own_job(environment: Mapping[str, str]) -> str | None:
    """The id of the job this program runs in, of an array ID_INDEX; None outside of one."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
