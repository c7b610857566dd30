"""NF4 base weights: the bits are bitsandbytes' own, they are made while weights are read, and training keeps them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, has_avx512bf16, quantize_4bit
from bitsandbytes.nn import Linear4bit
from engine_plan_factory import TINY_LLAMA
from export_factory import TINY_GPT2, write_base
from msgspec.structs import replace
from rank_factory import rank_plan
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import quantised_layers
from shardwise.trainer.runtime.models.quantisation import (
    SLICE_ELEMENTS,
    Packing,
    is_quantisable,
    pack,
    packing_of,
    storage_type,
)
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision, Quant

CPU = torch.device("cpu")
LORA = LoraJob(rank=4, alpha=8.0)


def packing(quant: Quant = Quant.NF4_DQ, storage: torch.dtype = torch.uint8) -> Packing:
    return Packing(quant=quant, compute=torch.float32, storage=storage, works_on=CPU, lives_on=CPU)


def plan_of(folder: Path | None = None, sharding: Sharding = Sharding.NONE, **engine: Any) -> Plan:
    settings = {"num_ranks": 1 if sharding is Sharding.NONE else 2, "train": {"lora": LORA}, **engine}
    plan = rank_plan(Path("nowhere"), sharding, method=Method.QLORA, **settings)
    if folder is None:
        return plan
    config = AutoConfig.from_pretrained(folder).to_dict()
    return replace(plan, model_path=str(folder), model_config=config)


@pytest.mark.parametrize("quant", list(Quant))
@pytest.mark.parametrize("shape", [(48, 64), (33, 50), (2, 2), (1040, 1024)])
def test_a_weight_quantised_in_slices_is_bit_for_bit_what_bitsandbytes_makes_of_it(shape, quant):
    """Also where the last block of 64 is not full, and where a tensor is longer than a slice."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    assert (weight.numel() > SLICE_ELEMENTS) is (shape == (1040, 1024))
    parameter = pack(weight, Linear4bit(shape[1], shape[0], bias=False), packing(quant))
    values, state = quantize_4bit(weight, blocksize=64, compress_statistics=quant is Quant.NF4_DQ, quant_type="nf4")
    assert torch.equal(parameter.data, values) and parameter.dtype == torch.uint8
    assert torch.equal(parameter.quant_state.absmax, state.absmax)
    assert parameter.quant_state.nested is (quant is Quant.NF4_DQ)
    if quant is Quant.NF4_DQ:
        assert torch.equal(parameter.quant_state.state2.absmax, state.state2.absmax)
        assert torch.equal(parameter.quant_state.offset, state.offset)
    whole = dequantize_4bit(parameter.data, parameter.quant_state)
    assert whole.shape == weight.shape
    assert float((whole - weight).abs().mean() / weight.abs().mean()) < 0.12


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_floating_point_storage_holds_the_same_bytes(storage):
    weight = torch.randn(48, 64)
    stored = pack(weight, Linear4bit(64, 48, bias=False), packing(storage=storage))
    expected = pack(weight, Linear4bit(64, 48, bias=False), packing())
    assert stored.dtype == storage and stored.shape == (48 * 64 // 4, 1)
    assert torch.equal(stored.data.view(torch.uint8).flatten(), expected.data.flatten())
    ours, theirs = (dequantize_4bit(each.data, each.quant_state) for each in (stored, expected))
    assert torch.equal(ours, theirs)


def test_a_weight_that_is_no_whole_number_of_stored_elements_is_refused():
    with pytest.raises(InputError, match=r"shape \(1, 2\) is no whole number of torch.bfloat16 when packed; FSDP2 "):
        pack(torch.randn(1, 2), Linear4bit(2, 1, bias=False), packing(storage=torch.bfloat16))


def test_storage_is_floating_point_where_fsdp_shards_it_and_never_of_a_type_that_its_policy_would_cast():
    for precision, storage in (
        (Precision.FP32, torch.bfloat16),
        (Precision.BF16_MIXED, torch.bfloat16),
        (Precision.BF16, torch.bfloat16),
        (Precision.FP16_MIXED, torch.float16),
    ):
        assert storage_type(precision) == storage
        assert packing_of(plan_of(sharding=Sharding.FSDP, precision=precision)).storage == storage
        assert packing_of(plan_of(sharding=Sharding.DDP, precision=precision)).storage == torch.uint8


def test_zero3_is_refused_with_what_to_take_instead():
    with pytest.raises(InputError, match=r"qlora: ZeRO-3 cuts weights anywhere, .*; use fsdp or zero2"):
        build_model(plan_of(sharding=Sharding.ZERO3))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_a_base_from_a_folder_is_its_weights_quantised_and_all_else_as_it_was(base, precision):
    model: Any = build_model(plan_of(base, precision=precision))
    saved = load_file(base / "model.safetensors")
    compute = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    layers = {name: module for name, module in layers.items() if hasattr(module, "quant_state")}
    assert len(layers) == 14 and not any("lm_head" in name for name in layers)
    for name, layer in layers.items():
        weight = saved.pop(name.replace(".base_layer", "") + ".weight").to(compute)
        values, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(layer.weight.data, values)
        assert torch.equal(layer.quant_state.absmax, state.absmax)
        assert layer.compute_dtype == compute and layer.quant_state.dtype == compute
    whole = {name: value for name, value in model.state_dict().items() if name in saved}
    assert whole.keys() == saved.keys()
    assert all(torch.equal(whole[name], value.to(compute)) for name, value in saved.items())
    assert "quantization_config" not in model.config.to_dict(), "the mark that forbids an engine to cast it"
    assert getattr(model, "hf_quantizer", None) is None
    assert model.to(CPU).float().is_loaded_in_4bit is True


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_a_base_that_is_drawn_is_one_of_its_config_and_seed(changes):
    config = {**TINY_LLAMA, **changes}
    model, again = (build_model(rank_plan(Path("nowhere"), method=Method.QLORA, model_config=config)) for _ in range(2))
    full = build_model(rank_plan(Path("nowhere"), model_config=config))
    assert len(quantised_layers(model)) == 14
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert not any(parameter.is_meta for parameter in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), full.buffers(), strict=True))
    for layer in quantised_layers(model):
        assert float(dequantize_4bit(layer.weight.data, layer.quant_state).std()) == pytest.approx(0.02, rel=0.1)
        assert layer.bias is None or not layer.bias.any()
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied is bool(changes.get("tie_word_embeddings"))
    assert float(model.get_parameter("model.embed_tokens.weight").std()) == pytest.approx(0.02, rel=0.1)
    assert bool((model.model.norm.weight == 1).all())


