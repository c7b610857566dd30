"""What Slurm says of jobs, as it says it on real clusters."""

from pathlib import Path

from slurm.jobs import EndedJob, QueuedJob, parse_accounting, parse_jobs, parse_queue

CAPTURED = Path(__file__).parents[1] / "captured" / "jobs_of_slurm"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text()


def test_the_queue_is_read_whatever_a_script_is_called():
    jobs = {job.job_id: job for job in parse_queue(captured("squeue.txt"))}
    assert list(jobs) == ["2", "3", "4", "5", "6_2", "7", "1", "6_1"]
    assert jobs["3"] == QueuedJob(
        job_id="3",
        state="PENDING",
        reason="Priority",
        start="2026-11-22T18:11:00",
        submitted="2026-11-22T18:01:37",
        seconds_left=300,
        num_nodes=4,
        partition="cpu",
        script="/tmp/run a|b/train.sbatch 30",
    )
    assert (jobs["1"].nodes, jobs["1"].seconds_left, jobs["1"].reason) == ("n[1-2]", 296, None)
    assert (jobs["5"].start, jobs["5"].seconds_left) == (None, None)
    assert (jobs["7"].script, jobs["7"].seconds_left) == ("", 86400)


def test_a_job_waits_or_runs():
    jobs = {job.job_id: job for job in parse_queue(captured("squeue.txt"))}
    assert [name for name, job in jobs.items() if job.is_running] == ["1", "6_1"]
    assert [name for name, job in jobs.items() if job.is_waiting] == ["2", "3", "4", "5", "6_2", "7"]


def test_what_is_no_row_of_the_queue_is_left_out():
    assert parse_queue("slurm_load_jobs error: Unable to contact slurm controller\n\n1|RUNNING\n") == ()


def test_the_tasks_of_an_array_are_told_apart_and_a_name_cannot_lie():
    text = captured("scontrol_array.txt").replace("JobName=na|me ", "JobName=na|me JobState=RUNNING JobId=1 ", 1)
    first, second = parse_jobs(text)
    assert first == EndedJob(
        job_id="6_5",
        state="FAILED",
        exit_code=3,
        end_signal=0,
        start="2026-11-22T18:01:47",
        end="2026-11-22T18:01:48",
        nodes="n1",
        script="/tmp/run a|b/train.sbatch",
    )
    assert (second.job_id, second.state, second.end) == ("6_1", "RUNNING", None)


def test_records_of_several_lines_are_read_alike():
    (job,) = parse_jobs(captured("scontrol_out_of_memory.txt"))
    assert (job.job_id, job.state, job.exit_code, job.end_signal) == ("569966", "OUT_OF_MEMORY", 0, 125)
    assert (job.end, job.nodes, job.script) == ("2023-07-19T15:54:42", "gnode009", "/scratch/someone/job.sub")
    (job,) = parse_jobs(captured("scontrol_pending.txt"))
    assert (job.state, job.start, job.end, job.nodes) == ("PENDING", None, None, None)


def test_the_accounting_is_read_with_whoever_cancelled():
    text = (
        "569966|OUT_OF_MEMORY|0:125|2023-07-19T15:54:37|2023-07-19T15:54:42|gnode009\n"
        "17_3|CANCELLED by 1000|0:15|2024-01-01T00:00:00|2024-01-01T00:01:00|None assigned\n"
        "18|PENDING|0:0|Unknown|Unknown|\n"
        "sacct: error\n"
    )
    jobs = parse_accounting(text)
    assert [(job.job_id, job.state, job.exit_code, job.end_signal) for job in jobs] == [
        ("569966", "OUT_OF_MEMORY", 0, 125),
        ("17_3", "CANCELLED", 0, 15),
        ("18", "PENDING", 0, 0),
    ]
    assert (jobs[1].nodes, jobs[2].start, jobs[2].nodes) == (None, None, None)
