"""NF4 base weights: the bits are bitsandbytes' own, they are made while weights are read, and training keeps them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, has_avx512bf16, quantize_4bit
from bitsandbytes.nn import Linear4bit
from engine_plan_factory import TINY_LLAMA
from export_factory import TINY_GPT2, write_base
from msgspec.structs import replace
from programs import printed_by
from rank_factory import rank_plan
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.loop.step import seed_dropout
from shardwise.trainer.runtime.models import methods, quantisation
from shardwise.trainer.runtime.models.build import build_model, make_trainable, model_from_config
from shardwise.trainer.runtime.models.methods import add_noise, lengths, noise_facts, quantised_layers
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision, Quant

CPU = torch.device("cpu")
LORA = LoraJob(rank=4, alpha=8.0)
IDS = torch.arange(32).reshape(2, 16)


def packing(quant: Quant = Quant.NF4_DQ, storage: torch.dtype = torch.uint8) -> quantisation.Packing:
    return quantisation.Packing(quant=quant, compute=torch.float32, storage=storage, works_on=CPU, lives_on=CPU)


def plan_of(method: Method = Method.QLORA, folder: Path | None = None, *, lora: LoraJob = LORA, **engine: Any) -> Plan:
    plan = rank_plan(Path("nowhere"), method=method, train={"lora": lora}, **engine)
    return replace(plan, model_path=folder and str(folder))


@pytest.mark.parametrize("quant", list(Quant))
@pytest.mark.parametrize("shape", [(48, 64), (33, 50), (2, 2), (1040, 1024)])
def test_a_weight_quantised_in_slices_is_bit_for_bit_what_bitsandbytes_makes_of_it(shape, quant):
    """Also where the last block of 64 is not full, and where a tensor is longer than a slice."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    assert (weight.numel() > quantisation.SLICE_ELEMENTS) is (shape == (1040, 1024))
    parameter = quantisation.pack(weight, Linear4bit(shape[1], shape[0], bias=False), packing(quant))
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


def test_a_table_that_stays_in_host_ram_never_goes_to_the_gpu():
    model, elsewhere = build_model(plan_of()), torch.device("meta")
    table, norm = model.get_input_embeddings().weight, next(iter(model.get_submodule("model.norm").parameters()))
    assert isinstance(table, Tensor)
    for is_on_host in (True, False):
        place = packing()._replace(lives_on=elsewhere, table_on_host=is_on_host)
        assert place.home_of(table, model) == (CPU if is_on_host else elsewhere)
        assert place.home_of(norm, model) == elsewhere


def test_what_cannot_be_packed_is_refused_with_what_to_take_instead():
    with pytest.raises(InputError, match=r"shape \(1, 2\) is no whole number of torch.bfloat16 when packed; FSDP2 "):
        quantisation.pack(torch.randn(1, 2), Linear4bit(2, 1, bias=False), packing(storage=torch.bfloat16))
    with pytest.raises(InputError, match=r"qlora: ZeRO-3 cuts weights anywhere, .*; use fsdp or zero2"):
        build_model(plan_of(sharding=Sharding.ZERO3, num_ranks=2))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MIXED])
def test_a_base_from_a_folder_is_its_weights_quantised_and_all_else_as_it_was(base, precision):
    model: Any = build_model(plan_of(folder=base, precision=precision))
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
    model, again = (build_model(plan_of(model_config=config)) for _ in range(2))
    full = build_model(plan_of(Method.FULL, model_config=config))
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
    plan = replace(plan_of(folder=tmp_path, lora=LoraJob(rank=4, targets=("c_attn", "c_fc"))), model_config=TINY_GPT2)
    for each in (replace(plan, model_path=None), plan):
        model = build_model(each)
        layer: Any = model.get_submodule("transformer.h.0.attn.c_attn.base_layer")
        assert isinstance(layer, Linear4bit) and tuple(layer.quant_state.shape) == (192, 64)
        model(input_ids=IDS, labels=IDS).backward()
    weight = weights["transformer.h.0.attn.c_attn.weight"].t().contiguous()
    values, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(layer.weight.data, values) and torch.equal(layer.quant_state.absmax, state.absmax)


