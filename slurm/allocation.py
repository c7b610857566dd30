"""Where we are on a cluster: on a login node, inside a job, or on no cluster at all; pure functions of a probe.

What Slurm tells a job stands in its environment (sbatch(1), OUTPUT ENVIRONMENT VARIABLES). A program that `srun` starts
as one of several tasks is no place for a supervisor: there would be one a task.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.spec.errors import InputError
from trainer.spec.hardware import Hardware


class Allocation(NamedTuple):
    """What a job was given, as the first of its nodes sees it."""

    job_id: str
    num_nodes: int
    num_restarts: int  # of this job by requeueing; a follow-up job counts anew
    cores_per_node: int | None  # of the node that has fewest
    is_in_step: bool  # srun started this program: steps of its own must share what it holds


def is_login_node(hardware: Hardware) -> bool:
    """True where sbatch is at hand, no job is running here, and there is no GPU to train on."""
    slurm = hardware.host.slurm
    return slurm is not None and slurm.has_sbatch and slurm.job_id is None and not hardware.gpus


def submit_line(job: str, overrides: Sequence[str] = ()) -> str:
    """The command that submits `job`, with every word quoted for the shell."""
    return shlex.join(["shardwise", "submit", job, *overrides])


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The job this program runs in; None outside of one. InputError where it is one of several tasks."""
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
    """The argv that runs `command` once on every node of the job, with all that the job has there.

    A task that fails ends the others. `labels` puts the number of the node before each line of output.
    """
    nodes = allocation.num_nodes
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--mem=0", "--input=none", "--export=ALL", "--cpu-bind=none"]
    argv += [f"--cpus-per-task={allocation.cores_per_node}"] if allocation.cores_per_node else []
    argv += ["--overlap"] if allocation.is_in_step else []
    argv += ["--label"] if labels else []
    return [*argv, *command]


def _least_cores(text: str) -> int | None:
    """Of `96(x2),64`, 64; None where it is not said."""
    counts = [int(found[1]) for found in re.finditer(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)]
    return min(counts, default=None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
