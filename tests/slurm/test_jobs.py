"""Jobs of Slurm: that of this process, and others, parsed from the output of real clusters and described."""

import shlex
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from slurm_cluster import SlurmCluster

from shardwise.slurm import jobs as slurm_jobs
from shardwise.trainer import FOLDER
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host, SlurmEnvironment

CAPTURED = Path(__file__).parents[1] / "captured" / "jobs_of_slurm"


def captured(name: str) -> str:
    return (CAPTURED / name).read_text()


def test_the_queue_is_read_with_any_script_name():
    jobs = {job.job_id: job for job in slurm_jobs.parse_queue(captured("squeue.txt"))}
    assert list(jobs) == ["2", "3", "4", "5", "6_2", "7", "1", "6_1"]
    assert jobs["3"] == slurm_jobs.QueuedJob(
        job_id="3", state="PENDING", reason="Priority", start="2026-11-22T18:11:00", submitted="2026-11-22T18:01:37",
        seconds_left=300, num_nodes=4, partition="cpu", script="/tmp/run a|b/train.sbatch 30",
    )  # fmt: skip
    assert (jobs["1"].nodes, jobs["1"].seconds_left, jobs["1"].reason) == ("n[1-2]", 296, None)
    assert (jobs["5"].start, jobs["5"].seconds_left) == (None, None)
    assert (jobs["7"].script, jobs["7"].seconds_left) == ("", 86400)
    assert [name for name, job in jobs.items() if job.is_running] == ["1", "6_1"]
    assert [name for name, job in jobs.items() if job.is_waiting] == ["2", "3", "4", "5", "6_2", "7"]


def test_tasks_of_an_array_have_their_ids_and_a_job_name_is_no_field():
    text = captured("scontrol_array.txt").replace("JobName=na|me ", "JobName=na|me JobState=RUNNING JobId=1 ", 1)
    first, second = slurm_jobs.parse_jobs(text)
    assert first == slurm_jobs.EndedJob(
        job_id="6_5", state="FAILED", exit_code=3, end_signal=0, start="2026-11-22T18:01:47", end="2026-11-22T18:01:48",
        nodes="n1", script="/tmp/run a|b/train.sbatch",
    )  # fmt: skip
    assert (second.job_id, second.state, second.end) == ("6_1", "RUNNING", None)


def test_the_accounting_is_read():
    text = (
        "569966|OUT_OF_MEMORY|0:125|2023-07-19T15:54:37|2023-07-19T15:54:42|gnode009\n"
        "17_3|CANCELLED by 1000|0:15|2024-01-01T00:00:00|2024-01-01T00:01:00|None assigned\n"
        "18|PENDING|0:0|Unknown|Unknown|\n"
        "sacct: error\n"
    )
    jobs = slurm_jobs.parse_accounting(text)
    assert [(job.job_id, job.state, job.exit_code, job.end_signal) for job in jobs] == [
        ("569966", "OUT_OF_MEMORY", 0, 125),
        ("17_3", "CANCELLED", 0, 15),
        ("18", "PENDING", 0, 0),
    ]
    assert (jobs[1].nodes, jobs[2].start, jobs[2].nodes) == (None, None, None)


PENDING = slurm_jobs.QueuedJob(job_id="12", state="PENDING", reason="Priority", start="2026-11-22T18:11:00")
RUNNING = slurm_jobs.QueuedJob(job_id="12", state="RUNNING", nodes="n[1-2]", seconds_left=7200)


@pytest.mark.parametrize(
    ("job", "facts"),
    [
        (PENDING, ("PENDING (Priority)", "priority", "2026-11-22T18:11:00")),
        (replace(PENDING, reason=None, start=None), ("PENDING", "not considered it yet")),
        (RUNNING, ("RUNNING", "n[1-2]", "2 h 00 min of its time left")),
        (slurm_jobs.QueuedJob(job_id="12", state="RUNNING"), ("no time limit",)),
        (
            slurm_jobs.EndedJob(job_id="12", state="FAILED", exit_code=3),
            ("exit code 3", "(no strategy fits these nodes)"),
        ),
        (slurm_jobs.EndedJob(job_id="12", state="FAILED", exit_code=0, end_signal=9), ("signal 9",)),
        (slurm_jobs.EndedJob(job_id="12", state="TIMEOUT", exit_code=0, end_signal=15), ("time limit",)),
        (slurm_jobs.EndedJob(job_id="12", state="REVOKED"), ("REVOKED",)),
    ],
)
def test_a_job_is_described_in_one_line(job, facts):
    line = slurm_jobs.describe_queued(job) if isinstance(job, slurm_jobs.QueuedJob) else slurm_jobs.describe_ended(job)
    assert line.startswith("job 12") and line.endswith(facts[-1])
    assert [fact for fact in facts if fact not in line] == []


