"""What Slurm says of a job that runs."""

import os
from collections.abc import Mapping

from slurm.queries import ask_slurm
from slurm.text.quantities import parse_duration
from trainer.spec.errors import EnvironmentFaultError


def read_seconds_left(job_id: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Seconds until the job's time limit; None without one, and where the controller does not answer."""
    argv = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%L")
    try:
        answer = ask_slurm(argv, environment=environment)
    except EnvironmentFaultError:
        return None  # the batch script still hears of the limit by a signal
    return parse_duration(answer.strip())
