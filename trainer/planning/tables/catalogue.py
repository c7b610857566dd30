"""Every strategy as a row: sharding x offload x optimizer x precision.

The rows are the product of three tables: the layouts that engines have (`spec.engines`), the optimizers that are sound
on a layout (`spec.optimizers`), and the precisions. What a machine, a job or a library excludes is a matter of `rules`.

`is_exact`: the mathematics of AdamW in mixed precision is unchanged. Sharding and offload move state, they never
change it; the optimizer and the precision may.
"""

from shardwise.trainer.spec.engines import ENGINES, Offload, Sharding
from shardwise.trainer.spec.optimizers import OPTIMIZERS, Optimizer
from shardwise.trainer.spec.strategy import Precision, Strategy

# From the least machinery to the most: of two rows that are as fast, the earlier is taken.
LAYOUTS: tuple[tuple[Sharding, Offload], ...] = tuple(
    (sharding, offload) for offload in Offload for sharding, facts in ENGINES.items() if offload in facts.layouts
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
    engine = sharding.facts
    return tuple(
        optimizer
        for optimizer, facts in OPTIMIZERS.items()
        if engine.pieces in facts.accepts and (engine.updates_in_backward or not facts.updates_in_backward)
    )


def _row(sharding: Sharding, offload: Offload, optimizer: Optimizer, precision: Precision) -> Strategy:
    layout = sharding.value if offload is Offload.NONE else f"{sharding}+{offload}"
    return Strategy(
        name=f"{layout}/{precision}/{optimizer}",
        sharding=sharding,
        offload=offload,
        optimizer=optimizer,
        precision=precision,
        is_exact=optimizer in EXACT_OPTIMIZERS and precision in EXACT_PRECISIONS,
        base_config=sharding.facts.base_configs.get(offload),
    )


CATALOGUE: tuple[Strategy, ...] = tuple(
    _row(sharding, offload, optimizer, precision)
    for sharding, offload in LAYOUTS
    for optimizers in (optimizers_of(sharding, offload),)
    for precision in PRECISIONS
    for optimizer in optimizers
)
