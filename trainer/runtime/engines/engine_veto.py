"""A say in the update that DeepSpeed makes within its last backward pass, before it is made.

Its ZeRO optimizers compute the norm of all gradients over all ranks, then clip and update. Where the norm is no number
they throw the gradients away instead and leave weights, moments and step counts as they are (DeepSpeed 0.19.8, `step`
in runtime/zero/stage_1_and_2.py and stage3.py). So whoever answers in the place of that norm decides. A step that is
thrown away so is no overflow of fp16: the loss scale stays.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def asked_before_update(engine: Any, takes: Callable[[Tensor], bool]) -> Iterator[None]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """While the block runs, the engine asks `takes` with the gradient norm, and throws the gradients away at False.

    Every rank asks, once the gradients are summed, with the same norm: infinity for what is no number. An fp16 step
    that overflows is thrown away without a question.
    """
    zero = engine.optimizer
    own = _Question(zero, takes).attributes()
    before = {name: vars(zero)[name] for name in own if name in vars(zero)}
    vars(zero).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(zero)[name]
        vars(zero).update(before)


class _Question:
    """Replacements for methods of a ZeRO optimizer."""

    def __init__(self, zero: Any, takes: Callable[[Tensor], bool]) -> None:  # noqa: ANN401  # untyped
        self._zero = zero
        self._takes = takes
        self._is_refused = False
        self._update_scale = zero._update_scale
        self._norm = zero._get_norm_groups if _is_zero3(zero) else zero.scaled_global_norm

    def attributes(self) -> dict[str, Any]:
        """Attributes of the optimizer, in the place of those of its class."""
        own: dict[str, Any] = {"_update_scale": self.update_scale}
        if _is_zero3(self._zero):
            return own | {"_get_norm_groups": self.norm_groups}
        own |= {"scaled_global_norm": self.norm, "check_grad_overflow": True}  # else bf16 believes in any norm
        if self._zero.dtype != torch.float16:
            own["check_overflow"] = _no_check  # a look at every gradient; the norm tells as much
        return own

    def norm(self, norm_type: int = 2) -> Tensor:
        """Of all gradients, for ZeRO-1 and -2."""
        return self._answer(self._norm(norm_type))

    def norm_groups(self) -> list[Tensor]:
        """One norm of all gradients, in the place of those of ZeRO-3's sub-groups, which it combines."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return [self._answer(combine_grad_norm_groups(self._norm()))]

    def update_scale(self, has_overflow: bool = False) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
        """Moves the loss scale on; for it, a step that was refused did not overflow."""
        self._update_scale(has_overflow and not self._is_refused)

    def _answer(self, scaled_norm: Tensor) -> Tensor:
        self._is_refused = not self._takes(scaled_norm / self._zero.loss_scale)
        return torch.full_like(scaled_norm, torch.inf) if self._is_refused else scaled_norm


def _is_zero3(zero: Any) -> bool:  # noqa: ANN401  # untyped
    return hasattr(zero, "_get_norm_groups")


def _no_check(partition_gradients: bool = True) -> None:  # noqa: FBT001, FBT002  # DeepSpeed's signature
    """Finds nothing."""
