"""Every optimizer as a row: how it is built over its groups, and the class that must come out.

Where each is from, and why that one:

    adamw, adamw_fused, sgd   torch; foreach and fused kernels of the same update
    deepspeed_cpu_adam        DeepSpeed's, built here with `adamw_mode` on: Accelerate's own replacement of an optimizer
                              under offload would silently turn it off (docs/workarounds.md, W5)
    *_8bit, paged_*           bitsandbytes: moments in blocks of 256 elements with an fp32 scale each, tensors below
                              4,096 elements in fp32. Paged state lies in CUDA managed memory, which the driver moves to
                              host RAM when the device is full; on a CPU it is ordinary memory. Plain tensors only,
                              except for adamw_8bit
    adamw_8bit, lamb_8bit     the first also on FSDP2's shards; LAMB is ours on bitsandbytes' moments (`eight_bit`)
    ademamix_8bit             bitsandbytes' (arXiv:2409.03137): AdamW plus alpha times a second, slow mean of gradients.
                              Betas and alpha are bitsandbytes' defaults, constant from the first step; the authors
                              raise alpha and the slow beta over the whole run
    lion                      lion-pytorch: plain tensor operations, so that it runs on FSDP2's shards, where
                              bitsandbytes' Lion does not. Betas as its authors train language models
                              (arXiv:2302.06675, section 5)
    adafactor                 transformers': factors and update are always fp32, the decay is scaled as
                              the update is, and the schedule of the rate is ours. torch.optim.Adafactor keeps factors
                              in the weights' type, where 16 bit lose shares of t^-0.8 within a thousand steps, decays
                              by the rate that is not yet scaled, and caps the rate at 1/sqrt(t)
    muon                      torch's for the matrices of the blocks, with AdamW (`MuonAndAdamW`)
    lomo, adalomo             ours, always inside the backward pass (`in_backward`)

bitsandbytes and galore-torch are imported on request only: that takes seconds.

Groups: weight decay applies to matrices (two or more dimensions); norms and biases have none. A matrix of a block is
what Muon orthogonalises and what GaLore projects: every trained weight of two dimensions, except embedding tables and
the head, whose rows are tokens. Weights of experts that lie in one tensor of three dimensions are none: neither rule is
defined for them here.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.models.methods import trained_parameters
from shardwise.trainer.runtime.optimizers.in_backward import AdaLomo, Lomo
from shardwise.trainer.runtime.run.operators import read_processor_from_proc, use_built_operators
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.value import complete

BETAS = (0.9, 0.95)  # Llama-type training (Llama 2, arXiv:2307.09288, section 2.2)
LION_BETAS = (0.95, 0.98)
ADEMAMIX_BETAS, ADEMAMIX_ALPHA = (0.9, 0.999, 0.9999), 5.0
EPSILON = 1e-8

DECAY, NO_DECAY = "decay", "no_decay"
MATRICES = "matrices"  # of the blocks, updated by a rule of their own
WITH_MATRICES = (MATRICES, DECAY, NO_DECAY)
MUON_MOMENTUM = 0.95  # Muon's author's, and torch's default

Group = dict[str, Any]  # as torch keeps them


class UpdateRule(NamedTuple):
    """Builder of an optimizer, and the names of its groups, in order."""

    build: Callable[[list[Group], float], TorchOptimizer]
    class_name: str
    groups: tuple[str, ...] = (DECAY, NO_DECAY)


def _adamw(groups: list[Group], lr: float) -> TorchOptimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, foreach=True)


def _adamw_fused(groups: list[Group], lr: float) -> TorchOptimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)


def _sgd(groups: list[Group], lr: float) -> TorchOptimizer:
    return torch.optim.SGD(groups, lr=lr)


def _deepspeed_cpu_adam(groups: list[Group], lr: float) -> TorchOptimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    read_processor_from_proc()
    use_built_operators()
    is_fp32 = all(parameter.dtype is torch.float32 for group in groups for parameter in group["params"])
    built = DeepSpeedCPUAdam(
        groups, lr=lr, betas=BETAS, eps=EPSILON, adamw_mode=True, fp32_optimizer_states=is_fp32
    )  # fmt: skip
    return _as_torch(built)


def _adamw_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    from shardwise.trainer.runtime.optimizers.eight_bit import AdamW8bit

    return _as_torch(AdamW8bit(groups, lr=lr, betas=BETAS, eps=EPSILON))


def _paged_adamw(groups: list[Group], lr: float) -> TorchOptimizer:
    from bitsandbytes.optim import PagedAdamW32bit

    return _paged(PagedAdamW32bit(groups, lr=lr, betas=BETAS, eps=EPSILON))


def _paged_adamw_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    from bitsandbytes.optim import PagedAdamW8bit

    return _paged(PagedAdamW8bit(groups, lr=lr, betas=BETAS, eps=EPSILON))


def _lion(groups: list[Group], lr: float) -> TorchOptimizer:
    from lion_pytorch import Lion

    return _as_torch(Lion(groups, lr=lr, betas=LION_BETAS))


def _lion_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    from bitsandbytes.optim import Lion8bit

    return _as_torch(Lion8bit(groups, lr=lr, betas=LION_BETAS))


def _lamb_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    from shardwise.trainer.runtime.optimizers.eight_bit import Lamb8bit

    return _as_torch(Lamb8bit(groups, lr=lr, betas=BETAS, eps=EPSILON))


def _ademamix_8bit(groups: list[Group], lr: float) -> TorchOptimizer:
    from bitsandbytes.optim import AdEMAMix8bit

    return _as_torch(AdEMAMix8bit(groups, lr=lr, betas=ADEMAMIX_BETAS, alpha=ADEMAMIX_ALPHA, eps=EPSILON))


def _adafactor(groups: list[Group], lr: float) -> TorchOptimizer:
    from transformers.optimization import Adafactor

    return _as_torch(Adafactor(groups, lr=lr, scale_parameter=True, relative_step=False, warmup_init=False))


def _muon(groups: list[Group], lr: float) -> TorchOptimizer:
    return MuonAndAdamW(groups, lr, betas=BETAS, eps=EPSILON)


def _paged(built: object) -> TorchOptimizer:
    """Without bitsandbytes' warning on CPUs: the facts of a run report that nothing is paged there."""
    built.__dict__["_cpu_paged_warned"] = True
    return _as_torch(built)


