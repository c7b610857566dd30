"""FP8 matrix products by torchao: its float8 layer in the place of ours, scales found from the tensors at hand.

The layer holds the same parameters under the same names, in high precision, and has no state besides. Speed needs
torch.compile, which fuses the casts. A product is counted where `aten::_scaled_mm` was called; a compiled block has
no such calls to see, so there the layers themselves are the proof.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.spec.strategy import Fp8Recipe

PACKAGE = "torchao"
_NAMES = {Fp8Recipe.TORCHAO_TENSORWISE: "tensorwise", Fp8Recipe.TORCHAO_ROWWISE: "rowwise"}


class TorchaoRegion:
    """Float8 layers need no surroundings: their products are FP8 wherever they run."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self._float8: Any = import_module("torchao.float8")
        self.recipe: Any = self._float8.Float8LinearConfig.from_recipe_name(_NAMES[recipe])

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A float8 layer around the parameters of `linear`."""
        holder = nn.Sequential(linear)
        self._float8.convert_to_float8_training(holder, config=self.recipe)
        made: Any = holder[0].train(linear.training)
        made.num_products = 0
        made.forward = MethodType(_counted_forward, made)
        assert isinstance(made, nn.Module)
        return made


class _ScaledProducts(TorchDispatchMode):
    """Counts FP8 matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # torchao's tensor turns it into calls on plain ones, which come by here again
        self.count += func is torch.ops.aten._scaled_mm.default
        return func(*args, **(kwargs or {}))


def _counted_forward(self: Any, inp: Tensor) -> Tensor:  # noqa: ANN401  # Float8Linear, of a library that may be absent
    """The layer's own forward; the first one is watched, the others are taken to be like it."""
    if torch.compiler.is_compiling():
        return _own_forward(self, inp)
    if self.num_products:
        self.num_products += 1
        return _own_forward(self, inp)
    with _ScaledProducts() as products:
        out = _own_forward(self, inp)
    self.num_products = products.count
    return out


def _own_forward(layer: Any, inp: Tensor) -> Tensor:  # noqa: ANN401  # as above
    out = type(layer).forward(layer, inp)
    assert isinstance(out, Tensor)
    return out
