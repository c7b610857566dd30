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

from shardwise.trainer.spec.codec import write_bytes
from shardwise.trainer.spec.errors import EnvironmentFaultError

CANCEL_FLAG = "cancelled"


def is_cancelled(run_dir: Path) -> bool:
    """True if a person has cancelled this run."""
    return (run_dir / CANCEL_FLAG).is_file()


def read_cancel_flag(run_dir: Path) -> str | None:
    """`cancelled 2030-01-02T12:00:00Z by user@host`; None if the run was not cancelled."""
    try:
        return (run_dir / CANCEL_FLAG).read_text(errors="replace").partition("\n")[0] or "cancelled"
    except OSError:
        return None


def write_cancel_flag(run_dir: Path, *, now: datetime, job_ids: Sequence[str] = ()) -> None:
    """Cancels a run and these jobs of Slurm; EnvironmentFaultError if the flag cannot be written."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        name = str(os.getuid())
    lines = [f"cancelled {now:%Y-%m-%dT%H:%M:%SZ} by {name}@{socket.gethostname()}", " ".join(["jobs", *job_ids])]
    try:
        write_bytes(run_dir / CANCEL_FLAG, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def must_end_at_start(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process runs in a job that was cancelled; any other start removes the flag."""
    try:
        _, _, jobs = (run_dir / CANCEL_FLAG).read_text(errors="replace").partition("\njobs")
    except OSError:
        return False
    if own_job(environment) in jobs.split():
        return True
    (run_dir / CANCEL_FLAG).unlink(missing_ok=True)
    return False


def own_job(environment: Mapping[str, str]) -> str | None:
    """The id of the job that this program runs in, of an array ID_INDEX; None outside a job."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None
