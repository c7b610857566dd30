"""Request and result of a dry run: the two values that cross to and from its process.

A dry run is one rank of one configuration. The result is what torch's counters would show on that rank in a steady
step, and what was alive at the peak.
"""

from typing import Any

from msgspec import field

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.shape import ModelCode
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision, Quant
from shardwise.trainer.spec.value import Value


class SimulationRequest(Value, frozen=True, kw_only=True):
    """A model and everything of a configuration that determines the contents of one rank."""

    model_config: dict[str, Any]
    model_code: ModelCode | None = None
    method: Method = Method.FULL
    lora: LoraJob = LoraJob()
    quant: Quant = Quant.NF4_DQ
    sharding: Sharding = Sharding.NONE
    num_ranks: int = 1
    ranks_per_node: int = 8
    shard_group: int | None = None  # ranks that share one copy of the state under hsdp; None: those of a node
    precision: Precision = Precision.BF16_MIXED
    optimizer: Optimizer = Optimizer.ADAMW
    micro_batch: int = 1  # examples
    rows_per_example: int = 1  # 2: DPO, a chosen and a rejected completion
    seq_len: int = 2048
    document_tokens: float | None = None  # of packed rows, the length of a document; None: a row is one document
    accumulation: int = 1
    checkpointing: Checkpointing = Checkpointing.NONE
    attention: Attention = Attention.SDPA
    loss: LossHead = LossHead.CHUNKED
    loss_chunk_tokens: int | None = None
    activation_offload: bool = False
    device_kind: DeviceKind = DeviceKind.CUDA
    device_name: str | None = None
    compute_capability: tuple[int, int] = (9, 0)  # decides which attention kernels there are


class LiveGroup(Value, frozen=True, kw_only=True):
    """Live bytes of one kind, made by one operation in one module; blocks of the same class are counted together."""

    kind: str  # a key of `Simulation.parts`
    module: str
    operation: str
    num_tensors: int
    num_bytes: int


class Simulation(Value, frozen=True, kw_only=True):
    """Bytes of one rank in a steady step, its second.

    `events` holds the most live bytes until the next event begins, under the names of the closed form's events.
    `parts` split the live bytes at the peak and sum to `peak_allocated_bytes`. Reserved bytes are a replay of every
    allocation through a model of torch's caching allocator; `min_capacity_bytes` is the smallest memory for that
    allocator in which the two steps still ran. `pinned_host_bytes` is what was page-locked in host RAM at most.
    """

    steady_allocated_bytes: int
    peak_allocated_bytes: int
    peak_event: str
    events: dict[str, int]
    parts: dict[str, int]
    live: tuple[LiveGroup, ...]  # at the peak, largest first
    peak_reserved_bytes: int
    expandable_reserved_bytes: int
    min_capacity_bytes: int
    pinned_host_bytes: int = 0
    checks: tuple[str, ...]
    num_parameters: int
    num_trained_parameters: int
    seconds: float
    versions: dict[str, str]

    def reserved_bytes(self, *, is_expandable: bool) -> int:
        """Peak bytes that the allocator reserves, with or without expandable segments."""
        return self.expandable_reserved_bytes if is_expandable else self.peak_reserved_bytes


class GoldenResult(Value, frozen=True, kw_only=True):
    """The part of a dry run that does not depend on the machine that ran it."""

    steady_allocated_bytes: int
    peak_allocated_bytes: int
    peak_event: str
    events: dict[str, int]
    parts: dict[str, int]
    peak_reserved_bytes: int
    expandable_reserved_bytes: int
    min_capacity_bytes: int
    pinned_host_bytes: int = 0
    num_parameters: int
    num_trained_parameters: int
    versions: dict[str, str]


class GoldenRow(Value, frozen=True, kw_only=True):
    """One line of the file of known dry runs; without a result, one that is still to be run."""

    name: str
    request: SimulationRequest
    result: GoldenResult | None = field(default=None, name="answer")
