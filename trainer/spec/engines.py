"""Engines: every way to spread model state over the ranks, as a row of facts. Everything else reads the row.

To add one: a member with its row here, its bytes and transfers in `trainer/planning/engines`, its side of the runtime
in `trainer/runtime/engines` and `trainer/runtime/checkpoint/engines.py`, its files under `ds_configs/` or
`fsdp_configs/`, and rows of `trainer/planning/rules`. A member that lacks one of the first four is an error on import.

The rows stand in the order in which equally fast engines are preferred: from the least machinery to the most.
"""

from enum import StrEnum
from functools import cached_property

from shardwise.trainer.spec.optimizers import Pieces
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value, complete

UPDATE_WINDOW_BYTES = 5 * 400 * MIB  # of a sub-group's buffers: buffer_count x buffer_size of DeepSpeed's examples
SUB_GROUP_BUFFERS = 4  # of a sub-group under Adam: master weights, gradient, two moments


class Offload(StrEnum):
    """State stored off the device: in host RAM, or on NVMe."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    OPTIMIZER_PARAMS = "optimizer+params"
    NVME_OPTIMIZER = "nvme_optimizer"
    NVME_ALL = "nvme_all"

    @cached_property
    def uses_nvme(self) -> bool:
        return self in (Offload.NVME_OPTIMIZER, Offload.NVME_ALL)

    @cached_property
    def moves_parameters(self) -> bool:
        return self in (Offload.OPTIMIZER_PARAMS, Offload.NVME_ALL)


class Engine(StrEnum):
    """The library that runs the ranks of a sharding."""

    TORCH = "torch"  # the whole model on every rank; DistributedDataParallel where there are several
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"  # FSDP2, `fully_shard`


class Sharding(StrEnum):
    """How model state is spread over the ranks."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    FSDP_GRAD_OP = "fsdp_grad_op"
    HSDP = "hsdp"

    @cached_property
    def facts(self) -> "EngineFacts":
        """The row of this sharding."""
        return ENGINES[self]

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank keeps and computes with the whole model in plain PyTorch."""
        return self.facts.engine is Engine.TORCH

    @cached_property
    def uses_deepspeed(self) -> bool:
        return self.facts.engine is Engine.DEEPSPEED

    @cached_property
    def uses_fsdp(self) -> bool:
        return self.facts.engine is Engine.FSDP

    @cached_property
    def shards_optimizer(self) -> bool:
        return self.facts.zero_stage >= 1

    @cached_property
    def shards_gradients(self) -> bool:
        return self.facts.zero_stage >= 2

    @cached_property
    def shards_weights(self) -> bool:
        return self.facts.zero_stage >= 3


class EngineFacts(Value, frozen=True, kw_only=True):
    """One row."""

    engine: Engine
    reason: str  # for which a plan chooses it
    is_one_rank: bool = False  # it drives one device; every other sharding needs two ranks or more
    # Distribution of state
    zero_stage: int = 0  # ranks share 1: optimizer state, 2: gradients too, 3: weights too (ZeRO, arXiv:1910.02054)
    shards_within_group: bool = False  # of ranks, each of which has a copy (`Candidate.shard_group`); else over all
    keeps_weights_gathered: bool = False  # from the forward to the end of the backward
    keeps_gradient_buckets: bool = False  # gradients are views of buckets that stay between steps
    # Updates
    pieces: Pieces  # the form in which the optimizer receives weights
    has_own_fp16: bool = False  # the library computes in fp16 and scales the loss by itself
    updates_in_backward: bool = False  # a hook after the gradient of a weight sees the gradient to update with
    # Offload
    offloads: tuple[Offload, ...] = ()  # that the library has
    base_configs: dict[Offload, str] = {}  # the file that each layout fills; an offload without one is not planned

    @property
    def deepspeed_stage(self) -> int:
        """The stage that DeepSpeed runs; 0 for every other engine."""
        return self.zero_stage if self.engine is Engine.DEEPSPEED else 0

    @property
    def layouts(self) -> tuple[Offload, ...]:
        """Every place of state that is planned."""
        return tuple(self.base_configs) or (Offload.NONE,)


ENGINES: dict[Sharding, EngineFacts] = complete(
    Sharding,
    {
        Sharding.NONE: EngineFacts(
            engine=Engine.TORCH,
            reason="one device: nothing to share",
            is_one_rank=True,
            pieces=Pieces.WHOLE,
            updates_in_backward=True,
        ),
        Sharding.DDP: EngineFacts(
            engine=Engine.TORCH,
            reason="the whole state fits on every device, and ddp exchanges gradients only",
            keeps_gradient_buckets=True,
            pieces=Pieces.WHOLE,
        ),
        Sharding.ZERO1: EngineFacts(
            engine=Engine.DEEPSPEED,
            reason="optimizer state is spread over the ranks",
            has_own_fp16=True,
            zero_stage=1,
            pieces=Pieces.FLAT,
            offloads=(Offload.OPTIMIZER,),
            base_configs={Offload.NONE: "ds_configs/zero1.json"},
        ),
        Sharding.ZERO2: EngineFacts(
            engine=Engine.DEEPSPEED,
            reason="optimizer state and gradients are spread over the ranks",
            has_own_fp16=True,
            zero_stage=2,
            pieces=Pieces.FLAT,
            offloads=(Offload.OPTIMIZER,),
            base_configs={
                Offload.NONE: "ds_configs/zero2.json",
                Offload.OPTIMIZER: "ds_configs/zero2_offload_optimizer.json",
            },
        ),
        Sharding.ZERO3: EngineFacts(
            engine=Engine.DEEPSPEED,
            reason="weights, gradients and optimizer state are spread over the ranks",
            has_own_fp16=True,
            zero_stage=3,
            pieces=Pieces.FLAT,
            offloads=(Offload.OPTIMIZER, Offload.OPTIMIZER_PARAMS, Offload.NVME_OPTIMIZER, Offload.NVME_ALL),
            base_configs={
                Offload.NONE: "ds_configs/zero3.json",
                Offload.OPTIMIZER: "ds_configs/zero3_offload_optimizer.json",
                Offload.OPTIMIZER_PARAMS: "ds_configs/zero3_offload_all.json",
                Offload.NVME_OPTIMIZER: "ds_configs/zero3_nvme_optimizer.json",
                Offload.NVME_ALL: "ds_configs/zero3_nvme.json",
            },
        ),
        Sharding.FSDP_GRAD_OP: EngineFacts(
            engine=Engine.FSDP,
            reason="gradients and optimizer state are spread; weights stay gathered until the backward ends",
            zero_stage=3,
            keeps_weights_gathered=True,
            pieces=Pieces.SHARDS,
            updates_in_backward=True,
            offloads=(Offload.OPTIMIZER_PARAMS,),
            base_configs={Offload.NONE: "fsdp_configs/grad_op.yaml"},
        ),
        Sharding.FSDP: EngineFacts(
            engine=Engine.FSDP,
            reason="weights, gradients and optimizer state are spread over the ranks",
            zero_stage=3,
            pieces=Pieces.SHARDS,
            updates_in_backward=True,
            offloads=(Offload.OPTIMIZER_PARAMS,),
            base_configs={
                Offload.NONE: "fsdp_configs/full_shard.yaml",
                Offload.OPTIMIZER_PARAMS: "fsdp_configs/full_shard_cpu_offload.yaml",
            },
        ),
        Sharding.HSDP: EngineFacts(
            engine=Engine.FSDP,
            reason="state is spread inside groups of ranks and replicated across groups",
            zero_stage=3,
            shards_within_group=True,
            pieces=Pieces.SHARDS,
            updates_in_backward=True,
            offloads=(Offload.OPTIMIZER_PARAMS,),
            base_configs={Offload.NONE: "fsdp_configs/hybrid.yaml"},
        ),
    },
    "ENGINES",
)


def shardings_with(offload: Offload) -> tuple[Sharding, ...]:
    """The shardings whose library has an offload."""
    return tuple(sharding for sharding in Sharding if offload in sharding.facts.offloads)


def sub_group_elements(*, partition: int, piece: int, num_bytes: int, window: int = UPDATE_WINDOW_BYTES) -> int:
    """DeepSpeed's `sub_group_size`: what ZeRO-3 updates at once, of a rank's `partition`, in elements.

    `piece` is a rank's part of the largest weight, `num_bytes` what the buffers of one element take. The weight that
    fills a sub-group belongs to it, so that it may be larger than this by one piece.
    """
    return max(1, min(partition, max(piece, window // num_bytes) - piece))
