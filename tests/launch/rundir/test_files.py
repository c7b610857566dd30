"""A run directory is read while it is written: incomplete lines, missing files and other versions do no harm."""

from pathlib import Path

from run_factory import age, write_attempt, write_checkpoint, write_report, write_start, write_submission

from shardwise.launch.rundir.files import outputs_of, read_run
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.messages.submission import JOBS_FILE
from shardwise.trainer.spec.report import Ending


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


def test_files_of_another_version_are_as_if_they_were_not_there(tmp_path: Path):
    folder = write_attempt(tmp_path, steps=[1])
    (tmp_path / "report.json").write_text('{"format": 99, "new": 1}')
    (folder / "plan.json").write_text("{")
    (folder / "status.json").write_text('{"phase": "tra')
    files = read_run(tmp_path)
    assert files.report is None and (files.phase, files.step) == ("training", 1), "by the heartbeat of rank 0"
    assert files.plan is not None, "that of the run is there"
    (folder / "heartbeats" / "rank-0").unlink()
    assert read_run(tmp_path).phase is None


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


def test_a_long_reason_of_a_failed_save_is_cut_and_not_lost(tmp_path: Path):
    folder, reason = write_attempt(tmp_path, steps=[1]), "No space left on device: " + "x" * 2000
    beat = Heartbeat(step=1, count=2, phase="forward", problem=reason)
    heartbeat_path(folder, 0).write_bytes(encode_heartbeat(beat))
    found = read_run(tmp_path).problem
    assert found is not None and reason.startswith(found) and len(found) > 500
