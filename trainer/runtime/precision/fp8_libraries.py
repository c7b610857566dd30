"""The two libraries of FP8 matrix products: their linear layer replaces ours, around the same parameters.

Transformer Engine. The parameters stay in high precision, tied and named as before, and are quantised anew in every
product. The layer's own state (`_extra_state`: scales and their history) is never part of a state dict, so checkpoints
and exports are those of the plain model; scales are found again after a resume. Products are FP8 only while
`transformer_engine.pytorch.autocast` is open. The model's forward opens it (`fp8`), on every engine alike; a block that
is recomputed in the backward pass runs outside of that forward, so each layer opens it again if it finds it closed
while gradients are recorded. Written for Transformer Engine 2.10 to 2.20.

torchao. The layer has no state besides its parameters; scales come from the tensors of each product. Speed needs
torch.compile, which fuses the casts. A product is counted where `aten::_scaled_mm` was called; a compiled block shows
no such calls, so there the layers themselves are the proof.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Fp8Recipe

TRANSFORMER_ENGINE = "transformer_engine"
_CLASSES = {
    Fp8Recipe.DELAYED: "DelayedScaling",
    Fp8Recipe.CURRENT: "Float8CurrentScaling",
    Fp8Recipe.BLOCK: "Float8BlockScaling",
    Fp8Recipe.MXFP8: "MXFP8BlockScaling",
    Fp8Recipe.NVFP4: "NVFP4BlockScaling",
}
_QUESTIONS = {
    Fp8Recipe.DELAYED: "is_fp8_available",
    Fp8Recipe.CURRENT: "is_fp8_available",
    Fp8Recipe.BLOCK: "is_fp8_block_scaling_available",
    Fp8Recipe.MXFP8: "is_mxfp8_available",
    Fp8Recipe.NVFP4: "is_nvfp4_available",
}


class TransformerEngineRegion:
    """Where products are FP8: Transformer Engine's autocast under one recipe."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        can_run, reason = getattr(te, _QUESTIONS[recipe])(return_reason=True)
        if not can_run:
            raise InputError(f"pin.fp8_recipe: {recipe} does not run on this device: {reason}")
        self.recipe: Any = getattr(recipes, _CLASSES[recipe])()
        self.is_open = False
        self._autocast = te.autocast
        self._layer = _layer_class(te.Linear)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """FP8 inside the block; nothing changes where it is open already, so that scales are updated once a forward."""
        if self.is_open:
            yield
            return
        with self._autocast(enabled=True, recipe=self.recipe):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A layer of Transformer Engine around the parameters of `linear`."""
        made: nn.Module = self._layer(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device="meta",  # nothing is allocated or initialized: the parameters are there
        )
        made._parameters.update(linear._parameters)
        made.region = self  # type: ignore[assignment]  # no module
        return made.train(linear.training)


def _layer_class(base: Any) -> type[nn.Module]:  # noqa: ANN401  # te.Linear, of an untyped library that may be absent
    """Transformer Engine's linear layer, counting its FP8 products and without a state of its own."""

    class Fp8Linear(base):  # type: ignore[misc]
        get_extra_state = nn.Module.get_extra_state  # so that nothing is put under `_extra_state`
        set_extra_state = nn.Module.set_extra_state
        region: TransformerEngineRegion
        num_products = 0  # of forwards; each has two more in its backward

        # As the library's own forward is: a compiled block is cut around it.
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
        def forward(self, inp: Tensor) -> Tensor:
            again: AbstractContextManager[None] = self.region.opened() if torch.is_grad_enabled() else nullcontext()
            with again:
                try:
                    out: Tensor = super().forward(inp)
                finally:  # a recomputation ends with an exception inside the last layer it needs
                    self.num_products += int(self.fp8)  # what the layer itself took the autocast for
            return out

    return Fp8Linear


TORCHAO = "torchao"
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
        parent = nn.Sequential(linear)
        self._float8.convert_to_float8_training(parent, config=self.recipe)
        made: Any = parent[0].train(linear.training)
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
