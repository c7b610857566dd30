"""Whether wandb is told of a run, and how: the job says, the environment may say otherwise. Pure.

WANDB_MODE is closer to the run than the job file is, and what it says holds; it switches nothing on that the job does
not ask for. Compute nodes that have no network (`slurm.network: none`) write offline.
"""

from collections.abc import Mapping

from trainer.spec.errors import InputError
from trainer.spec.job.sections import Job, NodeNetwork, WandbMode

_MODES = {
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.OFF,
}


def wandb_mode(job: Job, environment: Mapping[str, str], *, on_node: bool | None = None) -> WandbMode:
    """What is done; `on_node` says whether the run is on a compute node, by default whether Slurm started this.

    InputError for a WANDB_MODE that is none.
    """
    if job.log.wandb is WandbMode.OFF:
        return WandbMode.OFF
    named = environment.get("WANDB_MODE", "").strip()
    mode = _MODES.get(named) if named else job.log.wandb
    if mode is None:
        raise InputError(f"WANDB_MODE is {named!r}; expected online, offline or disabled")
    is_on_node = "SLURM_JOB_ID" in environment if on_node is None else on_node
    if mode is WandbMode.ONLINE and is_on_node and job.slurm.network is NodeNetwork.NONE:
        return WandbMode.OFFLINE
    return mode
