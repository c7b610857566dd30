"""Patches of DeepSpeed's ZeRO: a decision before its update, and three repairs of how it uses NVMe.

Its optimizers compute the norm of all gradients over all ranks within the last backward pass, then clip and update.
Where the norm is no number they discard the gradients instead and keep weights, moments and step counts (DeepSpeed
0.19.8, `step` in runtime/zero/stage_1_and_2.py and stage3.py). So a replaced norm decides about the step. A step that
is refused so is no overflow of fp16: the loss scale stays.

On NVMe, one repair keeps DeepSpeed from stopping the run, two from training wrong:

    W34  it reads weights ahead that the recorded order of use names next. A weight that stands there twice, as the head
         does at the end of a forward and at the start of its backward, gets two buffers, and the read fails
    W52  it reads a gradient from its file straight into the buffer of a sub-group. Where that place is no multiple of
         the disk's blocks, as behind a weight of odd size, nothing is read, and the update uses what was there before
    W55  on a device that cannot compute in fp16 it keeps weights of any type in 16-bit buffers
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def decide_before_update(engine: Any, accepts: Callable[[Tensor], bool]) -> Iterator[None]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """While the block runs, the engine calls `accepts` with the gradient norm and discards the gradients if it is
    False.

    Every rank calls it with the same norm, once the gradients are summed: infinity for what is no number. An fp16 step
    that overflows is discarded without a call.
    """
    zero = engine.optimizer
    own = _Decision(zero, accepts).attributes()
    before = {name: vars(zero)[name] for name in own if name in vars(zero)}
    vars(zero).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(zero)[name]
        vars(zero).update(before)


class _Decision:
    """Replacements for methods of a ZeRO optimizer."""

    def __init__(self, zero: Any, accepts: Callable[[Tensor], bool]) -> None:  # noqa: ANN401  # untyped
        self._zero = zero
        self._accepts = accepts
        self._is_refused = False
        self._update_scale = zero._update_scale
        self._norm = zero._get_norm_groups if _is_zero3(zero) else zero.scaled_global_norm

    def attributes(self) -> dict[str, Any]:
        """Attributes that replace those of the optimizer's class."""
        own: dict[str, Any] = {"_update_scale": self.update_scale}
        if _is_zero3(self._zero):
            return own | {"_get_norm_groups": self.norm_groups}
        own |= {"scaled_global_norm": self.norm, "check_grad_overflow": True}  # else bf16 does not check the norm
        if self._zero.dtype != torch.float16:
            own["check_overflow"] = _no_check  # it reads every gradient; the norm suffices
        return own

    def norm(self, norm_type: int = 2) -> Tensor:
        """Norm of all gradients, for ZeRO-1 and -2."""
        return self._decided(self._norm(norm_type))

    def norm_groups(self) -> list[Tensor]:
        """One norm of all gradients, instead of those of ZeRO-3's sub-groups, which it combines."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return [self._decided(combine_grad_norm_groups(self._norm()))]

    def update_scale(self, has_overflow: bool = False) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
        """Moves the loss scale on; for it, a step that was refused did not overflow."""
        self._update_scale(has_overflow and not self._is_refused)

    def _decided(self, scaled_norm: Tensor) -> Tensor:
        self._is_refused = not self._accepts(scaled_norm / self._zero.loss_scale)
        return torch.full_like(scaled_norm, torch.inf) if self._is_refused else scaled_norm


def _is_zero3(zero: Any) -> bool:  # noqa: ANN401  # untyped
    return hasattr(zero, "_get_norm_groups")


def _no_check(partition_gradients: bool = True) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
    """Finds nothing."""


def read_each_weight_once() -> None:
    """Skips the second occurrence of a weight in every read, for all engines of this process."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper

    swapper: Any = partitioned_param_swapper.AsyncPartitionedParameterSwapper  # untyped
    read = swapper.swap_in
    if hasattr(read, "reads_once"):
        return

    def swap_in(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        read(self, list(dict.fromkeys(params)), *args, **kwargs)

    swap_in.reads_once = True  # type: ignore[attr-defined]  # so that it is wrapped once
    swapper.swap_in = swap_in


def swap_weights_in_their_type() -> None:
    """From here on, buffers of weights are allocated in the type that the engine requests."""
    from deepspeed.runtime.zero.partition_parameters import Init

    choose = Init._set_dtype
    if hasattr(choose, "keeps_requested_type"):
        return

    def set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:  # noqa: ANN401  # DeepSpeed's own signature
        choose(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    set_dtype.keeps_requested_type = True  # type: ignore[attr-defined]  # so that it is wrapped once
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

    adjusted.cuts_heads = True  # type: ignore[attr-defined]  # so that it is wrapped once
    swapper._adjust_for_misaligned_lengths = adjusted


def _cut_head(tensor: Tensor, offset: int, alignment: int) -> list[tuple[Tensor, int]]:
    """A flat tensor that is to lie at `offset`, cut at the first multiple of `alignment` in it."""
    head = min(-offset % alignment, tensor.numel())
    parts = [(tensor[:head], offset), (tensor[head:], offset + head)]
    return [(part, place) for part, place in parts if part.numel()]
