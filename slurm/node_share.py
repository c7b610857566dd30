"""The part of a node that a job asks for: all of it, or some GPUs with their cores and their RAM. Pure."""

from trainer.spec.errors import InputError
from trainer.spec.job.sections import SlurmJob
from trainer.spec.units import format_bytes
from trainer.spec.value import Value


class NodeShare(Value, frozen=True, kw_only=True):
    """What is asked of each node; None: all it has, or the share of its GPUs."""

    gpus: int | None = None
    cores: int | None = None
    ram_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.gpus is None and self.cores is None and self.ram_bytes is None


def share_of_job(slurm: SlurmJob) -> NodeShare:
    """What a job file asks for: slurm.gpus, slurm.cores, slurm.memory."""
    return NodeShare(gpus=slurm.gpus, cores=slurm.cores, ram_bytes=slurm.memory)


def share_of_node(
    share: NodeShare, *, num_gpus: int, num_cores: int, ram_bytes: int | None
) -> tuple[int, int, int | None]:
    """GPUs, cores and RAM that a job gets of a node; InputError for more than it has."""
    gpus = num_gpus if share.gpus is None else share.gpus
    part = gpus / num_gpus if num_gpus else 1.0
    cores = share.cores or max(1, int(num_cores * part))
    ram = share.ram_bytes or (None if ram_bytes is None else int(ram_bytes * part))
    if gpus > num_gpus:
        raise InputError(f"slurm.gpus is {gpus}; the nodes have {num_gpus}")
    if cores > num_cores:
        raise InputError(f"slurm.cores is {cores}; jobs get at most {num_cores} of a node")
    if ram is not None and ram_bytes is not None and ram > ram_bytes:
        raise InputError(f"slurm.memory is {format_bytes(ram)}; jobs get at most {format_bytes(ram_bytes)} of a node")
    return gpus, cores, ram