def test_weights_that_are_quantised_already_are_refused(tmp_path):
    folder = write_base(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(folder)
    with pytest.raises(InputError, match=r"its weights are quantised already \(gptq\); start from the 16-bit ones$"):
        build_model(plan_of(folder=folder))


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
    peak, retained, peak_of_lora, kept_by_lora = map(int, printed_by("-c", code).split()[-4:])
    whole_bytes = sum(tensor.numel() * 2 for tensor in load_file(large / "model.safetensors").values())
    assert retained < 0.4 * whole_bytes
    assert peak < retained + 0.5 * whole_bytes  # the few tensors in flight are 35 % of this small model
    assert peak_of_lora > 0.9 * whole_bytes and kept_by_lora > whole_bytes


def logits_and_gradient(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).backward()
    gradient = model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad
    assert gradient is not None
    return model(input_ids=IDS).logits.detach(), gradient


def test_an_evaluation_changes_nothing_about_the_training_after_it():
    model = build_model(plan_of())
    before = logits_and_gradient(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
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
    assert all(map(quantisation.is_quantisable, (nn.Linear(4, 4), Conv1D(4, 4), FalconLinear(4, 4))))
    assert issubclass(Llama4Router, nn.Linear)
    with torch.device("meta"):
        assert not quantisation.is_quantisable(Llama4Router(AutoConfig.for_model("llama4_text")))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_are_the_same_whatever_lies_beneath_them(method, base):
    initialized, loaded = build_model(plan_of(method)), build_model(plan_of(method, base))
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
        model = build_model(plan_of(method, path, precision=precision))
        packed = {id(layer.weight) for layer in methods.quantised_layers(model)}
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in packed]
        assert {parameter.dtype for parameter in frozen} == {computes}
        assert {parameter.dtype for parameter in adapters(model).values()} == {trained}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.get_output_embeddings().weight.dtype == computes
        assert bool(packed) is (method is Method.QLORA)


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
        build_model(plan_of(Method.LORA, lora=LoraJob(targets=targets)))
    assert "\n" not in str(error.value)


HIDDEN, ALPHA = TINY_LLAMA["hidden_size"], 5.0


class Run:
    def __init__(self, alpha: float | None = ALPHA) -> None:
        torch.manual_seed(0)
        self.model: Any = model_from_config(TINY_LLAMA, dtype=torch.float32, attention=Attention.SDPA)
        if alpha is not None:
            add_noise(self.model, alpha)
        make_trainable(self.model, Checkpointing.FULL, LossHead.CHUNKED, loss_chunk_tokens=8)
        self.embedded = torch.empty(0)
        self.model.get_input_embeddings().register_forward_hook(self._note)

    def _note(self, module: object, inputs: object, output: Tensor) -> None:
        self.embedded = output.detach().clone()

    def forward(self, *, step: int = 0, **inputs: Tensor) -> Tensor:
        seed_dropout(0, step, 0)
        return self.model(**inputs)

    def noise(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        self.forward(input_ids=input_ids, labels=labels, **inputs)
        return self.embedded - self.model.get_input_embeddings().weight.detach()[input_ids]


def rows(*row_lengths: int, width: int = 24) -> tuple[Tensor, Tensor]:
    ids = torch.arange(len(row_lengths) * width).reshape(len(row_lengths), width) % 64
    is_token = torch.arange(width) < torch.tensor(row_lengths).unsqueeze(1)
    return ids * is_token, torch.where(is_token, ids, -100)


def test_the_noise_of_a_row_is_bounded_by_alpha_over_the_root_of_its_tokens_and_width():
    """Uniform up to the bound: its largest value is near it, its mean absolute value near half. Prompts count too."""
    ids, labels = rows(20, 5, 0)
    noise = Run().noise(ids, labels)
    assert not noise[1, 5:].any() and not noise[2].any(), "padding and dummy rows are left alone"
    for row, length in enumerate((20, 5)):
        bound = ALPHA / (length * HIDDEN) ** 0.5
        found = noise[row, :length].abs()
        assert 0.95 * bound < float(found.max()) <= bound * 1.0001
        assert float(found.mean()) == pytest.approx(bound / 2, rel=0.1)
    labels[0, :12] = -100  # a prompt that is not learned
    assert torch.equal(lengths(labels, None)[0], lengths(rows(20)[1], None)[0])
    assert Run().noise(ids, labels)[0, :12].any()


def test_each_document_of_a_packed_row_has_its_own_length():
    _, labels = rows(10, width=12)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]])
    assert lengths(labels, position_ids).tolist() == [[6] * 6 + [4] * 4 + [0] * 2]


def test_a_scored_or_generated_row_has_no_noise():
    ids, labels = rows(20)
    run = Run()
    run.model.eval()
    assert not run.noise(ids, labels).any()
    run.model.train()
    run.model(input_ids=ids)  # as generation calls it
    assert torch.equal(run.embedded, run.model.get_input_embeddings().weight.detach()[ids])
    assert noise_facts(run.model) == {"embedding noise": "NEFTune, alpha 5, added in 0 forwards"}


def test_a_model_whose_loss_is_another_is_not_trained() -> None:
    plan = plan_of(Method.FULL)
    shape = replace(plan.model_shape, model_type="granite", loss_obstacle="its logits are divided")
    with pytest.raises(InputError, match=r"^granite cannot be trained: its logits are divided$"):
        build_model(replace(plan, model_shape=shape))
