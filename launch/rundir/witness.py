"""Asks whoever can tell whether runs are alive: Slurm's queue, and the processes of this machine."""

import os
from collections.abc import Mapping

from launch.rundir.files import RunFiles
from launch.rundir.find import belongs_to
from launch.rundir.holder import holder_here, last_holder
from launch.rundir.state import Witness
from slurm.follow import has_slurm, read_job, read_queue
from slurm.text.jobs import EndedJob, QueuedJob
from trainer.spec.errors import EnvironmentFaultError


class Queue:
    """The queue as it was at the first question: one question to Slurm for each owner of runs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._jobs: dict[int, tuple[QueuedJob, ...] | None] = {}
        self.problem: str | None = None if has_slurm(environment) else "there is no Slurm here"

    def jobs_of(self, user: int) -> tuple[QueuedJob, ...] | None:
        """A user's jobs that wait or run; None where Slurm does not answer, with `problem` saying why."""
        if user not in self._jobs:
            self._jobs[user] = self._ask(user)
        return self._jobs[user]

    def jobs_of_run(self, files: RunFiles) -> tuple[QueuedJob, ...] | None:
        """Those of one run, the one that runs first."""
        jobs = self.jobs_of(files.run_dir.stat().st_uid)
        if jobs is None:
            return None
        mine = [job for job in jobs if belongs_to(job, files)]
        return tuple(sorted(mine, key=lambda job: not job.is_running))

    def _ask(self, user: int) -> tuple[QueuedJob, ...] | None:
        if self.problem is not None:
            return None
        try:
            return read_queue(user=user, environment=self._environment)
        except EnvironmentFaultError as error:
            self.problem = str(error).splitlines()[0]
            return None


def witness_of(
    files: RunFiles, queue: Queue, *, asks_ended: bool = True, environment: Mapping[str, str] = os.environ
) -> Witness:
    """Who knows whether the run is alive; with `asks_ended` also how its last job ended, a question more to Slurm."""
    may_be_queued = files.submission is not None or bool(files.starts)
    jobs = queue.jobs_of_run(files) if may_be_queued else None
    return Witness(
        jobs=jobs,
        problem=queue.problem if may_be_queued else None,
        ended=_ended(files, environment) if jobs == () and asks_ended else None,
        holder=holder_here(files.run_dir),
        last_holder=last_holder(files.run_dir),
    )


def _ended(files: RunFiles, environment: Mapping[str, str]) -> EndedJob | None:
    newest = files.starts[-1].job_id if files.starts else files.job_ids[-1] if files.job_ids else None
    if newest is None:
        return None
    try:
        return read_job(newest, environment)
    except EnvironmentFaultError:
        return None
