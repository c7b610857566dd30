"""Adapters on a tiny model: what is frozen, what is trained, in which type, and that the model stays what it was."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from shardwise.trainer.runtime.models.build import make_trainable, model_from_config
from shardwise.trainer.runtime.models.methods import add_adapters, base_type, trained_parameters
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

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


@pytest.mark.parametrize(
    ("targets", "fact"),
    [
        (("no_such_proj",), "no_such_proj: .*q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj$"),
        (("q_proj", "no_such_proj"), "no_such_proj: "),
        (("embed_tokens",), "embed_tokens: "),
        (("layers.2.mlp.up_proj",), r"layers\.2\.mlp\.up_proj: "),
        (("proj",), "proj: "),
        (("lm_head", "q_proj"), "lm_head: "),
        (("q_proj", "all-linear"), "all-linear "),
    ],
)
def test_targets_that_name_no_linear_layer_are_refused(targets: tuple[str, ...], fact: str) -> None:
    with pytest.raises(InputError, match=f"^lora.targets: {fact}") as error:
        adapted(Precision.FP32, LoraJob(targets=targets))
    assert "\n" not in str(error.value)


def test_the_end_of_a_name_picks_one_layer() -> None:
    model = adapted(Precision.FP32, LoraJob(rank=RANK, targets=("layers.1.mlp.up_proj",)))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {f"model.layers.1.mlp.up_proj.lora_{each}.default.weight" for each in "AB"}


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 8.0 / RANK), (True, 8.0 / RANK**0.5)])
def test_alpha_is_divided_by_the_rank_or_its_root(rslora: bool, scaling: float) -> None:
    layer: Any = adapted(Precision.FP32, LoraJob(rank=RANK, alpha=8.0, rslora=rslora)).model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == scaling
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    rows = torch.randn(3, 32)
    added = layer(rows) - layer.base_layer(rows)
    expected = scaling * (rows @ layer.lora_A["default"].weight.T).sum(-1, keepdim=True)
    torch.testing.assert_close(added, expected.expand_as(added))


def test_dora_trains_the_length_of_each_row_beside_its_direction() -> None:
    """At the start the lengths are those of the base's rows, so that nothing changes (arXiv:2402.09353, section 4)."""
    model = adapted(Precision.FP32, LoraJob(rank=RANK, dora=True))
    layer: Any = model.model.layers[0].mlp.up_proj
    lengths = layer.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(lengths, layer.base_layer.weight.norm(dim=1))
    assert lengths.requires_grad and lengths.dtype == torch.float32
    rows = torch.randn(3, 32)
    torch.testing.assert_close(layer(rows), layer.base_layer(rows))
    with torch.no_grad():
        lengths.mul_(2)
    torch.testing.assert_close(layer(rows), 2 * layer.base_layer(rows))
    num_rows = sum(p.numel() for name, p in model.named_parameters() if "magnitude" in name)
    assert num_rows == 2 * (32 + 16 + 16 + 32 + 48 + 48 + 32)


def test_dropout_is_on_the_adapters_input_and_only_in_training() -> None:
    layer: Any = adapted(Precision.FP32, LoraJob(rank=RANK, dropout=0.5)).model.layers[0].mlp.up_proj
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    rows = torch.randn(3, 32)
    layer.train()
    assert not torch.equal(layer(rows), layer(rows))
    layer.eval()
    assert torch.equal(layer(rows), layer(rows))


def test_layers_that_keep_their_weights_transposed_are_adapted_the_right_way_round() -> None:
    """GPT-2's; PEFT would warn of each, and warnings are errors here."""
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = AutoModelForCausalLM.from_config(config)
    add_adapters(model, LoraJob(rank=RANK, targets=("c_attn", "c_fc")), Precision.FP32)
    shapes = {name.split(".")[-4]: tuple(p.shape) for name, p in model.named_parameters() if "lora_B" in name}
    assert shapes == {"c_attn": (96, RANK), "c_fc": (128, RANK)}
    ids = torch.arange(8).reshape(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in trained_parameters(model))


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
