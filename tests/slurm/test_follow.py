"""Runs on a real Slurm are followed from the queue to their end, and cancelled runs stay cancelled."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_factory import write_submission
from slurm_cluster import SlurmCluster
from slurm_jobs import batch_job, read_starts, write_run
from stand_in_run import program

from shardwise.launch.commands.follow import run_cancel, run_status
from shardwise.launch.options import CancelOptions, StatusOptions
from shardwise.launch.terminal import Console
from shardwise.slurm.jobs import cancel_waiting, read_queue
from shardwise.slurm.submit import submit_script
from shardwise.trainer.spec.messages.submission import CHAIN_FILE, SCRIPT_NAME


class Runs:
    """Runs that are submitted to the cluster, and the commands that follow them."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        self.environment = slurm.environment

    def submit(self, run_dir: Path, *words: str, chain: int = 1, **changes: Any) -> list[str]:
        """The ids of the jobs of a run, or of a sweep's array, whose files are those of `submit`."""
        job = batch_job(run_dir, **changes)
        script = write_run(job, program=program())
        ids = [self.slurm.submit(*words, script)]
        while len(ids) < chain:
            ids.append(submit_script(script, job, None, after=ids[-1], environment=self.environment))
        if chain > 1:
            (run_dir / CHAIN_FILE).write_text("".join(f"{each}\n" for each in ids))
        write_submission(run_dir, *ids)
        for number in range(1, (job.num_points or 0) + 1):
            write_submission(
                run_dir / f"point-{number}", *(f"{each}_{number}" for each in ids), script=str(run_dir / SCRIPT_NAME)
            )
        return ids

    def status(self, run: Path | str | None = None) -> Any:
        return json.loads(self._printed(run_status, StatusOptions(None if run is None else str(run), as_json=True)))

    def text(self, run: Path | str) -> str:
        return self._printed(run_status, StatusOptions(str(run)))

    def cancel(self, run: Path | str, *, now: bool = False) -> str:
        return self._printed(run_cancel, CancelOptions(str(run), now))

    def _printed(self, command: Callable[..., object], options: StatusOptions | CancelOptions) -> str:
        out = io.StringIO()
        command(options, Console(out), environment=self.environment)
        return out.getvalue()

    def wait_for_steps(self, run_dir: Path, attempt: int = 1) -> None:
        def has_come() -> bool:
            metrics = run_dir / "metrics.jsonl"
            return metrics.is_file() and f'"attempt": {attempt},' in metrics.read_text()

        self.slurm.wait_until(has_come, f"steps of attempt {attempt} in {run_dir}")


