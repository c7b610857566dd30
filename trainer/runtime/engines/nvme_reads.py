"""Three repairs of how DeepSpeed uses NVMe: one keeps it from stopping the run, two from training wrong.

It reads weights ahead that the recorded order of use names next. Where a weight stands there twice, as the head does at
the end of a forward and again at the start of its backward, it asks for two buffers for the one weight and fails (W34).

It reads a gradient from its file straight to where it belongs in the buffer of a sub-group. Where that place is no
multiple of the disk's blocks, as behind a weight of odd size, nothing is read and nothing is said: the weight is
updated by what the buffer held before (W52).

It takes weights for 16 bit wide on a device that cannot compute in fp16, whatever they are: those of fp32 would be kept
in buffers of bf16 (W55).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


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


def swap_weights_in_their_type() -> None:
    """Has the buffers of weights made in the type that the engine asks for, from here on."""
    from deepspeed.runtime.zero.partition_parameters import Init

    choose = Init._set_dtype
    if hasattr(choose, "takes_what_is_asked"):
        return

    def set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        choose(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    set_dtype.takes_what_is_asked = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    Init._set_dtype = set_dtype


def swap_gradients_between_blocks() -> None:
    """Keeps what stands before the first whole block of a gradient in memory, from here on, as its end is already."""
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    swapper: Any = OptimizerSwapper  # untyped
    adjust = swapper._adjust_for_misaligned_lengths
    if hasattr(adjust, "cuts_heads"):
        return

    def adjusted(self: Any, tensors: Sequence[Any], offsets: Sequence[int]) -> Any:  # noqa: ANN401  # DeepSpeed's own
        parts = [part for each in zip(tensors, offsets, strict=True) for part in _cut_head(*each, self.numel_alignment)]
        return adjust(self, [tensor for tensor, _ in parts], [offset for _, offset in parts])

    adjusted.cuts_heads = True  # type: ignore[attr-defined]  # a mark, so that it is wrapped once
    swapper._adjust_for_misaligned_lengths = adjusted


def _cut_head(tensor: Tensor, offset: int, alignment: int) -> list[tuple[Tensor, int]]:
    """A flat tensor that is to lie at `offset`, cut at the first multiple of `alignment` in it."""
    head = min(-offset % alignment, tensor.numel())
    parts = [(tensor[:head], offset), (tensor[head:], offset + head)]
    return [(part, place) for part, place in parts if part.numel()]
