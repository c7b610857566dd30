"""Submission to a cluster: `submission.json` in a run directory, next to `train.sbatch`.

It is written before sbatch is called, since a job may start at once, and again with the id that sbatch printed. Jobs
that start later by themselves or by hand (requeued, followed up, `sbatch train.sbatch`) are not in it: the script adds
a line to `JOBS_FILE` each time it starts.
"""

import msgspec

from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.value import Value

SCRIPT_NAME = "train.sbatch"
FILE_NAME = "submission.json"
JOBS_FILE = "slurm-jobs.txt"  # of each start: UTC time, job id, how often that job was restarted, its nodes
CHAIN_FILE = "chain.txt"  # ids of the jobs of a chain, one a line, in the order in which they run


class Submission(Value, frozen=True, kw_only=True):
    """One run as it was submitted, or one point of a sweep."""

    hardware: Hardware  # that the plan assumed
    submitted: str  # UTC, as 2026-11-22T17:30:00Z
    script: str  # absolute path; of a sweep one script for all points
    partition: str | None = None  # None: the cluster's default
    time_limit_s: int | None = None  # of one job; None: the partition's default
    job_ids: tuple[str, ...] = ()  # in the order in which they run; of a point of an array ID_INDEX
    overrides: tuple[str, ...] = ()  # of a point: its key=value
    point: int | msgspec.UnsetType | None = msgspec.UNSET  # of a sweep, from 1; None: no point; unset: by version 0.7


class JobStart(msgspec.Struct, frozen=True):
    """One line of `JOBS_FILE`."""

    time: str
    job_id: str
    num_restarts: int
    nodes: str


def parse_job_starts(text: str) -> tuple[JobStart, ...]:
    """Every start in the order of the file; a line that was cut off is left out."""
    rows = (line.split() for line in text.splitlines())
    return tuple(JobStart(row[0], row[1], int(row[2]), row[3]) for row in rows if len(row) == 4 and row[2].isdigit())