def test_gpt2s_transposed_layers_are_quantised_the_right_way_round(tmp_path):
    weights = load_file(write_base(tmp_path, TINY_GPT2) / "model.safetensors")
    lora = LoraJob(rank=4, targets=("c_attn", "c_fc"))
    plan = replace(
        rank_plan(Path("nowhere"), method=Method.QLORA, train={"lora": lora}),
        model_path=str(tmp_path), model_config=TINY_GPT2,
    )  # fmt: skip
    for model in (build_model(plan), build_model(replace(plan, model_path=None))):
        layer = model.get_submodule("transformer.h.0.attn.c_attn.base_layer")
        assert isinstance(layer, Linear4bit) and tuple(layer.quant_state.shape) == (192, 64)
        ids = torch.arange(16).reshape(1, 16)
        model(input_ids=ids, labels=ids).backward()
    layer = build_model(plan).get_submodule("transformer.h.0.attn.c_attn.base_layer")
    assert isinstance(layer, Linear4bit)
    weight = weights["transformer.h.0.attn.c_attn.weight"].t().contiguous()
    values, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(layer.weight.data, values) and torch.equal(layer.quant_state.absmax, state.absmax)


def test_weights_that_are_quantised_already_are_refused(tmp_path):
    folder = write_base(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(folder)
    plan = replace(rank_plan(Path("nowhere"), method=Method.QLORA), model_path=str(folder))
    with pytest.raises(InputError, match=r"its weights are quantised already \(gptq\); start from the 16-bit ones$"):
        build_model(plan)


PEAK_OF_BUILDING = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, *({root!r} + "/tests/" + each for each in ("factories", "distributed"))]
from msgspec.structs import replace
from rank_factory import rank_plan
from rank_process import Peak
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.strategy import Method, Precision
from transformers import AutoConfig

