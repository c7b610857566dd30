"""Packed rows under flash-attn, as far as its own functions."""

from typing import Any

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from hub_kernel_factory import KERNEL
from torch_flash_kernel.interface import flash_attn_varlen_func
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.falcon import modeling_falcon

from shardwise.trainer.runtime.attention.packed import FLASH
from shardwise.trainer.runtime.loss import IGNORED, install_loss_head
from shardwise.trainer.spec.strategy import LossHead

WIDTH = 48
LENGTHS = ((20, 1, 27), (3, 30, 15))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
CHANGED = [(0, slice(0, 20)), (1, slice(3, 33))]
UNCHANGED = [(0, slice(20, 48)), (1, slice(0, 3)), (1, slice(33, 48))]
UNDER_FLASH = {name: fields for name, fields in {**TINY, **VARIANTS}.items() if name in TINY and name != "mpt"}


@pytest.fixture
def flash_attn(request, monkeypatch) -> str:
    """The name by which transformers has flash-attn's functions loaded, as on a machine that could run them.

    Rows of several documents must come with their bounds.
    """
    name: str = request.param
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
    return name


def _of_one_document(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("rows of several documents came as rows of one")


def build(fields: dict[str, Any], implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    named = {name: value for name, value in fields.items() if name != "model_type"}
    built = AutoConfig.for_model(fields["model_type"], **named)
    model = AutoModelForCausalLM.from_config(built, attn_implementation=implementation)
    model.config.use_cache = False
    return model


def token_losses(model: PreTrainedModel, ids: torch.Tensor, places: list[tuple[int, slice]]) -> torch.Tensor:
    """The sum of the losses of some documents, from a forward of all."""
    labels = torch.full_like(ids, IGNORED)
    for row, part in places:
        labels[row, part] = ids[row, part]
    labels[POSITIONS == 0] = IGNORED
    return model(input_ids=ids, labels=labels, position_ids=POSITIONS)


# The two names lead to one function of transformers: one of them is tried with every model type.
@pytest.mark.parametrize(
    ("flash_attn", "name"), [*((FLASH, name) for name in UNDER_FLASH), (KERNEL, "mistral")], indirect=["flash_attn"]
)
def test_flash_attn_is_told_the_documents_of_every_row(flash_attn, name):
    """Whatever the model hands on: another document changes no loss, and its own loss is that of eager attention."""
    ids = torch.randint(3, 200, (2, WIDTH), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    for row, part in CHANGED:
        other[row, part] = torch.randint(3, 200, (part.stop - part.start,))
    # transformers looks for a Linear to tell the type that fp32 is cast to, and GPT-2 has none in its attention.
    dtype = torch.float64 if name == "gpt2" else torch.float32
    model = build(UNDER_FLASH[name], flash_attn).eval().to(dtype)
    install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
    with torch.no_grad():
        before, after = (token_losses(model, tokens, UNCHANGED) for tokens in (ids, other))
        assert not torch.equal(token_losses(model, ids, CHANGED), token_losses(model, other, CHANGED))
    assert torch.equal(before, after)
    eager = build(UNDER_FLASH[name], "eager").eval().to(dtype)
    install_loss_head(eager, LossHead.EAGER, chunk_tokens=None)
    with torch.no_grad():
        torch.testing.assert_close(before, token_losses(eager, ids, UNCHANGED), rtol=1e-5, atol=0)


@pytest.mark.parametrize("flash_attn", [FLASH], indirect=True)
def test_w32_qwen2_moe_does_not_hand_its_window_to_flash_attn(flash_attn, monkeypatch):
    """A canary: where flash-attn gets the windows, `check_attention` need not refuse them."""
    fields = VARIANTS["qwen2_moe with windows"]
    ids = torch.randint(3, 200, (1, WIDTH), generator=torch.Generator().manual_seed(1))
    windows: list[int | None] = []
    model = build(fields, flash_attn).eval()

    def note(q, k, v, window_size=None, **_):
        windows.append(window_size)
        return q

    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_fn", note)
    with torch.no_grad():
        model(input_ids=ids)
    assert len(windows) == 3
    assert set(windows) == {None}
