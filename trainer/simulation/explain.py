"""A dry run as lines of text: bytes of every event, and what was alive at the peak."""

from collections.abc import Iterator

from shardwise.trainer.spec.messages.simulation import Simulation


def explain(simulation: Simulation) -> Iterator[str]:
    """Lines; bytes in full, because they are compared with other bytes."""
    yield f"peak      {simulation.peak_allocated_bytes:>16,} at {simulation.peak_event}"
    yield f"steady    {simulation.steady_allocated_bytes:>16,}"
    yield f"reserved  {simulation.peak_reserved_bytes:>16,}, expandable {simulation.expandable_reserved_bytes:,}"
    yield f"capacity  {simulation.min_capacity_bytes:>16,} at least"
    yield f"{simulation.num_parameters:,} parameters, {simulation.num_trained_parameters:,} trained"
    yield "events"
    for event, num_bytes in simulation.events.items():
        yield f"  {num_bytes:>16,}  {event}"
    yield "parts at the peak"
    for part, num_bytes in simulation.parts.items():
        yield f"  {num_bytes:>16,}  {part}"
    yield "alive at the peak: bytes, tensors, kind, module, operation"
    for group in simulation.live:
        yield (
            f"  {group.num_bytes:>16,}  {group.num_tensors:>5}  {group.kind:<16}  "
            f"{group.module or '-'}  {group.operation}"
        )
    yield from (f"checked: {check}" for check in simulation.checks)
