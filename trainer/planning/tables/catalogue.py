"""Every strategy as a row: sharding x offload x optimizer x precision.

The rows are the product of three small tables: the layouts (where state lives, and the file under ds_configs/ or
fsdp_configs/ that says so to the library), the optimizers with the layouts they are sound on, and the precisions.
Add a line to a table and its rows exist, are planned, refused or explained, and are tested the same day. What a
machine, a job or this version cannot take is no matter of the catalogue but of `rules`.

`is_exact`: the mathematics of AdamW in mixed precision is unchanged. Sharding and offload move state, they never
change it; the optimizer and the precision may.
"""

from shardwise.trainer.spec.optimizers import OPTIMIZERS, Pieces
from shardwise.trainer.spec.strategy import Offload, Optimizer, Precision, Sharding, Strategy

# One file for each engine and place of state; a (sharding, offload) pair without a line needs no file.
ENGINE_CONFIGS: dict[tuple[Sharding, Offload], str] = {
    (Sharding.ZERO1, Offload.NONE): "ds_configs/zero1.json",
    (Sharding.ZERO2, Offload.NONE): "ds_configs/zero2.json",
    (Sharding.ZERO3, Offload.NONE): "ds_configs/zero3.json",
    (Sharding.FSDP_GRAD_OP, Offload.NONE): "fsdp_configs/grad_op.yaml",
    (Sharding.FSDP, Offload.NONE): "fsdp_configs/full_shard.yaml",
    (Sharding.HSDP, Offload.NONE): "fsdp_configs/hybrid.yaml",
    (Sharding.ZERO2, Offload.OPTIMIZER): "ds_configs/zero2_offload_optimizer.json",
    (Sharding.ZERO3, Offload.OPTIMIZER): "ds_configs/zero3_offload_optimizer.json",
    (Sharding.ZERO3, Offload.OPTIMIZER_PARAMS): "ds_configs/zero3_offload_all.json",
    (Sharding.FSDP, Offload.OPTIMIZER_PARAMS): "fsdp_configs/full_shard_cpu_offload.yaml",
    (Sharding.ZERO3, Offload.NVME_OPTIMIZER): "ds_configs/zero3_nvme_optimizer.json",
    (Sharding.ZERO3, Offload.NVME_ALL): "ds_configs/zero3_nvme.json",
}

# From the least machinery to the most: of two rows that are as fast, the earlier is taken.
LAYOUTS: tuple[tuple[Sharding, Offload], ...] = (
    (Sharding.NONE, Offload.NONE),
    (Sharding.DDP, Offload.NONE),
    *ENGINE_CONFIGS,
)

EXACT_OPTIMIZERS = frozenset(optimizer for optimizer, facts in OPTIMIZERS.items() if facts.is_exact)
EXACT_PRECISIONS = frozenset({Precision.FP32, Precision.FP16_MIXED, Precision.BF16_MIXED})

# From the one to prefer to the last resort; ties in speed are decided in this order.
PRECISIONS = (Precision.BF16_MIXED, Precision.FP16_MIXED, Precision.FP32, Precision.BF16, Precision.FP8)


def optimizers_of(sharding: Sharding, offload: Offload) -> tuple[Optimizer, ...]:
    """The optimizers that are sound on a layout."""
    if offload is not Offload.NONE:
        by_deepspeed = sharding.uses_deepspeed  # FSDP2's offload keeps torch's optimizers, on CPU tensors
        return tuple(
            optimizer
            for optimizer, facts in OPTIMIZERS.items()
            if (facts.updates_on_host if by_deepspeed else facts.updates_fsdp_shards_on_host)
        )
    pieces = pieces_of(sharding)
    return tuple(
        optimizer
        for optimizer, facts in OPTIMIZERS.items()
        if pieces in facts.takes and (sharding is Sharding.NONE or not facts.updates_in_backward)
    )


def pieces_of(sharding: Sharding) -> Pieces:
    """The form in which a sharding hands weights to the optimizer."""
    if sharding.uses_deepspeed:
        return Pieces.FLAT
    return Pieces.SHARDS if sharding.uses_fsdp else Pieces.WHOLE


def _row(sharding: Sharding, offload: Offload, optimizer: Optimizer, precision: Precision) -> Strategy:
    layout = sharding.value if offload is Offload.NONE else f"{sharding}+{offload}"
    return Strategy(
        name=f"{layout}/{precision}/{optimizer}",
        sharding=sharding,
        offload=offload,
        optimizer=optimizer,
        precision=precision,
        is_exact=optimizer in EXACT_OPTIMIZERS and precision in EXACT_PRECISIONS,
        base_config=ENGINE_CONFIGS.get((sharding, offload)),
    )


CATALOGUE: tuple[Strategy, ...] = tuple(
    _row(sharding, offload, optimizer, precision)
    for sharding, offload in LAYOUTS
    for precision in PRECISIONS
    for optimizer in optimizers_of(sharding, offload)
)
