"""Optimizers whose saved state means the same: a run that one of them began, another may go on with."""

from trainer.spec.strategy import Optimizer

_SAME_STATE = (
    frozenset({Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.DEEPSPEED_CPU_ADAM, Optimizer.PAGED_ADAMW}),
    frozenset({Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT}),
)


def have_same_state(one: Optimizer, other: Optimizer) -> bool:
    """Whether the two keep the same moments in the same bits, and update by the same rule."""
    return one is other or any({one, other} <= each for each in _SAME_STATE)