def _as_torch(built: object) -> TorchOptimizer:
    """For libraries that are published without type information."""
    assert isinstance(built, TorchOptimizer)
    return built


UPDATE_RULES: dict[Optimizer, UpdateRule] = complete(
    Optimizer,
    {
        Optimizer.ADAMW: UpdateRule(_adamw, "AdamW"),
        Optimizer.ADAMW_FUSED: UpdateRule(_adamw_fused, "AdamW"),
        Optimizer.ADAMW_8BIT: UpdateRule(_adamw_8bit, "AdamW8bit"),
        Optimizer.PAGED_ADAMW: UpdateRule(_paged_adamw, "PagedAdamW32bit"),
        Optimizer.PAGED_ADAMW_8BIT: UpdateRule(_paged_adamw_8bit, "PagedAdamW8bit"),
        Optimizer.LION: UpdateRule(_lion, "Lion"),
        Optimizer.LION_8BIT: UpdateRule(_lion_8bit, "Lion8bit"),
        Optimizer.LAMB_8BIT: UpdateRule(_lamb_8bit, "Lamb8bit"),
        Optimizer.ADEMAMIX_8BIT: UpdateRule(_ademamix_8bit, "AdEMAMix8bit"),
        Optimizer.ADAFACTOR: UpdateRule(_adafactor, "Adafactor"),
        Optimizer.MUON: UpdateRule(_muon, "MuonAndAdamW", WITH_MATRICES),
        Optimizer.LOMO: UpdateRule(Lomo, "Lomo"),
        Optimizer.ADALOMO: UpdateRule(AdaLomo, "AdaLomo"),
        Optimizer.SGD: UpdateRule(_sgd, "SGD"),
        Optimizer.DEEPSPEED_CPU_ADAM: UpdateRule(_deepspeed_cpu_adam, "DeepSpeedCPUAdam"),
    },
    "UPDATE_RULES",
)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[Group]:
    """Two groups, `decay` and `no_decay`, of the parameters that are trained."""
    return _by_decay(trained_parameters(model), weight_decay)


def matrix_groups(model: nn.Module, *, weight_decay: float) -> list[Group]:
    """Three groups: `matrices` of the blocks, which decay, then `decay` and `no_decay` of everything else."""
    matrices = block_matrices(model)
    of_matrices = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in trained_parameters(model) if id(parameter) not in of_matrices]
    return [{"params": matrices, "weight_decay": weight_decay, "name": MATRICES}, *_by_decay(others, weight_decay)]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of two dimensions that are neither an embedding table nor the head."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]  # transformers' models have it
    if head is not None:
        tables.add(id(head.weight))
    return [parameter for parameter in trained_parameters(model) if parameter.ndim == 2 and id(parameter) not in tables]


def _by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": weight_decay, "name": DECAY},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0, "name": NO_DECAY},
    ]


class MuonAndAdamW(TorchOptimizer):
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases: one state, one list of groups.

    torch's Muon orthogonalises the momentum of a matrix by five Newton-Schulz steps. It is defined for matrices inside
    the network (https://kellerjordan.github.io/posts/muon/). With `match_rms_adamw` an m x n update is scaled by
    0.2 sqrt(max(m, n)), so that its root mean square is AdamW's and both rules share one learning rate and one weight
    decay (arXiv:2502.16982, section 2.2).
    """

    def __init__(self, groups: list[Group], lr: float, *, betas: tuple[float, float], eps: float) -> None:
        matrices = [group for group in groups if group["name"] == MATRICES]
        others = [group for group in groups if group["name"] != MATRICES]
        self._muon = torch.optim.Muon(matrices, lr=lr, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, foreach=True)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every group by its own rule."""
        assert closure is None, "gradients are complete when a step is taken"
        for group in self.param_groups:  # read anew: loading a state replaces them, an update in backward shows one
            rule = self._muon if group["name"] == MATRICES else self._adamw
            rule.param_groups, rule.state = [group], self.state
            rule.step()  # type: ignore[no-untyped-call]  # torch.optim.Muon has no annotations
        return None
