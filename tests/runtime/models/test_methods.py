"""What each method makes of a model: what is trained, in which type, what is recomputed; adapters on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import rank_plan
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from shardwise.trainer.runtime.models import methods
from shardwise.trainer.runtime.models.build import build_model, make_trainable, model_from_config
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

NUM_BASE = 106_816
LORA = LoraJob(rank=4, alpha=8.0)
IDS = torch.arange(32).reshape(2, 16)


def plan_of(method: Method, *, folder: Path | None = None, lora: LoraJob = LORA, **engine: Any) -> Plan:
    plan = rank_plan(Path("nowhere"), method=method, train={"lora": lora}, **engine)
    return replace(plan, model_path=None if folder is None else str(folder))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_under_full_and_galore_every_weight_is_trained():
    for method in (Method.FULL, Method.GALORE):
        model = build_model(plan_of(method))
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert methods.method_facts(model) == {"trained parameters": "106,816 of 106,816 (100 %)"}


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_are_the_same_whatever_lies_beneath_them(method, base):
    initialized, loaded = build_model(plan_of(method)), build_model(plan_of(method, folder=base))
    ours, theirs = adapters(initialized), adapters(loaded)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first, second = (next(model.get_input_embeddings().parameters()) for model in (initialized, loaded))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize(
    ("precision", "computes", "trained"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.BF16_MIXED, torch.bfloat16, torch.float32),
        (Precision.FP16_MIXED, torch.float16, torch.float32),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_embeddings_head_and_norms_stay_in_the_computing_type(method, precision, computes, trained, base):
    """What is called preparation for k-bit training elsewhere would make them fp32."""
    for path in (None, base):
        model = build_model(plan_of(method, folder=path, precision=precision))
        packed = {id(layer.weight) for layer in methods.quantised_layers(model)}
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in packed]
        assert {parameter.dtype for parameter in frozen} == {computes}
        assert {parameter.dtype for parameter in adapters(model).values()} == {trained}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.get_output_embeddings().weight.dtype == computes
        assert bool(packed) is (method is Method.QLORA)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize("dora", [False, True])
def test_checkpointing_stays_on_and_changes_no_gradient(method, dora):
    """A frozen embedding makes an input without gradient, for which reentrant checkpointing would skip the block."""
    gradients = []
    for checkpointing, expected in ((Checkpointing.NONE, 1), (Checkpointing.FULL, 2)):
        lora = LoraJob(rank=4, alpha=8.0, dora=dora, dropout=0.1)
        model = build_model(plan_of(method, lora=lora, checkpointing=checkpointing))
        forwards: list[int] = []
        layer = model.model.layers[0].self_attn.q_proj.base_layer
        layer.register_forward_hook(lambda *_, noted=forwards: noted.append(1))
        torch.manual_seed(1)
        model(input_ids=IDS, labels=IDS).backward()
        assert len(forwards) == expected
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradients[0][name] is not None for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_report_says_what_is_trained_on_what():
    facts = methods.method_facts(build_model(plan_of(Method.QLORA, precision=Precision.BF16_MIXED)))
    assert facts == {
        "trained parameters": f"8,192 of {NUM_BASE + 8192:,} (7.12 %)",
        "adapters": "float32, on 14 layers",
        "base": "bfloat16",
        "4-bit layers": "14 of nf4, scales quantised too, stored as uint8, computed in bfloat16",
    }
    assert "4-bit layers" not in methods.method_facts(build_model(plan_of(Method.LORA)))


RANK = 4


def adapted(precision: Precision, lora: LoraJob | None = None, method: Method = Method.LORA) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = model_from_config(TINY_LLAMA, dtype=methods.base_type(method, precision), attention=Attention.SDPA)
    assert isinstance(model, LlamaForCausalLM)
    methods.add_adapters(model, lora or LoraJob(rank=RANK), precision)
    return model


@pytest.mark.parametrize(
    ("targets", "widths"),
    [
        (("all-linear",), [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]),
        (("q_proj", "down_proj"), [(64, 64), (128, 64)]),
    ],
)
def test_each_named_linear_layer_gets_two_matrices(targets: tuple[str, ...], widths: list[tuple[int, int]]) -> None:
    model = adapted(Precision.FP32, LoraJob(rank=RANK, targets=targets))
    num_trained = sum(p.numel() for p in methods.trained_parameters(model))
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
    rows = torch.randn(3, 64)
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
    rows = torch.randn(3, 64)
    torch.testing.assert_close(layer(rows), layer.base_layer(rows))
    with torch.no_grad():
        lengths.mul_(2)
    torch.testing.assert_close(layer(rows), 2 * layer.base_layer(rows))
    num_rows = sum(p.numel() for name, p in model.named_parameters() if "magnitude" in name)
    assert num_rows == 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)


def test_a_fresh_adapter_changes_nothing_and_learns() -> None:
    """The model keeps its class, so that the loss head finds its parts, and only adapters get gradients."""
    ids = torch.arange(16).reshape(1, 16)
    losses = []
    for has_adapters in (False, True):
        torch.manual_seed(0)
        model = model_from_config(TINY_LLAMA, dtype=torch.float32, attention=Attention.SDPA)
        if has_adapters:
            methods.add_adapters(model, LoraJob(rank=RANK), Precision.FP32)
        make_trainable(model, Checkpointing.FULL, LossHead.CHUNKED, loss_chunk_tokens=8)
        losses.append(model(input_ids=ids, labels=ids))
    assert torch.equal(*(loss.detach() for loss in losses))
    losses[1].backward()
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.grad is not None} == {"default"}
    assert all(p.grad is not None for p in methods.trained_parameters(model))


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16},
}


@pytest.mark.parametrize("model_type", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_multiplied_in_groups(model_type: str, dtype: torch.dtype) -> None:
    """Sorted tokens and grouped matrix products, however many experts there are."""
    config = {**TINY_LLAMA, "model_type": model_type, "num_experts_per_tok": 2, **MIXTURES[model_type]}
    model = model_from_config(config, dtype=dtype, attention=Attention.SDPA)
    make_trainable(model, Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    ids = torch.arange(16)[None]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(input_ids=ids, labels=ids).backward()
    products = (
        2 * 3 * TINY_LLAMA["num_hidden_layers"]
    )  # two matrices an expert: forward, and the gradients of both factors
    assert sum(each.count for each in profiler.key_averages() if each.key == "aten::_grouped_mm") == products


def test_a_model_whose_loss_is_another_is_not_trained() -> None:
    plan = plan_of(Method.FULL)
    shape = replace(plan.model_shape, model_type="granite", loss_obstacle="its logits are divided")
    with pytest.raises(InputError, match=r"^granite cannot be trained: its logits are divided$"):
        build_model(replace(plan, model_shape=shape))
