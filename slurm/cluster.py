"""A cluster as Slurm describes it: partitions, nodes, what a user may use.

Sizes are in bytes; what sets no limit, or is not known, is None.
"""

from enum import StrEnum

from trainer.spec.value import Value


class PartitionState(StrEnum):
    """What a partition does with jobs."""

    UP = "UP"  # takes and starts them
    DOWN = "DOWN"  # takes them and starts none
    DRAIN = "DRAIN"  # takes none, starts those it has
    INACTIVE = "INACTIVE"


class Preemption(StrEnum):
    """What becomes of a job that makes way for another."""

    OFF = "OFF"
    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"
    SUSPEND = "SUSPEND"
    GANG = "GANG"
    WITHIN = "WITHIN"


class Gres(Value, frozen=True, kw_only=True):
    """A generic resource of a node: `gpu:a100:8`."""

    name: str
    kind: str | None  # the type, None where the site gives none
    count: int


class Node(Value, frozen=True, kw_only=True):
    """A node; cores and RAM are those that jobs get, without what is kept for Slurm itself."""

    name: str
    num_cores: int
    ram_bytes: int | None
    gres: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    is_in_service: bool = True
    version: str | None = None

    @property
    def gpus(self) -> tuple[Gres, ...]:
        return tuple(one for one in self.gres if one.name == "gpu")


class Partition(Value, frozen=True, kw_only=True):
    """A partition and its limits. `num_nodes` counts nodes that Slurm does not show while they are powered down."""

    name: str
    state: PartitionState = PartitionState.UP
    is_default: bool = False
    num_nodes: int
    nodes: str | None = None  # as Slurm writes them
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    default_time_s: int | None = None
    max_cpus_per_node: int | None = None
    default_ram_per_node_bytes: int | None = None
    default_ram_per_cpu_bytes: int | None = None
    default_ram_per_gpu_bytes: int | None = None
    max_ram_per_node_bytes: int | None = None
    max_ram_per_cpu_bytes: int | None = None
    is_exclusive: bool = False  # every job gets whole nodes
    is_oversubscribed: bool = False  # nodes are shared even with a job that asks for whole ones
    allowed_accounts: tuple[str, ...] | None = None  # None: all
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None
    qos: str | None = None  # whose limits hold for every job here
    preemption: Preemption = Preemption.OFF
    grace_time_s: int = 0
    tres: dict[str, int] = {}  # of all nodes together
    billing_weights: dict[str, str] = {}


class JobLimits(Value, frozen=True, kw_only=True):
    """What a quality of service, or an association, lets jobs have at most: amounts by TRES, memory in bytes."""

    source: str  # `QOS long`, `account vision`
    max_time_s: int | None = None
    per_job: dict[str, int] = {}
    per_user: dict[str, int] = {}
    per_account: dict[str, int] = {}
    together: dict[str, int] = {}  # of everybody's jobs
    is_over_partition: bool = False  # goes before the partition's own QOS


class Association(Value, frozen=True, kw_only=True):
    """An account that a user may charge, and with which qualities of service."""

    account: str
    is_default: bool = False  # what a job that names no account is charged to
    partition: str | None = None  # None: any
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    limits: JobLimits
