"""Which attention runs: transformers' name of a planned implementation, whether it can run here, what a model runs.

transformers answers `flash_attention_2` without flash-attn in its own way: where the `kernels` package is installed it
fetches a prebuilt kernel from the hub, code that no job asked for and at whatever revision is there (W30). So a rank
looks for flash-attn itself before a model is built, and stops where the plan has it and the machine has not. It also
stops where flash-attn would compute another attention than the model's (W32).
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from torch import nn
from transformers import PreTrainedModel

from trainer.runtime.packed_attention import FLASH, PACKED_SDPA, SDPA, document_kernels
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.model_shape import ModelShape
from trainer.spec.strategy import Attention

_NAMES = {
    Attention.SDPA: SDPA,
    Attention.EAGER: "eager",
    Attention.FLASH: FLASH,
}
_LOSES_WINDOW = ("qwen2_moe",)  # model types that hand flash-attn no window (W32)


def attention_name(attention: Attention) -> str:
    """transformers' name of an attention implementation."""
    return _NAMES[attention]


def attention_of(model: PreTrainedModel) -> str:
    """transformers' name of the attention implementation that a model uses, whatever it does with packed rows."""
    name = str(model.config._attn_implementation)
    return SDPA if name == PACKED_SDPA else name


def attention_facts(model: nn.Module) -> dict[str, str]:
    """What is seen of attention after a step, in words: how documents of packed rows were kept apart."""
    kernels = document_kernels(model)
    return {"documents": f"kept apart by {' and '.join(kernels)}"} if kernels else {}


def check_attention(attention: Attention, shape: ModelShape) -> None:
    """InputError or EnvironmentFaultError where a planned implementation cannot run a model in this process."""
    if attention is not Attention.FLASH:
        return
    if shape.model_type in _LOSES_WINDOW and shape.num_sliding_layers:
        raise InputError(
            f"attention: transformers does not tell flash-attn of the windows of {shape.model_type};\n"
            "give pin.attention=sdpa"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise EnvironmentFaultError(
            "attention: the plan says flash, and flash-attn is not installed here;\n"
            "install it on every machine of the run, or give pin.attention=sdpa"
        )
    try:
        found = version("flash-attn")
    except PackageNotFoundError:  # FlashAttention-4 has the same module name
        found = "none"
    if not found.startswith("2."):
        raise EnvironmentFaultError(
            f"attention: flash is FlashAttention 2, and flash-attn {found} is installed here;\n"
            "install flash-attn 2, or give pin.attention=sdpa"
        )
