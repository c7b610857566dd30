"""What each method makes of a model: what is trained, in which type, what is recomputed; adapters on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import rank_plan
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.models.build import build_model, make_trainable, model_from_config
from shardwise.trainer.runtime.models.methods import (
    add_adapters,
    base_type,
    method_facts,
    quantised_layers,
    trained_parameters,
)
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

NUM_BASE = 106_816
LORA = LoraJob(rank=4, alpha=8.0)


def plan_of(method: Method, *, folder: Path | None = None, lora: LoraJob = LORA, **engine: Any) -> Plan:
    plan = rank_plan(Path("nowhere"), method=method, train={"lora": lora}, **engine)
    return replace(plan, model_path=None if folder is None else str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights that were not initialized with the plan's seed."""
    torch.manual_seed(123)
    config = AutoConfig.for_model(**{**TINY_LLAMA, "max_position_embeddings": 48})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path_factory.mktemp("base"))
    return tmp_path_factory.getbasetemp() / "base0"


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_under_full_and_galore_every_weight_is_trained():
    for method in (Method.FULL, Method.GALORE):
        model = build_model(plan_of(method))
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert method_facts(model) == {"trained parameters": "106,816 of 106,816 (100 %)"}


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_are_the_same_whatever_lies_beneath_them(method, folder):
    initialized, loaded = build_model(plan_of(method)), build_model(plan_of(method, folder=folder))
    ours, theirs = adapters(initialized), adapters(loaded)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first, second = (next(model.get_input_embeddings().parameters()) for model in (initialized, loaded))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize(
    ("precision", "base", "trained"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.BF16_MIXED, torch.bfloat16, torch.float32),
        (Precision.FP16_MIXED, torch.float16, torch.float32),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_embeddings_head_and_norms_stay_in_the_computing_type(method, precision, base, trained, folder):
    """What is called preparation for k-bit training elsewhere would make them fp32."""
    for path in (None, folder):
        model = build_model(plan_of(method, folder=path, precision=precision))
        packed = {id(layer.weight) for layer in quantised_layers(model)}
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in packed]
        assert {parameter.dtype for parameter in frozen} == {base}
        assert {parameter.dtype for parameter in adapters(model).values()} == {trained}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.get_output_embeddings().weight.dtype == base
        assert bool(packed) is (method is Method.QLORA)


def forwards_of_a_block(model: PreTrainedModel) -> int:
    """How often the first linear layer of a block runs in one forward and backward."""
    calls = []
    model.model.layers[0].self_attn.q_proj.base_layer.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(32).reshape(2, 16)
    model(input_ids=ids, labels=ids).backward()
    return len(calls)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize("dora", [False, True])
def test_checkpointing_stays_on_and_changes_no_gradient(method, dora):
    """A frozen embedding makes an input without gradient, for which reentrant checkpointing would skip the block."""
    gradients = []
    for checkpointing, expected in ((Checkpointing.NONE, 1), (Checkpointing.FULL, 2)):
        lora = LoraJob(rank=4, alpha=8.0, dora=dora, dropout=0.1)
        model = build_model(plan_of(method, lora=lora, checkpointing=checkpointing))
        torch.manual_seed(1)
        assert forwards_of_a_block(model) == expected
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradients[0][name] is not None for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_report_says_what_is_trained_on_what():
    facts = method_facts(build_model(plan_of(Method.QLORA, precision=Precision.BF16_MIXED)))
    assert facts == {
        "trained parameters": f"8,192 of {NUM_BASE + 8192:,} (7.12 %)",
        "adapters": "float32, on 14 layers",
        "base": "bfloat16",
        "4-bit layers": "14 of nf4, scales quantised too, stored as uint8, computed in bfloat16",
    }
    assert "4-bit layers" not in method_facts(build_model(plan_of(Method.LORA)))


CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
RANK = 4


def adapted(precision: Precision, lora: LoraJob | None = None, method: Method = Method.LORA) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = model_from_config(CONFIG, dtype=base_type(method, precision), attention=Attention.SDPA)
    assert isinstance(model, LlamaForCausalLM)
    add_adapters(model, lora or LoraJob(rank=RANK), precision)
    return model


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
