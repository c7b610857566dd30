"""Asks Slurm after jobs, and tells them to stop. Each call is one command with a limit (`queries.ask_slurm`).

Variables that change what these commands show (SQUEUE_STATES, SLURM_TIME_FORMAT, SCANCEL_NAME, ...) are not passed on.
"""

import os
import shutil
from collections.abc import Mapping, Sequence

from slurm.queries import ask_slurm
from slurm.text.jobs import (
    ENDED_FORMAT,
    QUEUE_FORMAT,
    EndedJob,
    QueuedJob,
    parse_accounting,
    parse_jobs,
    parse_queue,
)
from trainer.spec.errors import EnvironmentFaultError

_OWN_SETTINGS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT")
_UNKNOWN_JOB = "Invalid job id"


def has_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm can be asked here."""
    return shutil.which("squeue", path=environment.get("PATH")) is not None


def read_queue(*, user: int | None = None, environment: Mapping[str, str] = os.environ) -> tuple[QueuedJob, ...]:
    """A user's jobs that wait or run, one a task of an array; EnvironmentFaultError where Slurm does not answer."""
    whose = os.getuid() if user is None else user
    argv = ("squeue", "--noheader", "--array", f"--user={whose}", f"--format={QUEUE_FORMAT}")
    return parse_queue(ask_slurm(argv, environment=_neutral(environment)))


def read_job(job_id: str, environment: Mapping[str, str] = os.environ) -> EndedJob | None:
    """How a job ended or stands: as the controller says, else the accounting; None where neither knows it any more.

    EnvironmentFaultError where Slurm does not answer.
    """
    settings = _neutral(environment)
    try:
        found = parse_jobs(ask_slurm(("scontrol", "-o", "show", "job", job_id), environment=settings))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        found = ()
    if not found:
        found = _read_accounting(job_id, settings)
    return next((job for job in reversed(found) if job.job_id == job_id), found[-1] if found else None)


def cancel_waiting(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Cancels those of the jobs that have not started; one that did meanwhile is left alone."""
    _scancel(["--state=PENDING", *job_ids], environment)


def signal_batch_script(job_id: str, environment: Mapping[str, str] = os.environ) -> None:
    """USR1 to the batch script of a job that runs, which passes it on."""
    _scancel(["--batch", "--signal=USR1", job_id], environment)


def cancel(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Ends jobs now, as a person's scancel does."""
    _scancel(list(job_ids), environment)


def _scancel(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """EnvironmentFaultError says what Slurm says; that a job is gone already is no error."""
    try:
        ask_slurm(("scancel", *words), environment=_neutral(environment))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error) and "already completing or completed" not in str(error):
            raise


def _read_accounting(job_id: str, settings: Mapping[str, str]) -> tuple[EndedJob, ...]:
    """Nothing where the cluster keeps no accounts."""
    words = ("--allocations", "--noheader", "--parsable2", f"--format={ENDED_FORMAT}")
    try:
        return parse_accounting(ask_slurm(("sacct", "-j", job_id, *words), environment=settings))
    except EnvironmentFaultError:
        return ()


def _neutral(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OWN_SETTINGS)}
