"""The place of this process on a cluster: on a login node, inside a job, or on no cluster. Pure.

The facts on a job are in its environment (sbatch(1), OUTPUT ENVIRONMENT VARIABLES). A program that `srun` starts as one
of several tasks cannot supervise a run: there would be one supervisor for each task.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware


class Allocation(NamedTuple):
    """The resources of a job, from the environment of its first node."""

    job_id: str
    num_nodes: int
    num_restarts: int  # of this job by requeueing; 0 in a follow-up job
    cores_per_node: int | None  # of the node that has fewest
    is_in_step: bool  # srun started this program: its own steps must share the resources of that step


def is_login_node(hardware: Hardware) -> bool:
    """True if sbatch is available, this is not inside a job, and there is no GPU to train on."""
    slurm = hardware.host.slurm
    return slurm is not None and slurm.has_sbatch and slurm.job_id is None and not hardware.gpus


def submit_line(job: str, overrides: Sequence[str] = ()) -> str:
    """The command that submits `job`, quoted for the shell."""
    return shlex.join(["shardwise", "submit", job, *overrides])


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The job of this program; None outside a job. InputError if the program is one of several tasks."""
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    is_in_step = "SLURM_STEP_ID" in environment
    num_tasks = _number(environment.get("SLURM_STEP_NUM_TASKS")) if is_in_step else 1
    if num_tasks is not None and num_tasks > 1:
        raise InputError(
            f"srun started {num_tasks} tasks of this command, and it starts the ranks itself; run it once a job: "
            "in the batch script without srun, or with srun --ntasks=1"
        )
    num_nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    return Allocation(
        job_id=job_id,
        num_nodes=_number(num_nodes) or 1,
        num_restarts=_number(environment.get("SLURM_RESTART_COUNT")) or 0,
        cores_per_node=_least_cores(environment.get("SLURM_JOB_CPUS_PER_NODE", "")),
        is_in_step=is_in_step,
    )


def srun_argv(allocation: Allocation, command: Sequence[str], *, labels: bool = False) -> list[str]:
    """The argv that runs `command` once on every node of the job, with all resources of the job there.

    A task that fails ends the others. `labels` prefixes each line of output with the number of its node.
    """
    nodes = allocation.num_nodes
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--mem=0", "--input=none", "--export=ALL", "--cpu-bind=none"]
    argv += [f"--cpus-per-task={allocation.cores_per_node}"] if allocation.cores_per_node else []
    argv += ["--overlap"] if allocation.is_in_step else []
    argv += ["--label"] if labels else []
    return [*argv, *command]


def _least_cores(text: str) -> int | None:
    """64 for `96(x2),64`; None for other text."""
    counts = [int(found[1]) for found in re.finditer(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)]
    return min(counts, default=None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
