"""Training does not start on a login node by accident, and the line to submit it can be pasted."""

import shlex

import pytest

from slurm.allocation import is_login_node, submit_line
from trainer.spec.hardware import Gpu, Hardware, Host, SlurmEnvironment


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
