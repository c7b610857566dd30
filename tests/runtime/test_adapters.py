"""Adapters on a tiny model: what is frozen, what is trained, in which type, and that the model stays what it was."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from trainer.runtime.adapters import add_adapters, base_type, trained_parameters
from trainer.runtime.model import make_trainable, model_from_config
from trainer.spec.errors import InputError
from trainer.spec.job import LoraJob
from trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RANK = 4


def adapted(precision: Precision, lora: LoraJob | None = None, method: Method = Method.LORA) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = model_from_config(CONFIG, dtype=base_type(method, precision), attention=Attention.SDPA)
    assert isinstance(model, LlamaForCausalLM)
    add_adapters(model, lora or LoraJob(rank=RANK), precision)
    return model


@pytest.mark.parametrize(
    ("precision", "base", "adapters"),
    [
        (Precision.BF16_MIXED, torch.bfloat16, torch.float32),
        (Precision.FP16_MIXED, torch.float16, torch.float32),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
        (Precision.FP32, torch.float32, torch.float32),
    ],
)
def test_the_base_is_in_the_computing_type_and_the_adapters_in_that_of_the_masters(
    precision: Precision, base: torch.dtype, adapters: torch.dtype
) -> None:
    model = adapted(precision)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {base}
    assert {p.dtype for p in trained_parameters(model)} == {adapters}


def test_without_adapters_the_weights_are_those_that_are_trained() -> None:
    assert base_type(Method.FULL, Precision.BF16_MIXED) is torch.float32
    assert base_type(Method.GALORE, Precision.BF16) is torch.bfloat16


@pytest.mark.parametrize(
    ("targets", "widths"),
    [
        (("all-linear",), [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]),
        (("q_proj", "down_proj"), [(32, 32), (48, 32)]),
    ],
)
def test_each_named_linear_layer_gets_two_matrices(targets: tuple[str, ...], widths: list[tuple[int, int]]) -> None:
    model = adapted(Precision.FP32, LoraJob(rank=RANK, targets=targets))
    num_trained = sum(p.numel() for p in trained_parameters(model))
    assert num_trained == 2 * sum(RANK * (inputs + outputs) for inputs, outputs in widths)


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"lora\.targets: no_such_proj: "):
        adapted(Precision.FP32, LoraJob(targets=("no_such_proj",)))


def test_a_fresh_adapter_changes_nothing_and_learns() -> None:
    """The model keeps its class, so that the loss head finds its parts, and only adapters get gradients."""
    ids = torch.arange(16).reshape(1, 16)
    losses = []
    for has_adapters in (False, True):
        torch.manual_seed(0)
        model = model_from_config(CONFIG, dtype=torch.float32, attention=Attention.SDPA)
        if has_adapters:
            add_adapters(model, LoraJob(rank=RANK), Precision.FP32)
        make_trainable(model, Checkpointing.FULL, LossHead.CHUNKED, loss_chunk_tokens=8)
        losses.append(model(input_ids=ids, labels=ids))
    assert torch.equal(*(loss.detach() for loss in losses))
    losses[1].backward()
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.grad is not None} == {"default"}
    assert all(p.grad is not None for p in trained_parameters(model))
