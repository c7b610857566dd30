"""What was installed on a model: one typed value, made as the model is built and held by the session.

Modules keep their own forwards; the values here are the objects behind them, from which verification and the report
read what is active.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from trainer.runtime.loss.head import LossForward
from trainer.runtime.memory.activation_offload import ActivationOffload
from trainer.runtime.memory.compilation import Compilation
from trainer.runtime.memory.recomputation import Recomputation, recomputation_facts
from trainer.runtime.run.blocks import blocks_of
from trainer.spec.strategy import Fp8Recipe


class Fp8(NamedTuple):
    """The layers that multiply in FP8."""

    recipe: Fp8Recipe
    package: str
    recipe_class: str  # of the library
    layers: dict[str, nn.Module]
    skipped: str  # the layers that stay in 16 bit, by reason

    @property
    def num_products(self) -> int:
        """Forward products in FP8 so far, recomputations included."""
        return sum(int(getattr(layer, "num_products", 0)) for layer in self.layers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Everything that was put into a model beside its weights; None for what was not."""

    loss: LossForward
    recomputations: tuple[Recomputation, ...] = ()  # one for each block that recomputes something
    offload: ActivationOffload | None = None
    compilation: Compilation | None = None
    autocast: torch.dtype | None = None  # around the model's forward, by us
    fp8: Fp8 | None = None

    def activation_facts(self, model: nn.Module) -> dict[str, str]:
        """Text of the recomputation, offload and compilation that have been observed so far."""
        is_compiled = self.compilation is not None
        facts = recomputation_facts(self.recomputations, num_blocks=len(blocks_of(model)), is_compiled=is_compiled)
        facts |= {} if self.offload is None else self.offload.facts()
        return facts | ({} if self.compilation is None else self.compilation.facts(model))
