"""What Slurm says of a job that runs, and what it is told: short questions to the controller, each with a limit."""

import os
import subprocess
from collections.abc import Sequence

from slurm.allocation import seconds_of_time

_LIMIT_S = 20.0


def read_seconds_left(job_id: str) -> int | None:
    """Seconds until the job's time limit; None without one, and where the controller does not answer."""
    answer = _ask(["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"])
    return None if answer is None else seconds_of_time(answer.splitlines()[0] if answer.strip() else "")


def _ask(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