config = AutoConfig.from_pretrained({folder!r}).to_dict()

def peak_of_building(method):
    plan = rank_plan(Path("nowhere"), method=method, precision=Precision.BF16_MIXED)
    build_model(plan)  # what a first time allocates
    with Peak() as peak:
        model = build_model(replace(plan, model_path={folder!r}, model_config=config))
    return max(peak.highest, peak.at_end), sum(p.numel() * p.element_size() for p in model.parameters())

# of two the lower: memory that was freed is given back with a delay
print("answer", *min(peak_of_building(Method.QLORA) for _ in range(2)), *peak_of_building(Method.LORA))
"""


def test_the_16_bit_model_is_never_whole_in_host_memory(tmp_path):
    """What is kept and a few tensors on their way; LoRA on a whole base shows what the same probe sees otherwise."""
    # 52 million weights in fp32, 104 MB in 16 bit, of which the largest tensor has 2 million
    changes = {"hidden_size": 768, "intermediate_size": 2752, "num_hidden_layers": 6, "vocab_size": 2048}
    large = write_base(tmp_path / "large", {**TINY_LLAMA, **changes})
    code = PEAK_OF_BUILDING.format(root=str(Path(__file__).parents[3]), folder=str(large))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, retained, peak_of_lora, kept_by_lora = map(int, done.stdout.split()[-4:])
    whole_bytes = sum(tensor.numel() * 2 for tensor in load_file(large / "model.safetensors").values())
    assert retained < 0.4 * whole_bytes
    assert peak < retained + 0.5 * whole_bytes  # the few tensors in flight are 35 % of this small model
    assert peak_of_lora > 0.9 * whole_bytes and kept_by_lora > whole_bytes


def logits_and_gradient(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(32).reshape(2, 16)
    model.zero_grad()
    model(input_ids=ids, labels=ids).backward()
    gradient = model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad
    assert gradient is not None
    return model(input_ids=ids).logits.detach(), gradient


def test_an_evaluation_changes_nothing_about_the_training_after_it():
    model = build_model(plan_of())
    before = logits_and_gradient(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(32).reshape(2, 16))
    model.train()
    assert all(torch.equal(one, other) for one, other in zip(before, logits_and_gradient(model), strict=True))


@pytest.mark.filterwarnings("ignore:bitsandbytes.*an autograd kernel was not registered")
@pytest.mark.skipif(not has_avx512bf16(), reason="needs a CPU with avx512_bf16")
def test_w17_bitsandbytes_turns_a_layer_to_inference_for_good_at_its_first_evaluation():
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    rows = torch.randn(4, 64)
    layer.eval()
    with torch.no_grad():
        layer(rows)
    layer.train()
    rows.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(rows).sum(), rows, allow_unused=True)
    assert gradient is None, "what lies below it is no longer trained"
    assert not layer.quant_state.nested, "and its scales are no longer in 8 bit"


def test_falcons_own_linear_layers_are_quantised_and_routers_that_are_linear_layers_are_not():
    assert all(map(is_quantisable, (nn.Linear(4, 4), Conv1D(4, 4), FalconLinear(4, 4))))
    assert issubclass(Llama4Router, nn.Linear)
    with torch.device("meta"):
        assert not is_quantisable(Llama4Router(AutoConfig.for_model("llama4_text")))
