"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a model, by PEFT.

The base is frozen, in the computing type of the precision; the adapters are trained in fp32, or in the precision's
own type where that has no fp32 copy (bf16). PEFT's layers are put into the model in place: it stays the
transformers model that it was, so the loss head, the engines and checkpoints find it unchanged.

`rslora` divides alpha by the root of the rank (arXiv:2312.03732), `dora` trains the length of each row of a weight
beside its direction (arXiv:2402.09353). A target is the end of a layer's name, as PEFT reads it: `q_proj`, or
`layers.3.mlp.up_proj`. Every target must name a linear layer of the model, and none may be its head, whose weight the
loss reads by itself.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.runtime.run.types import compute_type, weight_type
from trainer.spec.errors import InputError
from trainer.spec.job.sections import LoraJob
from trainer.spec.strategy import Method, Precision

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # PEFT's name for the only one
TRANSPOSED = frozenset({"gpt2", "openai-gpt"})  # model types whose linear layers keep their weights so (Conv1D)
_ADAPTER_PART = ".lora_"
_SHOWN = 8  # names in a message


def base_type(method: Method, precision: Precision) -> torch.dtype:
    """The type in which a method holds the weights of the model itself."""
    return compute_type(precision) if method.freezes_base else weight_type(precision)


def add_adapters(model: PreTrainedModel, lora: LoraJob, precision: Precision) -> None:
    """Freezes the model and puts trainable adapters beside the linear layers that `lora` names.

    InputError where a target names no linear layer, or the head.
    """
    from peft import inject_adapter_in_model  # takes seconds

    _check_targets(model, lora.targets)
    targets = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    config = peft_config(lora, targets=targets, is_transposed=_is_transposed(model))
    try:
        with warnings.catch_warnings():
            # PEFT warns of each Conv1D or linear layer for which fan_in_fan_out is the other way round, and sets it.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise InputError(f"lora.targets: {', '.join(lora.targets)}: {str(error).splitlines()[0]}") from error
    for parameter in trained_parameters(model):
        parameter.data = parameter.data.to(weight_type(precision))


def peft_config(
    lora: LoraJob,
    *,
    targets: str | Iterable[str],
    is_transposed: bool = False,
    base: str | None = None,
    revision: str | None = None,
) -> Any:  # noqa: ANN401  # PEFT's LoraConfig, whose import takes seconds
    """PEFT's description of the adapters; `base` is the name that it records of the model they belong to."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
    )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapters were put into it, for the block; for a forward without gradients.

    PEFT's own switch would also turn the gradients of the adapters off and on, which engines have taken note of.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def seed_adapters(seed: int) -> None:
    """Seeds torch's generators for new adapters: they do not depend on how the base came to be."""
    digest = hashlib.sha256(f"{seed}/adapters".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_adapted(names: Iterable[str]) -> bool:
    """Whether parameters of these names belong to a model with adapters."""
    return any(_ADAPTER_PART in name for name in names)


def adapted_layers(lora: LoraJob, names: Iterable[str]) -> list[str]:
    """What PEFT is to be told to adapt again, from the names of the adapters' parameters."""
    if lora.targets != (ALL_LINEAR,):
        return list(lora.targets)
    layers = (name.partition(_ADAPTER_PART)[0] for name in names)
    return sorted({layer.rsplit(".", 1)[-1] for layer in layers})


def peft_key(name: str) -> str:
    """The key in PEFT's file of a parameter: without the adapter's name, and of DoRA's lengths without `weight`."""
    key = name.replace(f".{ADAPTER}", "")
    return f"base_model.model.{key.removesuffix('.weight') if 'lora_magnitude_vector' in key else key}"


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    if targets == (ALL_LINEAR,):
        return
    if ALL_LINEAR in targets:
        raise InputError(f"lora.targets: {ALL_LINEAR} stands alone; leave out the names beside it")
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    for target in targets:
        named = [module for name, module in linears.items() if name == target or name.endswith(f".{target}")]
        if not named:
            kinds = dict.fromkeys(name.rsplit(".", 1)[-1] for name, module in linears.items() if module is not head)
            known = ", ".join([*kinds][:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
            raise InputError(
                f"lora.targets: {target}: {type(model).__name__} has no linear layer of that name; it has {known}"
            )
        if any(module is head for module in named):
            raise InputError(f"lora.targets: {target}: is the head, which has no adapter here; leave it out")


def _is_transposed(model: PreTrainedModel) -> bool:
    """Whether the model keeps its weights the other way round, as GPT-2 does."""
    return any(isinstance(module, Conv1D) for module in model.modules())
