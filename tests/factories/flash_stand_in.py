"""flash-attn as transformers has it loaded on a machine that could run it, with its functions written out in torch."""

from typing import Any

import pytest
import torch
from hub_kernel_factory import KERNEL
from torch_flash_kernel.interface import flash_attn_varlen_func
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.falcon import modeling_falcon


def load_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `name` an attention implementation that runs; rows of several documents must come with their bounds."""
    library = modeling_flash_attention_utils
    prepare = library._lazy_define_process_function(flash_attn_varlen_func)
    loaded = {"_flash_fn": _of_one_document, "_flash_varlen_fn": flash_attn_varlen_func}
    loaded |= {"_process_flash_kwargs_fn": prepare, "_process_with_kvcache_kwargs_fn": prepare}
    for attribute, value in {**loaded, "_loaded_implementation": name}.items():
        monkeypatch.setattr(library, attribute, value)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **_: name)
    monkeypatch.setattr(modeling_falcon, "_flash_attention_forward", library._flash_attention_forward, raising=False)
    AttentionInterface.register(KERNEL, flash_attention_forward)  # as transformers does when it loads a kernel
    AttentionMaskInterface.register(KERNEL, flash_attention_mask)


def _of_one_document(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("rows of several documents came as rows of one")
