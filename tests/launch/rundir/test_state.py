"""An argument names a run, the points of a sweep, or a job; the state follows from Slurm, the lock and the files.

The files are read while they are written: incomplete lines, missing files and other versions do no harm.
"""

import json
import os
import time
from pathlib import Path

import pytest
from run_factory import (
    age,
    metrics_row,
    write_attempt,
    write_checkpoint,
    write_report,
    write_start,
    write_submission,
)

from shardwise.launch.rundir import state as run_state
from shardwise.launch.rundir.files import outputs_of, read_run
from shardwise.launch.rundir.lock import CANCEL_FLAG, LockOwner
from shardwise.slurm.jobs import EndedJob, QueuedJob
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.messages.submission import JOBS_FILE
from shardwise.trainer.spec.report import Ending

RUNNING = QueuedJob(job_id="12", state="RUNNING", nodes="n1")
WAITING = QueuedJob(job_id="13", state="PENDING", reason="Priority")
NOBODY = run_state.Liveness(jobs=())
HERE = LockOwner(4711, os.uname().nodename)


def judged(run_dir: Path, liveness: run_state.Liveness) -> tuple[run_state.RunState, str]:
    return run_state.judge(read_run(run_dir), liveness, now_s=time.time())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Submitted, nothing more."""
    write_submission(tmp_path, "12")
    return tmp_path


def test_a_job_that_waits_starts_and_runs_is_a_run_that_does(run_dir):
    state, words = judged(run_dir, run_state.Liveness(jobs=(WAITING,)))
    assert state is run_state.RunState.WAITING and "job 13" in words
    assert judged(run_dir, run_state.Liveness(jobs=(WAITING, RUNNING)))[0] is run_state.RunState.STARTING
    write_attempt(run_dir, steps=[1])
    state, words = judged(run_dir, run_state.Liveness(jobs=(WAITING, RUNNING)))
    assert state is run_state.RunState.RUNNING and "job 12" in words
    write_report(run_dir, Ending.PREEMPTED, step=1)
    state, words = judged(run_dir, run_state.Liveness(jobs=(WAITING,)))
    assert state is run_state.RunState.WAITING and "job 13" in words and "continue" in words


def test_a_process_that_holds_the_directory_is_a_run_that_runs(tmp_path):
    write_attempt(tmp_path, steps=[1])
    state, words = judged(tmp_path, run_state.Liveness(jobs=None, owner=HERE))
    assert state is run_state.RunState.RUNNING and "process 4711" in words and "CONT" not in words
    assert "kill -CONT 4711" in judged(tmp_path, run_state.Liveness(jobs=None, owner=HERE, is_owner_stopped=True))[1]
    assert judged(tmp_path, run_state.Liveness(jobs=None, recorded_owner=HERE))[0] is run_state.RunState.LOST
    state, words = judged(tmp_path, run_state.Liveness(jobs=None, recorded_owner=LockOwner(5, "n3")))
    assert state is run_state.RunState.UNKNOWN and "process 5 on n3" in words, "it cannot be seen from here"
    write_report(tmp_path, Ending.FAILED)
    _, words = judged(tmp_path, run_state.Liveness(jobs=None, owner=HERE))
    assert "attempt 1" in words and "failed" in words


@pytest.mark.parametrize("ending", Ending)
def test_a_report_of_the_newest_attempt_is_the_end(run_dir, ending):
    write_attempt(run_dir, steps=[1])
    write_report(run_dir, ending, step=7)
    state, words = judged(run_dir, NOBODY)
    assert state == ending.value and "step 7" in words and not state.is_alive


def test_a_job_that_never_started_never_came_to_an_attempt_or_ended_in_a_later_one_than_the_report(run_dir):
    assert judged(run_dir, NOBODY)[0] is run_state.RunState.NOT_STARTED
    write_start(run_dir, "12")
    ended = EndedJob(job_id="12", state="FAILED", exit_code=3)
    state, words = judged(run_dir, run_state.Liveness(jobs=(), ended=ended))
    assert state is run_state.RunState.FAILED and "no strategy fits" in words
    write_attempt(run_dir, 1, steps=[1])
    write_report(run_dir, Ending.FAILED)
    write_attempt(run_dir, 2, steps=[2])
    state, words = judged(run_dir, run_state.Liveness(jobs=(), ended=EndedJob(job_id="12", state="TIMEOUT")))
    assert state is run_state.RunState.LOST and all(fact in words for fact in ("job 12", "time limit", "attempt 2"))


def test_without_an_answer_of_slurm_the_state_is_unknown_unless_the_run_is_over(run_dir):
    folder, silent = write_attempt(run_dir, steps=[1]), run_state.Liveness(jobs=None, problem="squeue: no answer")
    for path in (folder / "status.json", folder / "heartbeats" / "rank-0", run_dir / "metrics.jsonl"):
        age(path, 125)
    state, words = judged(run_dir, silent)
    assert state is run_state.RunState.UNKNOWN and not state.is_alive
    assert "squeue: no answer" in words and " 2 min 0" in words
    write_report(run_dir, Ending.PREEMPTED, step=1)
    assert judged(run_dir, silent)[0] is run_state.RunState.UNKNOWN, "a job may go on with it"
    write_report(run_dir, Ending.FINISHED)
    assert judged(run_dir, silent)[0] is run_state.RunState.FINISHED


def test_a_cancelled_run_was_stopped_and_waits_for_nothing(run_dir):
    write_attempt(run_dir, steps=[1])
    write_report(run_dir, Ending.PREEMPTED, step=1)
    assert "nothing waits" in judged(run_dir, NOBODY)[1]
    (run_dir / CANCEL_FLAG).write_text("cancelled\n")
    state, words = judged(run_dir, NOBODY)
    assert state is run_state.RunState.STOPPED and "step 1" in words
    write_attempt(run_dir, 2, steps=[2])
    assert judged(run_dir, NOBODY)[0] is run_state.RunState.STOPPED, "also if it was ended without a report"


def status(run_dir: Path, liveness: run_state.Liveness, **facts):
    return run_state.status_of(
        read_run(run_dir), liveness, now_s=time.time(), **{"last_line": None, "logs": (), **facts}
    )


def test_a_status_has_the_figures_of_the_last_step_and_the_error_of_the_newest_attempt(run_dir):
    write_attempt(run_dir, steps=[1, 2, 3])
    found = status(run_dir, run_state.Liveness(jobs=(RUNNING,)), last_line="step 3", logs=("log",))
    assert (found.step, found.num_steps, found.loss, found.tokens_per_s) == (3, 100, 4.97, 1234.0)
    assert (found.lr, found.memory_peak_bytes, found.seconds_left) == (3e-4, 7 * 2**20, 194.0)
    assert (found.num_attempts, found.num_ranks, found.phase) == (1, 1, "training")
    assert found.silent_s is not None and found.ended_job is None
    ended = EndedJob(job_id="12", state="COMPLETED")
    write_report(run_dir, Ending.FINISHED)
    found = status(run_dir, run_state.Liveness(jobs=(), ended=ended))
    assert found.ended_job == ended and found.seconds_left is None and found.phase is None
    assert (found.loss, found.eval_loss) == (4.97, 4.0), "the score is that of the report"
    (run_dir / "metrics.jsonl").write_text(json.dumps({**metrics_row(3), "eval_loss": 3.5}) + "\n")
    assert status(run_dir, NOBODY).eval_loss == 3.5
    write_report(run_dir, Ending.FAILED, error="the disk is full", final_loss=4.5)
    (run_dir / "metrics.jsonl").write_text("")
    assert status(run_dir, NOBODY).loss == 4.5
    assert status(run_dir, NOBODY).error == "the disk is full"
    write_attempt(run_dir, 2, steps=[2])
    assert status(run_dir, run_state.Liveness(jobs=(RUNNING,))).error is None, "that of the attempt before"


NO_SLURM = {"PATH": "/nonexistent"}


@pytest.fixture(params=["0.7", "now"])
def place(tmp_path: Path, monkeypatch, request) -> Path:
    """A working directory with a run and a sweep of eleven points, whose numbers version 0.7 did not write."""
    monkeypatch.chdir(tmp_path)
    write_submission(tmp_path / "runs" / "one", "12")
    write_submission(tmp_path / "runs" / "sweep", "20")
    script = str(tmp_path / "runs" / "sweep" / "train.sbatch")
    for number in range(1, 12):
        point = {} if request.param == "0.7" else {"point": number}
        write_submission(tmp_path / "runs" / "sweep" / f"point-{number}", f"20_{number}", script=script, **point)
    write_attempt(tmp_path / "runs" / "local", steps=[1])
    return tmp_path


def names(found) -> list[str]:
    return [files.run_dir.name for files in found.runs]


def test_an_argument_is_a_run_the_points_of_a_sweep_in_their_order_or_a_job_by_the_files_of_its_run(place: Path):
    assert names(run_state.find_runs("runs/one", NO_SLURM)) == ["one"]
    assert names(run_state.find_runs(str(place / "runs" / "local"), NO_SLURM)) == ["local"]
    sweep = run_state.find_runs("runs/sweep/", NO_SLURM)
    assert sweep.is_sweep and names(sweep) == [f"point-{number}" for number in range(1, 12)]
    with pytest.raises(InputError, match=r"11 points.* runs/sweep/point-1$"):
        run_state.one_run(sweep, "runs/sweep")
    write_start(place / "runs" / "one", "31")  # submitted again by hand
    assert names(run_state.find_runs("12", NO_SLURM)) == names(run_state.find_runs("31", NO_SLURM)) == ["one"]
    assert names(run_state.find_runs("20_3", NO_SLURM)) == ["point-3"]
    found = run_state.find_runs("20", NO_SLURM)
    assert found.is_sweep and names(found)[-1] == "point-11"
    unknown = {"runs/none": "id of a job", "runs": "run directory", "99": "no Slurm", "20_99": "no Slurm"}
    for word, fact in (unknown | {"12; ls": "id of a job"}).items():
        with pytest.raises(InputError, match=f"{word}.*{fact}"):
            run_state.find_runs(word, NO_SLURM)


def test_a_point_is_known_by_its_number_whatever_its_folder_is_called(tmp_path: Path):
    for name, number in (("small", 2), ("large", 1), ("point-7", None)):
        write_submission(tmp_path / "sweep" / name, "20", point=number)
    found = run_state.find_runs(str(tmp_path / "sweep"), NO_SLURM)
    assert names(found) == ["large", "small"] and [files.point for files in found.runs] == [1, 2]
    assert read_run(tmp_path / "sweep" / "point-7").point is None
    (tmp_path / "sweep" / "point-7" / "submission.json").write_text("{")  # of a later version, or damaged
    assert names(run_state.find_runs(str(tmp_path / "sweep"), NO_SLURM)) == ["large", "small", "point-7"]


def test_a_job_belongs_to_the_run_whose_script_it_is(place: Path):
    one, point = read_run(place / "runs" / "one"), read_run(place / "runs" / "sweep" / "point-3")
    script, sweep = str(place / "runs" / "one" / "train.sbatch"), str(place / "runs" / "sweep" / "train.sbatch")

    def job(job_id: str, script: str) -> QueuedJob:
        return QueuedJob(job_id=job_id, state="RUNNING", script=script)

    assert run_state.belongs_to(job("12", ""), one), "by its id"
    assert run_state.belongs_to(job("99", script), one) and run_state.belongs_to(job("99", f"{script} 1"), one), (
        "by its script"
    )
    assert not run_state.belongs_to(job("99", sweep), one) and not run_state.belongs_to(job("99", f"{script}2"), one)
    assert run_state.belongs_to(job("99_3", sweep), point) and not run_state.belongs_to(job("99_4", sweep), point)


def test_the_queue_leads_to_runs_of_other_folders(place: Path):
    jobs = [
        QueuedJob(job_id="20_2", state="RUNNING", script=f"{place}/runs/sweep/train.sbatch"),
        QueuedJob(job_id="12", state="PENDING", script=f"{place}/runs/one/train.sbatch"),
        QueuedJob(job_id="12", state="PENDING", script=f"{place}/gone/train.sbatch"),
        QueuedJob(job_id="5", state="RUNNING", script="/bin/other"),
    ]
    os.chdir("/")
    assert run_state.run_dirs_of(jobs) == [place / "runs" / "sweep" / "point-2", place / "runs" / "one"]


def test_the_newest_attempt_defines_the_run(tmp_path: Path):
    write_attempt(tmp_path, 1, steps=[1, 2, 3])
    write_report(tmp_path, Ending.FAILED, step=3)
    write_attempt(tmp_path, 2, steps=[3, 4])
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 4)
    files = read_run(tmp_path)
    assert (files.attempt, files.phase, files.step) == (2, "training", 4)
    assert [row["step"] for row in files.rows] == [3, 4]
    assert files.plan is not None and files.plan.schedule.num_steps == 100
    assert files.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    assert files.report is not None and not files.has_final_report, "it tells of the first attempt alone"
    attempt = tmp_path / "attempts" / "2"
    for path in (attempt / "status.json", tmp_path / "metrics.jsonl"):
        age(path, 500)
    assert read_run(tmp_path).heartbeat_s == (attempt / "heartbeats" / "rank-0").stat().st_mtime, "the youngest sign"
    write_report(tmp_path, Ending.FINISHED, attempt=2)
    assert read_run(tmp_path).has_final_report


def test_files_of_another_version_are_as_if_they_were_not_there_and_a_long_reason_is_cut(tmp_path: Path):
    folder = write_attempt(tmp_path, steps=[1])
    (tmp_path / "report.json").write_text('{"format": 99, "new": 1}')
    (folder / "plan.json").write_text("{")
    (folder / "status.json").write_text('{"phase": "tra')
    files = read_run(tmp_path)
    assert files.report is None and (files.phase, files.step) == ("training", 1), "by the heartbeat of rank 0"
    assert files.plan is not None, "that of the run is there"
    (folder / "heartbeats" / "rank-0").unlink()
    assert read_run(tmp_path).phase is None
    reason = "No space left on device: " + "x" * 2000
    beat = Heartbeat(step=1, count=2, phase="forward", problem=reason)
    heartbeat_path(folder, 0).write_bytes(encode_heartbeat(beat))
    found = read_run(tmp_path).problem
    assert found is not None and reason.startswith(found) and len(found) > 500


def test_the_output_of_the_newest_start_comes_last_and_a_damaged_line_is_left_out(tmp_path: Path):
    write_submission(tmp_path, "12", "13")
    write_start(tmp_path, "12")
    with (tmp_path / JOBS_FILE).open("a") as stream:
        stream.write("2026-11-22T17:32:00Z 14 n1 0\n2026-11-22T17:3\n")
    write_start(tmp_path, "13")
    for job_id in ("12", "13"):
        (tmp_path / f"slurm-{job_id}.out").write_text("x\n")
    age(tmp_path / "slurm-13.out", 100)  # what a requeued job wrote before is younger
    files = read_run(tmp_path)
    assert [path.name for path in outputs_of(files)] == ["slurm-12.out", "slurm-13.out"]
    assert [start.job_id for start in files.starts] == ["12", "13"]
