"""Which runs a word of the command line means: a run directory, a sweep's directory, or a job of Slurm.

A job is looked for in the runs below the working directory's `runs/`, then in Slurm, which knows the script that was
submitted; the script's folder is the run's, or the sweep's.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from launch.rundir.files import RunFiles, is_run_dir, read_run
from slurm.jobs import JOB_ID, QueuedJob, has_slurm, read_job
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.messages.submission import SCRIPT_NAME

RUNS = Path("runs")
_POINT = re.compile(r"point-(\d+)")


class Found(NamedTuple):
    """Runs that a word means, in the order of their points, and the job where one was named."""

    runs: tuple[RunFiles, ...]
    is_sweep: bool = False


def runs_below(folder: Path) -> list[Path]:
    """Run directories in a folder, those of sweeps in place of the sweep; in no order."""
    entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return [run for entry in entries for run in (points_of(entry) or ([entry] if is_run_dir(entry) else []))]


def points_of(folder: Path) -> list[Path]:
    """The runs of a sweep, by number."""
    points = [path for path in folder.glob("point-*") if _POINT.fullmatch(path.name) and is_run_dir(path)]
    return sorted(points, key=lambda path: int(path.name.removeprefix("point-")))


def find_runs(word: str, environment: Mapping[str, str] = os.environ) -> Found:
    """The runs that `word` means; InputError where it means none."""
    path = Path(word)
    if path.is_dir():
        points = points_of(path)
        if not points and not is_run_dir(path):
            raise InputError(f"{word}: is not a run directory: it has no plan.json and no submission.json")
        return Found(tuple(map(read_run, points or [path])), bool(points))
    if not JOB_ID.fullmatch(word):
        raise InputError(f"{word}: is neither a run directory nor the id of a job, such as 123 or 123_4")
    return _of_job(word, environment)


def one_run(found: Found, word: str) -> RunFiles:
    """The only run that was found; InputError names the points of a sweep."""
    if len(found.runs) == 1:
        return found.runs[0]
    raise InputError(f"{word}: is a sweep of {len(found.runs)} points; name one: {found.runs[0].run_dir}")


def belongs_to(job: QueuedJob, files: RunFiles) -> bool:
    """Whether a job of the queue is one of this run's: named in its files, or submitted with its script."""
    if job.job_id in files.job_ids:
        return True
    point = _POINT.fullmatch(files.run_dir.name)
    script = str(files.run_dir.absolute() / SCRIPT_NAME) if files.submission is None else files.submission.script
    if job.script != script and not job.script.startswith(f"{script} "):
        return False
    return point is None or job.job_id.partition("_")[2] == point[1]


def run_dirs_of(jobs: Iterable[QueuedJob]) -> list[Path]:
    """Directories of runs whose scripts these jobs are; jobs of other programs are passed over."""
    found = []
    for job in jobs:
        folder = _folder_of(job.script)
        if folder is not None:
            task = job.job_id.partition("_")[2]
            found.append(folder / f"point-{task}" if task else folder)
    return [path for path in dict.fromkeys(found) if is_run_dir(path)]


def _of_job(job_id: str, environment: Mapping[str, str]) -> Found:
    array, _, task = job_id.partition("_")
    here = [read_run(path) for path in runs_below(RUNS)]
    named = [files for files in here if job_id in files.job_ids]
    points = [files for files in here if any(each.startswith(f"{array}_") for each in files.job_ids)]
    if named or (points and not task):
        return Found(tuple(named or sorted(points, key=_number)), not named)
    if not has_slurm(environment):
        raise InputError(f"job {job_id} is of no run in {RUNS.absolute()}, and there is no Slurm here to ask; name RUN")
    try:
        job = read_job(job_id, environment)
    except EnvironmentFaultError as error:
        raise EnvironmentFaultError(f"job {job_id} is of no run in {RUNS.absolute()}, and {error}") from None
    folder = None if job is None or job.script is None else _folder_of(job.script)
    if folder is None:
        known = "Slurm does not know it (any more)" if job is None else "its script is not one of shardwise submit"
        raise InputError(f"job {job_id}: is of no run in {RUNS.absolute()}, and {known}; name its run directory")
    return find_runs(str(folder / f"point-{task}" if task else folder), environment)


def _folder_of(script: str) -> Path | None:
    head, found, _ = script.partition(f"/{SCRIPT_NAME}")
    return Path(head) if found and Path(head).is_dir() else None


def _number(files: RunFiles) -> int:
    match = _POINT.fullmatch(files.run_dir.name)
    return int(match[1]) if match is not None else 0
