"""Choice of attention: transformers' name of a planned implementation, a check that it can run here, the active one.

Flash is flash-attn's own kernel, or, where flash-attn is missing and the job allows it, a prebuilt one of the hub at
the commit that the job names (`flash_kernel`).

transformers resolves `flash_attention_2` without flash-attn in its own way: if the `kernels` package is installed it
fetches a kernel from the hub, code that no job requested, at the revision that is there (W30). So a rank looks for
flash-attn itself before a model is built, and stops where the plan has it and the machine has not. It also stops where
flash-attn would compute another attention than the model's (W32).
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.flash_kernel import is_hub_kernel, load_flash_kernel, loaded_build
from shardwise.trainer.runtime.attention.packed import FLASH, SDPA, document_kernels
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import Attention

_NAMES = {
    Attention.SDPA: SDPA,
    Attention.EAGER: "eager",
    Attention.FLASH: FLASH,
}
_LOSES_WINDOW = ("qwen2_moe",)  # model types that hand flash-attn no window (W32)


def attention_name(attention: Attention, flash_kernel: str | None = None) -> str:
    """transformers' name of an attention implementation; of flash by a kernel of the hub, that kernel's."""
    return flash_kernel if flash_kernel is not None and attention is Attention.FLASH else _NAMES[attention]


def attention_of(model: PreTrainedModel) -> str:
    """transformers' name of the attention implementation of a model; of a kernel of the hub, what was loaded by it."""
    name = str(model.config._attn_implementation)
    return loaded_build(name).kernel if is_hub_kernel(name) else name


def attention_facts(model: PreTrainedModel) -> dict[str, str]:
    """Text of the observed attention after a step: how documents were separated, which build of a kernel ran."""
    kernels, name = document_kernels(model), str(model.config._attn_implementation)
    facts = {"documents": f"separated by {' and '.join(kernels)}"} if kernels else {}
    return facts | ({"flash": f"build {loaded_build(name).variant}"} if is_hub_kernel(name) else {})


def check_attention(attention: Attention, shape: ModelShape, flash_kernel: str | None = None) -> None:
    """InputError or EnvironmentFaultError where a planned implementation cannot run a model in this process.

    A kernel of the hub is loaded: only then is it known to run here.
    """
    if attention is not Attention.FLASH:
        return
    if shape.model_type in _LOSES_WINDOW and shape.num_sliding_layers:
        raise InputError(
            f"attention: transformers does not pass flash-attn the windows of {shape.model_type};\n"
            "give pin.attention=sdpa"
        )
    if flash_kernel is not None:
        load_flash_kernel(flash_kernel)
        return
    if importlib.util.find_spec("flash_attn") is None:
        raise EnvironmentFaultError(
            "attention: the plan has flash, and flash-attn is not installed here;\n"
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
