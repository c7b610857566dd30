"""Where we are on a cluster: on a login node, inside a job, or on no cluster at all; pure functions of a probe."""

import shlex
from collections.abc import Sequence

from trainer.spec.hardware import Hardware


def is_login_node(hardware: Hardware) -> bool:
    """True where sbatch is at hand, no job is running here, and there is no GPU to train on."""
    slurm = hardware.host.slurm
    return slurm is not None and slurm.has_sbatch and slurm.job_id is None and not hardware.gpus


def submit_line(job: str, overrides: Sequence[str] = ()) -> str:
    """The command that trains `job` on one whole node, with every word quoted for the shell."""
    inner = shlex.join(["shardwise", "train", job, *overrides])
    return shlex.join(["sbatch", "--nodes=1", "--exclusive", "--job-name=shardwise", f"--wrap={inner}"])
