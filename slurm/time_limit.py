"""How many jobs a run takes at a partition's time limit. Pure."""

import math

from slurm.text.quantities import format_duration
from trainer.spec.units import format_seconds


def num_jobs(hours: float, limit_s: int | None) -> int:
    """Jobs that follow each other until a run of so many hours is done."""
    return 1 if limit_s is None else max(1, math.ceil(hours * 3600 / limit_s))


def limit_words(hours: float, limit_s: int | None, *, place: str) -> str:
    """`38 h 10 min at a limit of 1-00:00:00: 2 jobs, which continue each other`."""
    duration = format_seconds(hours * 3600)
    if limit_s is None:
        return f"{duration}; {place} sets no time limit: one job"
    jobs = num_jobs(hours, limit_s)
    told = "one job" if jobs == 1 else f"{jobs} jobs, which continue each other"
    return f"{duration} at a limit of {format_duration(limit_s)}: {told}"
