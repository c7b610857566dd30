"""FP8 recipes: what each of them is, and which linear layers it multiplies in FP8. Planner and runtime both ask here.

A layer that is too small loses: casts cost more than the faster product saves. torchao publishes the sizes (0.18.0,
float8_linear_utils.py, `_auto_filter_for_tensorwise` and `_auto_filter_for_rowwise`, from its tables for an H100: a
product of 1,024 x 2,048 x 1,024 runs at 0.80 times bf16). Transformer Engine multiplies by the same kernels of cuBLAS
and publishes none; its recipes take the sizes of one scale a tensor.
"""

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import Fp8Recipe
from shardwise.trainer.spec.value import Value, complete

Shape = tuple[int, int]
"""Inputs and outputs of a linear layer."""


class Fp8Package(StrEnum):
    """A library with FP8 layers, as the package index calls it."""

    TRANSFORMER_ENGINE = "transformer-engine"
    TORCHAO = "torchao"

    @property
    def module(self) -> str:
        """The name it is imported by."""
        return self.replace("-", "_")

    @property
    def extra(self) -> str:
        """The extra that installs it."""
        return "torchao" if self is Fp8Package.TORCHAO else "fp8"


class RecipeFacts(Value, frozen=True, kw_only=True):
    """A recipe; sizes in elements."""

    package: Fp8Package = Fp8Package.TRANSFORMER_ENGINE
    capability: tuple[int, int] = (8, 9)
    tile: int = 16  # both sizes of a weight are multiples
    token_multiple: int = 16  # so are the tokens of a micro batch, the third size of the products
    is_experimental: bool = False
    scales_rows: bool = False  # one scale a row, which kernels of small products do not pay for

    @property
    def is_compiled(self) -> bool:
        """True if blocks run under torch.compile, which fuses torchao's casts; Transformer Engine's layers cut it."""
        return self.package is Fp8Package.TORCHAO

    def gains(self, shape: Shape) -> bool:
        """True if a layer of this shape is faster in FP8, by torchao's sizes."""
        inputs, outputs = shape
        if self.scales_rows:
            return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
        return inputs > 4096 or outputs > 1024

    def fits(self, shape: Shape) -> bool:
        """True if the shape divides into tiles."""
        return all(size % self.tile == 0 for size in shape)

    def converts(self, shapes: Iterable[Shape]) -> frozenset[Shape]:
        """Those of a model's shapes that multiply in FP8: the ones that gain; where none does, all that fit.

        A planner refuses a model where none gains, and only a pin gets there.
        """
        fitting = frozenset(shape for shape in shapes if self.fits(shape))
        return frozenset(shape for shape in fitting if self.gains(shape)) or fitting


FP8_RECIPES = complete(
    Fp8Recipe,
    {
        Fp8Recipe.DELAYED: RecipeFacts(),
        Fp8Recipe.CURRENT: RecipeFacts(),
        Fp8Recipe.BLOCK: RecipeFacts(capability=(9, 0), tile=128),
        Fp8Recipe.MXFP8: RecipeFacts(capability=(10, 0), tile=32, token_multiple=32, is_experimental=True),
        Fp8Recipe.NVFP4: RecipeFacts(capability=(10, 0), tile=32, token_multiple=32, is_experimental=True),
        Fp8Recipe.TORCHAO_TENSORWISE: RecipeFacts(package=Fp8Package.TORCHAO),
        Fp8Recipe.TORCHAO_ROWWISE: RecipeFacts(package=Fp8Package.TORCHAO, capability=(9, 0), scales_rows=True),
    },
    "the FP8 recipes",
)
# Of each library the one that is tried where no recipe is pinned: no state between steps, any chip with FP8 units.
DEFAULT_RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.CURRENT)


@lru_cache(maxsize=256)
def linear_shapes(shape: ModelShape) -> frozenset[Shape]:
    """The shapes of a model's linear layers, but for experts: the number of their tokens is not known beforehand."""
    kinds = [shape.linears, shape.dense_linears] if shape.timed is None else [k.linears for k in shape.timed.kinds]
    return frozenset(
        (linear.num_inputs, linear.num_outputs) for linears in kinds for linear in linears if linear.num_copies == 1
    )


@lru_cache(maxsize=256)
def converted_shapes(shape: ModelShape, recipe: Fp8Recipe) -> frozenset[Shape]:
    """Those of `linear_shapes` that a recipe multiplies in FP8."""
    return FP8_RECIPES[recipe].converts(linear_shapes(shape))


def gains_somewhere(shape: ModelShape, recipe: Fp8Recipe) -> bool:
    """True if any layer of the model is large enough to gain."""
    facts = FP8_RECIPES[recipe]
    return any(facts.fits(each) and facts.gains(each) for each in linear_shapes(shape))