def test_the_time_that_is_left_is_read_from_the_queue_and_a_job_that_it_lacks_is_none(slurm: SlurmCluster):
    limited = slurm.submit("--time=10", "--output=/dev/null", "--wrap=sleep 60")
    endless = slurm.submit("--time=UNLIMITED", "--output=/dev/null", "--wrap=sleep 60")
    for job in (limited, endless):
        slurm.wait_for(job, "RUNNING")
    left_s = slurm_jobs.read_seconds_left(limited, slurm.environment)
    assert left_s is not None and 500 < left_s <= 600
    assert slurm_jobs.read_seconds_left(endless, slurm.environment) is None
    assert slurm_jobs.read_seconds_left("999999", slurm.environment) is None
    assert slurm_jobs.read_seconds_left("1", {"PATH": "/nonexistent"}) is None
    assert slurm_jobs.read_job("999999", slurm.environment) is None
    with pytest.raises(EnvironmentFaultError, match="scontrol"):
        slurm_jobs.read_job("1", {"PATH": "/nonexistent"})


@pytest.mark.parametrize(
    ("slurm", "has_gpu", "expected"),
    [
        (None, False, False),
        (SlurmEnvironment(has_sbatch=True), False, True),
        (SlurmEnvironment(has_sbatch=True), True, False),
        (SlurmEnvironment(has_sbatch=True, job_id="7"), False, False),
        (SlurmEnvironment(has_sbatch=False), False, False),
    ],
)
def test_a_login_node_has_sbatch_but_neither_job_nor_gpu(slurm, has_gpu, expected):
    gpus = (Gpu(index=0, name="NVIDIA A10", spec_name="A10", memory_bytes=24 * 2**30),) if has_gpu else ()
    host = Host(num_cores=4, ram_bytes=2**34, ram_available_bytes=2**33, cpu_name=None, slurm=slurm)
    assert slurm_jobs.is_login_node(Hardware(gpus=gpus, host=host)) is expected


@pytest.mark.parametrize("job", ["job.yaml", "my job's $(touch x).yaml", "a\nb.yaml"])
def test_the_submit_line_survives_any_file_name(job):
    words = shlex.split(slurm_jobs.submit_line(job, ["train.lr=1e-4; rm x"]))
    assert words == ["shardwise", "submit", job, "train.lr=1e-4; rm x"]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "96(x2),64", "SLURM_NTASKS": "3"}


def test_a_batch_script_is_in_its_allocation_and_one_of_several_tasks_is_refused():
    assert slurm_jobs.find_allocation(JOB) == slurm_jobs.Allocation("7", 2, 0, 64, is_in_step=False)
    assert slurm_jobs.find_allocation(JOB | {"SLURM_RESTART_COUNT": "2"}).num_restarts == 2
    assert slurm_jobs.find_allocation({"PATH": "/bin"}) is None
    step = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
    with pytest.raises(InputError, match="8 tasks"):
        slurm_jobs.find_allocation(step)
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n"}
    assert slurm_jobs.place_in_step(step) is slurm_jobs.place_in_step(JOB) is None, "no place among machines"
    assert slurm_jobs.place_in_step(step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) is None


def test_a_step_of_every_node_has_all_that_the_job_has():
    batch = slurm_jobs.find_allocation(JOB)
    assert batch is not None
    argv = slurm_jobs.srun_argv(batch, ["prog", "a b"])
    assert argv[0] == "srun" and argv[-2:] == ["prog", "a b"] and "--overlap" not in argv
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=64"} <= {*argv}
    inside = slurm_jobs.find_allocation(JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert inside is not None
    assert "--overlap" in slurm_jobs.srun_argv(inside, ["prog"])
    assert "--label" in slurm_jobs.srun_argv(inside, ["prog"], labels=True)


_PROBE = """
import os
from shardwise.launch.probe.measure import Meeting, with_network
from shardwise.slurm.jobs import place_in_step
from shardwise.trainer.spec.hardware import Hardware, Host
place = place_in_step(os.environ)
found = with_network(
    Hardware(gpus=(), host=Host(cpu_name=None, num_cores=1, ram_bytes=None, ram_available_bytes=None)),
    Meeting(*place, 29400),
)
print(*place, found.rates.between_nodes_bytes_per_s is not None, *found.notes)
"""


@pytest.mark.long
@pytest.mark.slurm
def test_a_step_with_a_task_on_each_node_measures_the_network(slurm: SlurmCluster, tmp_path: Path):
    (tmp_path / "probe.py").write_text(_PROBE)
    step = shlex.join(["srun", "--ntasks-per-node=1", sys.executable, str(tmp_path / "probe.py")])
    job = slurm.submit("--nodes=2", f"--output={tmp_path}/out", f"--wrap={step}", PYTHONPATH=str(FOLDER.parent))
    slurm.wait_for(job, "COMPLETED")
    first, second = (line.split() for line in sorted((tmp_path / "out").read_text().splitlines()))
    assert (first[:2], second[:2]) == (["2", "0"], ["2", "1"]) and first[2] == second[2]
    assert first[3:] == second[3:] == ["True"]
