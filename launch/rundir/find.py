"""The runs that an argument of the command line names: a run directory, a sweep's directory, or a job of Slurm.

A job is searched in the runs below the working directory's `runs/`, then in Slurm, which knows the script that was
submitted; the script's folder is that of the run, or of the sweep.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.rundir.files import RunFiles, is_run_dir, point_of, read_run
from shardwise.slurm.jobs import JOB_ID, QueuedJob, has_slurm, read_job
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.submission import FILE_NAME, SCRIPT_NAME

RUNS = Path("runs")


class Found(NamedTuple):
    """The runs that an argument names, in the order of their points."""

    runs: tuple[RunFiles, ...]
    is_sweep: bool = False


def runs_below(folder: Path) -> list[Path]:
    """Run directories in a folder, the points of sweeps in place of the sweep; in no order."""
    entries = [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    return [run for entry in entries for run in (points_of(entry) or ([entry] if is_run_dir(entry) else []))]


def points_of(folder: Path) -> list[Path]:
    """The runs of a sweep, by number."""
    points = {path.parent: point_of(path.parent) for path in folder.glob(f"*/{FILE_NAME}")}
    return sorted((path for path, number in points.items() if number is not None), key=lambda path: points[path] or 0)


def find_runs(name: str, environment: Mapping[str, str] = os.environ) -> Found:
    """The runs that `name` names; InputError if there are none."""
    path = Path(name)
    if path.is_dir():
        points = points_of(path)
        if not points and not is_run_dir(path):
            raise InputError(f"{name}: is not a run directory: it has no plan.json and no submission.json")
        return Found(tuple(map(read_run, points or [path])), bool(points))
    if not JOB_ID.fullmatch(name):
        raise InputError(f"{name}: is neither a run directory nor the id of a job, such as 123 or 123_4")
    return _of_job(name, environment)


def one_run(found: Found, name: str) -> RunFiles:
    """The only run that was found; InputError for a sweep."""
    if len(found.runs) == 1:
        return found.runs[0]
    raise InputError(f"{name}: is a sweep of {len(found.runs)} points; name one: {found.runs[0].run_dir}")


def belongs_to(job: QueuedJob, files: RunFiles) -> bool:
    """True if a job of the queue is one of this run's: named in its files, or submitted with its script."""
    if job.job_id in files.job_ids:
        return True
    script = str(files.run_dir.absolute() / SCRIPT_NAME) if files.submission is None else files.submission.script
    if job.script != script and not job.script.startswith(f"{script} "):
        return False
    return files.point is None or job.job_id.partition("_")[2] == str(files.point)


def run_dirs_of(jobs: Iterable[QueuedJob]) -> list[Path]:
    """Directories of the runs whose scripts these jobs run; jobs of other programs are skipped."""
    found = [_run_dir(job.script, job.job_id.partition("_")[2]) for job in jobs]
    return [path for path in dict.fromkeys(found) if path is not None and is_run_dir(path)]


def _of_job(job_id: str, environment: Mapping[str, str]) -> Found:
    array, _, task = job_id.partition("_")
    here = [read_run(path) for path in runs_below(RUNS)]
    named = [files for files in here if job_id in files.job_ids]
    points = [files for files in here if any(each.startswith(f"{array}_") for each in files.job_ids)]
    if named or (points and not task):
        return Found(tuple(named or sorted(points, key=lambda files: files.point or 0)), not named)
    elsewhere = f"job {job_id}: is of no run in {RUNS.absolute()}"
    if not has_slurm(environment):
        raise InputError(f"{elsewhere}, and there is no Slurm here; name its run directory")
    try:
        job = read_job(job_id, environment)
    except EnvironmentFaultError as error:
        raise EnvironmentFaultError(f"{elsewhere}, and {error}") from None
    run_dir = None if job is None or job.script is None else _run_dir(job.script, task)
    if run_dir is None:
        known = "Slurm does not know it (any more)" if job is None else "its script is not one of shardwise submit"
        raise InputError(f"{elsewhere}, and {known}; name its run directory")
    return find_runs(str(run_dir), environment)


def _run_dir(script: str, task: str) -> Path | None:
    """The run directory of a script, of an array's task that of its point; None for other scripts."""
    head, is_found, _ = script.partition(f"/{SCRIPT_NAME}")
    folder = Path(head)
    if not is_found or not folder.is_dir():
        return None
    return next((path for path in points_of(folder) if str(point_of(path)) == task), None) if task else folder
