"""Keeps DeepSpeed from reading a weight twice at once from NVMe, at which it stops the run (W34).

It reads ahead what the recorded order of use names next. Where a weight stands there twice, as the head does at the end
of a forward and again at the start of its backward, it asks for two buffers for the one weight and fails.
"""

from collections.abc import Sequence
from typing import Any


def read_each_weight_once() -> None:
    """Leaves out the second mention of a weight in every read from here on, for all engines of this process."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    swapper: Any = partitioned_param_swapper.AsyncPartitionedParameterSwapper  # untyped
    read = swapper.swap_in
    if hasattr(read, "reads_once"):
        return

    def swap_in(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        read(self, list(dict.fromkeys(params)), *args, **kwargs)

    swap_in.reads_once = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    swapper.swap_in = swap_in
