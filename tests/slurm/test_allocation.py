"""Training does not start on a login node by accident, and the line to submit it can be pasted."""

import shlex

import pytest

from shardwise.slurm.allocation import (
    Allocation,
    find_allocation,
    is_login_node,
    srun_argv,
    submit_line,
)
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host, SlurmEnvironment


def machine(slurm: SlurmEnvironment | None, *, has_gpu: bool = False) -> Hardware:
    gpus = (Gpu(index=0, name="NVIDIA A10", spec_name="A10", memory_bytes=24 * 2**30),) if has_gpu else ()
    return Hardware(
        gpus=gpus, host=Host(num_cores=4, ram_bytes=2**34, ram_available_bytes=2**33, cpu_name=None, slurm=slurm)
    )


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
    assert is_login_node(machine(slurm, has_gpu=has_gpu)) is expected


@pytest.mark.parametrize("job", ["job.yaml", "my job's $(touch x).yaml", "a\nb.yaml"])
def test_the_submit_line_survives_any_file_name(job):
    words = shlex.split(submit_line(job, ["train.lr=1e-4; rm x"]))
    assert words == ["shardwise", "submit", job, "train.lr=1e-4; rm x"]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "96(x2),64", "SLURM_NTASKS": "3"}


def test_a_batch_script_is_in_its_allocation():
    assert find_allocation(JOB) == Allocation("7", 2, 0, 64, is_in_step=False)
    assert find_allocation(JOB | {"SLURM_RESTART_COUNT": "2"}).num_restarts == 2
    assert find_allocation({"PATH": "/bin"}) is None


def test_one_of_several_tasks_is_refused_before_each_starts_a_run():
    step = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
    with pytest.raises(InputError, match="8 tasks"):
        find_allocation(step)


def test_a_step_of_every_node_has_all_that_the_job_has():
    batch = find_allocation(JOB)
    assert batch is not None
    argv = srun_argv(batch, ["prog", "a b"])
    assert argv[0] == "srun" and argv[-2:] == ["prog", "a b"] and "--overlap" not in argv
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=64"} <= {*argv}
    inside = find_allocation(JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert inside is not None
    assert "--overlap" in srun_argv(inside, ["prog"]) and "--label" in srun_argv(inside, ["prog"], labels=True)
