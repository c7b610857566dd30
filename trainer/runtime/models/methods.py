"""What a method makes of a model that was built or loaded: all weights trained, adapters on a frozen base, noise.

GaLore changes the optimizer, not the model. QLoRA's base is quantised while it is read (`quantisation`), so here it
is LoRA. Nothing is upcast afterwards: PEFT's preparation for k-bit training would turn norms, embeddings and head to
fp32 and switch checkpointing to the reentrant kind; non-reentrant checkpointing needs no input that requires grad.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.runtime.models.neftune import add_noise, noise_facts
from trainer.spec.plan import Plan


def apply_method(model: PreTrainedModel, plan: Plan) -> None:
    """Freezes, adapts and hooks the model as the plan's method and job say; before loss head and checkpointing."""
    train = plan.job.train
    if plan.chosen.method.freezes_base:
        from trainer.runtime.models.adapters import add_adapters, seed_adapters  # PEFT, which takes seconds to import

        seed_adapters(train.seed)
        add_adapters(model, train.lora, plan.chosen.strategy.precision)
    if train.neftune_alpha is not None:
        add_noise(model, train.neftune_alpha)


def method_facts(model: nn.Module) -> dict[str, str]:
    """What is seen of the method, in words: trained share, adapters, types of the base."""
    assert isinstance(model, PreTrainedModel)
    layers = quantised_layers(model)
    packed = {id(layer.weight) for layer in layers}
    plain = [parameter for parameter in model.parameters() if id(parameter) not in packed]
    trained, frozen = ([p for p in plain if p.requires_grad is is_trained] for is_trained in (True, False))
    num_trained = sum(map(_num_elements, trained))
    num_all = sum(map(_num_elements, plain)) + sum(math.prod(layer.quant_state.shape) for layer in layers)
    share = f"{num_trained:,} of {num_all:,} ({100 * num_trained / num_all:.3g} %)"
    facts = {"trained parameters": share, **noise_facts(model)}
    if frozen or layers:
        facts["adapters"] = f"{_types(trained)}, on {_num_adapted(model)} layers"
        facts["base"] = _types(frozen)
    if layers:
        facts["4-bit layers"] = _quantisation(layers)
    return facts


def quantised_layers(model: nn.Module) -> list[Any]:
    """bitsandbytes' layers in the model; known by their module, as the library takes seconds to import."""
    return [module for module in model.modules() if type(module).__module__.startswith("bitsandbytes.")]


def _num_elements(parameter: nn.Parameter) -> int:
    """Elements over all ranks, also of one that ZeRO-3 has cut."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _num_adapted(model: nn.Module) -> int:
    return sum(hasattr(module, "lora_A") for module in model.modules())


def _types(parameters: Iterable[torch.Tensor]) -> str:
    """`fp32`, or both where there are two."""
    return " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))


def _quantisation(layers: list[Any]) -> str:
    """`14 of nf4, scales quantised too, stored as uint8, computed in bfloat16`."""
    kinds = {
        (
            layer.quant_state.quant_type,
            "scales quantised too" if layer.quant_state.nested else "scales in fp32",
            f"stored as {str(layer.weight.dtype).removeprefix('torch.')}",
            f"computed in {str(layer.compute_dtype).removeprefix('torch.')}",
        )
        for layer in layers
    }
    return f"{len(layers)} of " + " and ".join(", ".join(kind) for kind in sorted(kinds))
