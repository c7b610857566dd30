"""GaLore (arXiv:2403.03507) through galore-torch: moments of a projected gradient, `rank` instead of the smaller side.

Every `update_gap` steps each matrix of the blocks gets a new projector from a singular value decomposition of its
gradient; in between, the gradient is projected, the optimizer updates in the small space, and the update is projected
back and scaled. Embeddings, head, norms and biases are updated in full, at the same rate. A matrix whose smaller side
is no larger than the rank is turned rather than reduced, and keeps as much state as AdamW, and the projector.

`projection` selects the reduced side: the smaller one (std), the larger one (reverse_std), always the columns (right)
or the rows (left), or both (full). Projectors are decomposed in fp32 and stored in the type of the gradient.

What differs from galore-torch's defaults: betas and epsilon are ours; Adafactor uses the learning rate as it is, not
relative to the weights (as in the authors' runs, so that one rate serves all three); the 8-bit optimizer's positional
arguments are given so that they mean what they did when it was written (docs/workarounds.md, W13).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.optimizers.rules import BETAS, EPSILON, MATRICES, Group, matrix_groups
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer

PROJECTIONS = ("std", "reverse_std", "right", "left", "full")


def build_galore(
    inner: Optimizer, model: nn.Module, *, lr: float, weight_decay: float, galore: GaloreJob
) -> TorchOptimizer:
    """The optimizer `inner` over projected matrices and whole other parameters; InputError where it cannot be."""
    build = _BUILDERS.get(inner)
    if build is None:
        raise InputError(f"inside GaLore runs {', '.join(_BUILDERS)}, not {inner}")
    _keep_projectors_only()
    groups = matrix_groups(model, weight_decay=weight_decay)
    matrices = next(group for group in groups if group["name"] == MATRICES)
    _check_projection(galore, matrices["params"])
    matrices |= {
        "rank": galore.rank,
        "update_proj_gap": galore.update_gap,
        "scale": galore.scale,
        "proj_type": galore.projection,
    }
    return build(groups, lr)


def _keep_projectors_only() -> None:
    """Makes projectors matrices of their own: of fp32 gradients they are views of all singular vectors (W36).

    Row after row, as a checkpoint brings them back: products with a matrix laid out otherwise round otherwise.
    """
    from galore_torch.galore_projector import GaLoreProjector

    decompose = GaLoreProjector.get_orthogonal_matrix
    if hasattr(decompose, "__wrapped__"):
        return

    @wraps(decompose)
    def of_rank(*args: Any, **kwargs: Any) -> Tensor | list[Tensor]:  # noqa: ANN401  # what galore-torch hands it
        found = decompose(*args, **kwargs)
        matrices = [
            matrix.clone(memory_format=torch.contiguous_format)
            for matrix in (found if isinstance(found, list) else [found])
        ]
        return matrices if isinstance(found, list) else matrices[0]

    GaLoreProjector.get_orthogonal_matrix = of_rank


def galore_class_name(inner: Optimizer) -> str:
    """The class inside galore-torch; torch and bitsandbytes have classes of the same names."""
    return {Optimizer.ADAMW: "AdamW", Optimizer.ADAMW_8BIT: "AdamW8bit", Optimizer.ADAFACTOR: "Adafactor"}[inner]


def _check_projection(galore: GaloreJob, matrices: list[nn.Parameter]) -> None:
    if galore.projection not in PROJECTIONS:
        raise InputError(
            f"train.galore.projection: {galore.projection} is not one of galore-torch's: {', '.join(PROJECTIONS)}"
        )
    if not matrices:
        raise InputError("train.method: galore finds no matrix inside the blocks that is trained; use full")
    wide = [p.shape[0] for p in matrices if p.shape[0] < p.shape[1]]
    if galore.projection == "reverse_std" and wide and galore.rank >= min(wide):
        raise InputError(
            f"train.galore.rank: {galore.rank} must be below {min(wide)}, the smaller side of a matrix, under "
            f"projection: reverse_std, which galore-torch does not project back otherwise; use std or a smaller rank"
        )


def _adamw(groups: list[Group], lr: float) -> TorchOptimizer:
    from galore_torch import GaLoreAdamW

    built = GaLoreAdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, no_deprecation_warning=True)
    assert isinstance(built, TorchOptimizer)
    return built


def _adamw_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    if not torch.cuda.is_available():
        raise InputError(
            "GaLore's adamw_8bit waits for a CUDA device after every update (galore-torch 1.0), and there is none; "
            "use adamw or adafactor inside GaLore"
        )
    from galore_torch import GaLoreAdamW8bit

    # They stand where bitsandbytes now has max_unorm and skip_zeros; the kernels are block-wise in any case.
    built = GaLoreAdamW8bit(groups, lr=lr, betas=BETAS, eps=EPSILON, percentile_clipping=0, block_wise=False)
    if built.args.max_unorm or built.args.skip_zeros:
        raise EnvironmentFaultError(
            "galore-torch and bitsandbytes no longer agree on their arguments: the 8-bit update would be another one"
        )
    assert isinstance(built, TorchOptimizer)
    return built


def _adafactor(groups: list[Group], lr: float) -> TorchOptimizer:
    from galore_torch import GaLoreAdafactor

    built = GaLoreAdafactor(groups, lr=lr, scale_parameter=False, relative_step=False, warmup_init=False)
    assert isinstance(built, TorchOptimizer)
    return built


_BUILDERS: dict[Optimizer, Callable[[list[Group], float], TorchOptimizer]] = {
    Optimizer.ADAMW: _adamw,
    Optimizer.ADAMW_8BIT: _adamw_8bit,
    Optimizer.ADAFACTOR: _adafactor,
}