@pytest.fixture
def runs(slurm: SlurmCluster, tmp_path: Path, monkeypatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    return Runs(slurm)


def test_a_run_is_followed_from_the_queue_to_its_end(runs: Runs, slurm: SlurmCluster, tmp_path: Path):
    run_dir = tmp_path / "runs" / "a run|b"
    (job,) = runs.submit(run_dir, "--hold", "--time=30")
    waiting = runs.status(run_dir)
    assert (waiting["state"], waiting["jobs"][0]["reason"], waiting["step"]) == ("waiting", "JobHeldUser", None)
    assert f"job {job}: PENDING (JobHeldUser): held: scontrol release JOBID releases it" in runs.text(run_dir)

    slurm.run("scontrol", "release", job)
    runs.wait_for_steps(run_dir)
    running = runs.status(job)
    assert Path(running["run_dir"]).absolute() == run_dir
    assert (running["state"], running["jobs"][0]["nodes"], running["num_steps"]) == ("running", "n1", 100)
    assert 0 < running["jobs"][0]["seconds_left"] <= 1800 and running["silent_s"] >= 0
    assert running["last_line"] == "attempt 1 runs" and Path(running["logs"][0]).name == f"slurm-{job}.out"

    (run_dir / "finish").touch()
    slurm.wait_for(job, "COMPLETED")
    finished = runs.status(run_dir)
    assert (finished["state"], finished["jobs"], finished["ended_job"]["state"]) == ("finished", [], "COMPLETED")
    assert f"job {job} ended at" in runs.text(run_dir)


def test_all_own_runs_are_those_here_and_those_in_the_queue(runs: Runs, slurm: SlurmCluster, tmp_path: Path):
    runs.submit(tmp_path / "runs" / "here", "--hold")
    runs.submit(tmp_path / "elsewhere" / "there", "--hold")
    slurm.submit("--hold", "--output=/dev/null", "--wrap=true")  # somebody's own program
    listed = {Path(each["run_dir"]).name: each["state"] for each in runs.status()}
    assert listed == {"here": "waiting", "there": "waiting"}


def test_a_cancelled_chain_saves_once_and_ends(runs: Runs, slurm: SlurmCluster, tmp_path: Path):
    run_dir = tmp_path / "run"
    first, second = runs.submit(run_dir, chain=2)
    runs.wait_for_steps(run_dir)
    said = runs.cancel(run_dir)
    assert f"removed from the queue: {second}" in said
    assert f"requested to save a checkpoint and end: job {first}" in said
    ended = slurm.wait_for(first, "FAILED")
    assert (ended.exit_code, ended.restarts) == ("130:0", 0)
    assert slurm.job(second).state == "CANCELLED" and len(read_starts(run_dir)) == 1
    status = runs.status(run_dir)
    assert status["state"] == "stopped" and status["cancelled"].startswith("cancelled 20")
    assert "nothing to cancel: stopped by request" in runs.cancel(run_dir)


def test_a_run_that_waits_to_go_on_is_cancelled_too_and_a_person_may_go_on(runs: Runs, slurm: SlurmCluster, tmp_path):
    run_dir = tmp_path / "run"
    (job,) = runs.submit(run_dir)
    runs.wait_for_steps(run_dir)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(job, "PENDING", restarts=1)
    assert runs.status(run_dir)["words"] == f"job {job} waits to continue"
    runs.cancel(job)
    slurm.wait_for(job, "CANCELLED")
    again = slurm.submit(run_dir / SCRIPT_NAME)
    runs.wait_for_steps(run_dir, attempt=2)
    assert runs.status(run_dir)["jobs"][0]["job_id"] == again
    runs.cancel(run_dir, now=True)
    slurm.wait_for(again, "CANCELLED")


def test_a_job_that_was_cancelled_ends_where_it_starts_all_the_same(runs: Runs, slurm: SlurmCluster, tmp_path: Path):
    """As where Slurm did not answer when it was to be taken out of the queue."""
    run_dir = tmp_path / "run"
    (job,) = runs.submit(run_dir, "--hold")
    runs.environment = {**slurm.environment, "PATH": "/nonexistent"}
    with pytest.raises(Exception, match="its jobs stay"):
        runs.cancel(run_dir)
    slurm.run("scontrol", "release", job)
    assert slurm.wait_for(job, "FAILED").exit_code == "130:0"
    assert "this run was cancelled" in (run_dir / f"slurm-{job}.out").read_text()


def test_one_point_of_a_sweep_is_cancelled_without_the_others(runs: Runs, slurm: SlurmCluster, tmp_path: Path):
    sweep = tmp_path / "sweep"
    (array,) = runs.submit(sweep, num_points=2)
    for point in (1, 2):
        runs.wait_for_steps(sweep / f"point-{point}")
    runs.cancel(f"{array}_2")
    slurm.wait_for(f"{array}_2", "FAILED")
    assert [each["state"] for each in runs.status(array)] == ["running", "stopped"]
    runs.cancel(sweep)
    slurm.wait_for(f"{array}_1", "FAILED")
    assert [each["state"] for each in runs.status(sweep)] == ["stopped", "stopped"]


def test_variables_of_the_user_do_not_change_the_queue_from_which_no_job_that_started_is_taken(slurm: SlurmCluster):
    started = slurm.submit("--output=/dev/null", "--wrap=sleep 60")
    job = slurm.submit("--hold", "--output=/dev/null", "--wrap=true")
    own = {"SQUEUE_STATES": "RUNNING", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative"}
    (seen,) = (each for each in read_queue(environment={**slurm.environment, **own}) if each.job_id == job)
    assert seen.reason == "JobHeldUser" and (seen.submitted or "").startswith("20")
    slurm.wait_for(started, "RUNNING")
    cancel_waiting([started], slurm.environment)
    assert slurm.job(started).state == "RUNNING"
