"""What adapters and 4-bit storage cover of a model with experts or state layers, and whether its experts are balanced.

Models of attention and feed-forward layers alone need no such lines: everything linear is covered.
"""

from collections.abc import Iterator

from shardwise.trainer.spec.model.blocks import Component
from shardwise.trainer.spec.plan import Coverage, Plan
from shardwise.trainer.spec.units import format_count

_USUAL = {Component.ATTENTION, Component.FEED_FORWARD}
_LARGE = 0.25  # of the weights of all linear layers


def coverage_lines(plan: Plan) -> Iterator[str]:
    """Sentences for the whole plan, in numbers of weights; none for a model without experts and state layers."""
    rows = plan.coverage
    if rows and not {row.component for row in rows} <= _USUAL:
        yield f"adapters cover {_shares(rows, tuple(row.num_adapted for row in rows))}"
        packed = tuple(row.num_packed for row in rows)
        if None not in packed:
            yield f"4-bit storage covers {_shares(rows, tuple(each or 0 for each in packed))}; the rest is in 16 bit"
    if plan.model_shape.has_router_loss:
        coefficient = plan.job.train.router_aux_loss
        yield (
            "the loss that balances experts is not added; train.router_aux_loss adds it, which changes the training"
            if coefficient is None
            else f"the loss that balances experts is added, times {coefficient:g} (train.router_aux_loss)"
        )


def coverage_gap(plan: Plan) -> str | None:
    """The large parts that adapters or 4-bit storage do not cover, for the first screen; None where there are none."""
    rows = plan.coverage
    if {row.component for row in rows} <= _USUAL:
        return None
    least = _LARGE * sum(row.num_weights for row in rows)
    bare = [row for row in rows if row.num_weights - row.num_adapted >= least]
    whole = [row for row in rows if row.num_packed is not None and row.num_weights - row.num_packed >= least]
    parts = [
        f"no {what} on {' and '.join(f'{row.component} ({format_count(row.num_weights)} weights)' for row in left)}"
        for what, left in (("adapters", bare), ("4-bit storage", whole))
        if left
    ]
    return "; ".join(parts) or None


def _shares(rows: tuple[Coverage, ...], covered: tuple[int, ...]) -> str:
    """`attention 1.2M of 1.2M, experts 0 of 28.9B weights`."""
    each = (
        f"{row.component} {format_count(num)} of {format_count(row.num_weights)}"
        for row, num in zip(rows, covered, strict=True)
    )
    return f"{', '.join(each)} weights"
