"""Adapters reach what they train: routers only by name, no layer that is read past its forward, experts where known."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from msgspec.structs import replace
from planning_factory import plan_of
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.launch.plan.trace import traced_shape
from shardwise.trainer.planning.candidates import configuration_of
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.policy.precision_policy import adapter_elements, coverage_of, dims_of
from shardwise.trainer.runtime.models.methods import add_adapters, shortest_names, trained_parameters
from shardwise.trainer.runtime.models.quantisation import Packing, put_empty_layers
from shardwise.trainer.runtime.models.targets import default_layers, read_past_forward, routers_of
from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.simulation.nf4 import quantise
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.worker_requests import TraceRequest
from shardwise.trainer.spec.model.blocks import Component, Mode
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelShape
from shardwise.trainer.spec.strategy import Attention, Method, Precision, Quant

CPU = torch.device("cpu")
PACKING = Packing(quant=Quant.NF4_DQ, compute=torch.float32, storage=torch.uint8, works_on=CPU, lives_on=CPU)
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_BLOCK = re.compile(r".*?\.N\.")
ROUTERS = {
    "mixtral": {"mlp.gate"}, "gpt_oss": {"mlp.router"}, "qwen3_next": {"mlp.gate", "mlp.shared_expert_gate"},
    "llama4_text": {"feed_forward.router"}, "jetmoe": {"mlp.router", "self_attention.experts.router"},
    "dbrx": {"ffn.router"}, "zaya": {"mlp.gate"}, "granitemoehybrid": {"block_sparse_moe.router"},
    "nemotron_h": {"mixer.gate"}, "longcat_flash": {"mlp.router"}, "inkling_text": {"mlp.gate"},
    "recurrent_gemma": set(), "gemma3n_text": set(), "zamba": set(),
}  # fmt: skip
PAST = {
    "mamba": {"mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"}, "mamba2": {"mixer.out_proj"},
    "nemotron_h": {"mixer.out_proj"}, "granitemoehybrid": {"mamba.out_proj"}, "bamba": {"mamba.out_proj"},
    "falcon_h1": {"mamba.out_proj"}, "jamba": {"mamba.dt_proj"}, "deepseek_v4": {"self_attn.o_a_proj"},
    "llama4_text": {"feed_forward.router"}, "lfm2_moe": set(), "qwen3_next": set(), "bloom": set(), "falcon": set(),
    "gemma3n_text": {"altup.correction_coefs", "altup.prediction_coefs"},
}  # fmt: skip
COVERED = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "llama4_text", "nemotron_h", "granitemoehybrid")
PACKED = ("dbrx", "jetmoe", "longcat_flash", "qwen3_next", "zaya", "nemotron_h", "deepseek_v3")
REST = [
    pytest.param(each, marks=[pytest.mark.long, pytest.mark.products])
    for each in sorted({*ROUTERS, *PAST, *COVERED} - {*PACKED})
]
UNUSED = {"pooler", "indexer"}  # parts that run, and whose output is dropped, or only selects keys


def on_meta(model_type: str) -> PreTrainedModel:
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(zoo.config_of(model_type), dtype=torch.float32)
    assert isinstance(made, PreTrainedModel)
    return made


def in_a_block(paths: Any) -> set[str]:
    """Paths without what leads to a block."""
    return {_BLOCK.sub("", _NUMBER.sub(".N", path), count=1) for path in paths}


def adapted(model: nn.Module) -> set[str]:
    return {name.partition(".lora_B")[0] for name, _ in model.named_parameters() if ".lora_B" in name}


@pytest.mark.parametrize("model_type", ROUTERS)
def test_routers_are_found_by_their_place_and_get_no_adapter(model_type):
    model = on_meta(model_type)
    routers = routers_of(model)
    assert in_a_block(routers) == ROUTERS[model_type]
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    assert not [name for name in adapted(model) if any(name.startswith(router) for router in routers)]


@pytest.mark.parametrize("model_type", PAST)
def test_layers_whose_weight_is_read_past_their_forward_are_left_as_they_are(model_type):
    model = on_meta(model_type)
    past = read_past_forward(model)
    assert in_a_block(past) == PAST[model_type]
    assert not past.keys() & put_empty_layers(on_meta(model_type), PACKING).keys()
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    assert not past.keys() & adapted(model)


@pytest.mark.parametrize(
    ("model_type", "target", "fact"),
    [
        ("nemotron_h", "out_proj", "NemotronHMamba2Mixer reads its weight by itself, .*; remove it$"),
        ("deepseek_v32", "wk", "DeepseekV32Indexer runs without gradients; remove it$"),
        ("deepseek_v4", "o_a_proj", "does not compute as a linear layer does"),
    ],
)
def test_a_job_that_names_a_layer_without_effect_is_refused(model_type, target, fact):
    with pytest.raises(InputError, match=f"^lora.targets: {target}: an adapter has no effect on .*{fact}"):
        add_adapters(on_meta(model_type), LoraJob(targets=(target,)), Precision.FP32)


@pytest.mark.parametrize(
    ("model_type", "target"), [("qwen3_moe", "gate"), ("gpt_oss", "router"), ("dbrx", "router.layer")]
)
def test_a_router_that_a_job_names_is_trained(model_type, target):
    model = zoo.model_of(model_type)
    attention = "Wqkv" if model_type == "dbrx" else "q_proj"
    add_adapters(model, LoraJob(rank=2, targets=(attention, target)), Precision.FP32)
    of_routers = [name for name in adapted(model) if name.endswith(f".{target}")]
    assert of_routers and without_gradient(model) == set()


@pytest.mark.parametrize("model_type", [*PACKED, *REST])
def test_weights_in_4_bit_change_no_target(model_type):
    """Their packed tensors have other shapes than the layers."""
    whole, of_run, of_dry_run = (on_meta(model_type) for _ in range(3))
    put_empty_layers(of_run, PACKING._replace(quant=Quant.NF4))
    quantise(of_dry_run, Quant.NF4, torch.bfloat16)
    for packed in (of_run, of_dry_run):
        assert (routers_of(packed), default_layers(packed)) == (routers_of(whole), default_layers(whole))


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("model_type", [each for each in zoo.types() if each not in zoo.NOT_TRAINED])
def test_an_adapter_without_a_gradient_is_in_a_part_that_text_never_reaches(model_type):
    """No rule sees that before the first step: a run names such layers after the fifth (`loop/adapter_check.py`)."""
    model = zoo.model_of(model_type)
    with torch.no_grad():  # gates and scales that begin closed are open in weights to fine-tune
        for weight in model.parameters():
            weight.add_(0.1 * (~weight.any()))
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    reached: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: reached.add(name))
    missing = without_gradient(model)
    assert missing < adapted(model)
    assert not [each for each in missing if each.rpartition(".")[0] in reached and UNUSED.isdisjoint(each.split("."))]


def without_gradient(model: PreTrainedModel) -> set[str]:
    """Adapted layers whose second matrix has no gradient after a forward and a backward."""
    model.train()
    ids = torch.randint(3, 200, (2, 48), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    weights = {name: weight for name, weight in model.named_parameters() if ".lora_B" in name}
    return {
        name.partition(".lora_B")[0] for name, weight in weights.items() if weight.grad is None or not weight.grad.any()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", COVERED)
def test_the_coverage_of_a_plan_is_that_of_the_model(model_type, tmp_path):
    shape = _shape_of(model_type, tmp_path)
    plan = plan_of("tiny", "1xH100")
    configuration = replace(configuration_of(context_of(plan), plan.chosen), method=Method.QLORA, lora=LoraJob(rank=3))
    dims = dims_of(shape)
    rows = {row.component: row for row in coverage_of(configuration, dims)}
    model = on_meta(model_type)
    layers = put_empty_layers(on_meta(model_type), PACKING).values()
    num_packed = sum(layer.in_features * layer.out_features for layer in layers)
    assert sum(row.num_packed or 0 for row in rows.values()) == num_packed
    add_adapters(model, LoraJob(rank=3), Precision.FP32)
    layers_with: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    covered = sum(
        getattr(each.get_base_layer(), getattr(each, "parameter_name", "weight")).numel() for each in layers_with
    )
    assert sum(row.num_adapted for row in rows.values()) == covered
    assert rows[Component.ROUTER].num_adapted == 0 < rows[Component.EXPERTS].num_weights
    elements = sum(weight.numel() for weight in trained_parameters(model))
    own = sum(
        count * 3 * each.adapter_rank_factor * each.num_copies * (each.num_inputs + each.num_outputs)
        for count, linears in dims.kinds
        for each in linears
    )
    assert own == elements
    if shape.traced is not None:
        assert adapter_elements(configuration, dims) == elements


def _shape_of(model_type: str, cache: Path) -> ModelShape:
    """The shape as a plan has it: of a model with more than two kinds of blocks from its trace."""
    config = json.loads(zoo.config_of(model_type).to_json_string(use_diff=False))  # as a file has it
    description = DescriptionRequest(model_config=config, origin="config.json")
    if model_type != "nemotron_h":
        return describe(description)
    mode = Mode(method=Method.LORA, compute_bytes=4, is_autocast=False, attention=Attention.EAGER)
    request = TraceRequest(description=description, modes=(mode,), lora=LoraJob(rank=3), seq_len=64)
    return traced_shape(request, cache=cache)


def test_a_layer_is_named_by_the_shortest_end_that_only_it_has():
    names = ["a.attn.out_proj", "b.attn.out_proj"]
    assert shortest_names(names, [*names, "a.mamba.out_proj", "a", "a.attn"]) == ["attn.out_proj"]
    assert shortest_names(["m.ffn.0"], ["m.ffn.0", "h.0"]) == ["ffn.0"]
