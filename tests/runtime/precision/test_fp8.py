"""Which layers multiply in FP8, with which library, the proof that they did, and whether it pays.

Stand-ins take the place of the two libraries (tests/factories/fake_te, fake_torchao): one counts what the real one
would do on a GPU, the other multiplies in FP8 for real, on the CPU.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from block_kinds import KINDS
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace
from pasted_pip import requirements_in
from planning_factory import fp8_gain_of
from rank_factory import rank_plan
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.trainer.runtime.models.build import build_model, model_from_config
from shardwise.trainer.runtime.models.methods import add_adapters
from shardwise.trainer.runtime.precision import fp8
from shardwise.trainer.runtime.run.clock import MIN_REPETITIONS, QUEUED
from shardwise.trainer.runtime.run.process import run_request
from shardwise.trainer.runtime.tools.fp8_gain import measure_gain, time_recipes, timed_blocks
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import BlockTimes, Fp8Gain
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Precision

FACTORIES = Path(__file__).parents[2] / "factories"
LINEARS_IN_A_BLOCK = 7


@pytest.fixture
def te(monkeypatch) -> Iterator[object]:
    """The stand-in for Transformer Engine, in a state of its own."""
    yield from _library(monkeypatch, "fake_te", "transformer_engine", "transformer_engine.pytorch")


@pytest.fixture
def torchao(monkeypatch) -> Iterator[object]:
    """The stand-in for torchao, with PyTorch's own FP8 product: oneDNN's fails where instruction sets are limited."""
    had_onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield from _library(monkeypatch, "fake_torchao", "torchao", "torchao.float8")
    torch._C._set_mkldnn_enabled(had_onednn)


def _library(monkeypatch, folder: str, package: str, module: str) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(FACTORIES / folder))
    _forget(package)
    __import__(module)
    yield sys.modules[module]
    _forget(package)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def fp8_plan(recipe: Fp8Recipe | None = Fp8Recipe.CURRENT, **engine):
    return rank_plan(Path("nowhere"), precision=Precision.FP8, fp8_recipe=recipe, **engine)


def fp8_model(recipe: Fp8Recipe | None = Fp8Recipe.CURRENT, **engine):
    plan = fp8_plan(recipe, **engine)
    model = build_model(plan)
    return model, fp8.install_fp8(model, plan.chosen)


def rows(count: int = 4, width: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (count, width), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, ids: torch.Tensor, **more: object) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, labels=ids, **more)


class Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.narrow = nn.Linear(64, 24)
        self.router = nn.Linear(64, 16)
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(64, 32)
        self.mlp.gate_proj = nn.Linear(64, 32, bias=False)
        self.mlp.experts = nn.ModuleList([nn.Linear(64, 64)])
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 16)})
        self.odd = type("FourBitLinear", (nn.Linear,), {})(64, 64)


class Blocks(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.lm_head = nn.Linear(64, 256)


def test_layers_are_chosen_inside_blocks_and_the_others_are_named_with_the_reason():
    found = fp8.fp8_layers(Blocks(1), Fp8Recipe.CURRENT)
    assert list(found.chosen) == ["layers.0.q_proj", "layers.0.mlp.gate_proj"]
    (narrow,) = (reason for reason in found.skipped if reason.endswith("multiple of 16"))
    assert found.skipped == {
        narrow: ("layers.0.narrow",),
        fp8.ROUTER: ("layers.0.router", "layers.0.mlp.gate"),
        fp8.EXPERT: ("layers.0.mlp.experts.0",),
        fp8.ADAPTER: ("layers.0.lora_A.default",),
        "of class FourBitLinear": ("layers.0.odd",),
        fp8.OUTSIDE: ("lm_head",),
    }, "none of these gains, and what fits is converted"
    assert "layers.0.router, layers.0.mlp.gate" in found.skipped_text


def chosen_of(recipe, *sizes: tuple[int, int]) -> tuple[int, dict[str, int]]:
    """The number of layers of these sizes that multiply in FP8, and of the others by their reason."""
    model = Blocks(1)
    model.layers[0] = GradientCheckpointingLayer()
    with torch.device("meta"):
        model.layers[0].more = nn.ModuleList(nn.Linear(*size) for size in sizes)
    found = fp8.fp8_layers(model, recipe)
    return len(found.chosen), {reason: len(names) for reason, names in found.skipped.items() if reason != fp8.OUTSIDE}


@pytest.mark.parametrize(
    ("recipe", "multiple", "chosen"),
    [
        (Fp8Recipe.DELAYED, 16, 3), (Fp8Recipe.TORCHAO_ROWWISE, 16, 3), (Fp8Recipe.MXFP8, 32, 2),
        (Fp8Recipe.BLOCK, 128, 1),
    ],
)  # fmt: skip
def test_each_recipe_cuts_weights_into_tiles_of_its_own_and_small_layers_stay_in_16_bit(recipe, multiple, chosen):
    """Such as k and v of an 8B model: 4,096 x 1,024."""
    found, skipped = chosen_of(recipe, *((128, size) for size in (128, 64, 48, 40)))
    ((reason, num_skipped),) = skipped.items()
    assert reason.endswith(f"multiple of {multiple}") and (found, num_skipped) == (chosen, 4 - chosen)
    for other in (Fp8Recipe.CURRENT, Fp8Recipe.TORCHAO_TENSORWISE):
        assert chosen_of(other, (4096, 4096), (4096, 1024), (4096, 1024)) == (1, {fp8.SMALL: 2})


def test_nvfp4_leaves_the_first_and_the_last_blocks_alone():
    found = fp8.fp8_layers(Blocks(62), Fp8Recipe.NVFP4)
    left = {int(name.split(".")[1]) for name in found.skipped[fp8.EDGE]}
    assert left == {0, 1, *range(54, 62)}, "as in the paper"
    for num_blocks, recipe in ((62, Fp8Recipe.MXFP8), (2, Fp8Recipe.NVFP4)):  # a small model has none to spare
        assert fp8.EDGE not in fp8.fp8_layers(Blocks(num_blocks), recipe).skipped


def test_adapters_stay_and_their_bases_multiply_in_fp8(te):
    plan = fp8_plan()
    model = build_model(plan)
    add_adapters(model, LoraJob(rank=16, alpha=16.0), Precision.BF16_MIXED)
    fp8.install_fp8(model, plan.chosen)
    loss_of(model, rows()).backward()
    assert te.COUNTS["fp8 products with gradients"] == 2 * LINEARS_IN_A_BLOCK
    assert type(model.model.layers[0].self_attn.q_proj.base_layer).__name__ == "Fp8Linear"
    assert type(model.model.layers[0].self_attn.q_proj.lora_A["default"]) is nn.Linear


def test_parameters_and_names_are_those_of_the_plain_model(te):
    plan = fp8_plan(model_config={**TINY_LLAMA, "attention_bias": True, "tie_word_embeddings": True})
    model = build_model(plan)
    before, names = dict(model.named_parameters()), list(model.state_dict())
    state = torch.random.get_rng_state()
    fp8.install_fp8(model, plan.chosen)
    assert torch.equal(torch.random.get_rng_state(), state), "nothing was drawn"
    assert list(model.state_dict()) == names and not any("_extra_state" in name for name in names)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, te.Linear) and layer.weight.dtype == torch.float32 and layer.bias is not None


@pytest.mark.parametrize(
    ("recipe", "class_name"),
    [
        (Fp8Recipe.DELAYED, "DelayedScaling"), (Fp8Recipe.CURRENT, "Float8CurrentScaling"),
        (Fp8Recipe.MXFP8, "MXFP8BlockScaling"), (Fp8Recipe.NVFP4, "NVFP4BlockScaling"), (None, "Float8CurrentScaling"),
    ],
)  # fmt: skip
def test_the_recipe_of_the_plan_is_the_one_that_runs(te, recipe, class_name):
    model, installed = fp8_model(recipe)
    loss_of(model, rows())
    fp8.check_fp8_ran(installed, model)
    assert te.COUNTS[f"recipe {class_name}"] == te.COUNTS["autocast"] == 1
    facts = fp8.fp8_facts(installed)
    assert facts["fp8 recipe"].startswith(recipe or "current") and facts["fp8 recipe"].endswith(class_name)
    assert ("experimental" in facts["fp8 recipe"]) is (recipe in (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4))
    assert "transformer-engine" in facts["fp8 library"] and "lm_head" in facts["fp8 layers left in 16 bit"]
    assert (facts["fp8 layers"], facts["fp8 products"].split()[0]) == ("14", "14")


@pytest.mark.parametrize(
    ("recipe", "lacks", "fact"),
    [
        (Fp8Recipe.CURRENT, "fp8", r"current\b.*: fp8 needs a newer device"),
        (Fp8Recipe.BLOCK, "block", r"block\b.*: block needs a newer device"),
        (Fp8Recipe.MXFP8, "mxfp8", r"mxfp8\b.*: mxfp8 needs a newer device"),
        (Fp8Recipe.NVFP4, "nvfp4", r"nvfp4\b.*: nvfp4 needs a newer device"),
        (Fp8Recipe.DELAYED, "", r"pin\.fp8_recipe: delayed.*pin\.checkpointing: none"),
        (Fp8Recipe.BLOCK, "", r"LlamaForCausalLM.* 14 .*multiple of 128"),
    ],
)
def test_a_recipe_that_the_device_recomputation_or_the_model_lacks_is_refused(te, monkeypatch, recipe, lacks, fact):
    monkeypatch.setenv("FAKE_TE_LACKS", lacks)
    with pytest.raises(InputError, match=fact):
        fp8_model(recipe, checkpointing=Checkpointing.FULL if recipe is Fp8Recipe.DELAYED else Checkpointing.NONE)


@pytest.mark.parametrize("recipe", [Fp8Recipe.CURRENT, Fp8Recipe.MXFP8])
@pytest.mark.parametrize("head", [LossHead.EAGER, LossHead.CHUNKED])
def test_columns_are_added_until_the_tokens_fit_and_change_nothing(te, recipe, head):
    """3 rows of 37 are 111 tokens, and 48 columns make 144 of them, or 64 make 192."""
    plain, (model, _) = build_model(rank_plan(Path("nowhere"), loss=head)), fp8_model(recipe, loss=head)
    widths = set()
    model.model.layers[0].register_forward_hook(lambda _module, inputs, _out: widths.add(inputs[0].shape[1]))
    found, expected = loss_of(model, rows(3, 37)), loss_of(plain, rows(3, 37))
    assert widths == {48 if recipe is Fp8Recipe.CURRENT else 64}
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_packed_rows_have_to_fit_as_they_are():
    inputs = {"input_ids": rows(1, 40), "labels": rows(1, 40), "position_ids": torch.arange(40)[None]}
    assert fp8.padded_to_multiple(inputs, 8) is inputs
    with pytest.raises(InputError, match=r"multiple of 16 .* 1 packed rows of 40\b"):
        fp8.padded_to_multiple(inputs, 16)


def test_a_missing_library_is_named_with_what_would_do(monkeypatch, tmp_path):
    for package in ("transformer_engine", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)  # Python's way to say that it is not there
    for recipe, library in ((Fp8Recipe.CURRENT, "transformer-engine"), (Fp8Recipe.TORCHAO_ROWWISE, "torchao")):
        with pytest.raises(InputError, match=rf"\b{recipe} needs {library}") as caught:
            fp8_model(recipe)
        assert set(requirements_in(str(caught.value), tmp_path)) == {library}
    for precision in set(Precision) - {Precision.FP8}:
        fp8.check_precision(precision)
    with pytest.raises(InputError, match=r"pin\.precision: fp8") as caught:
        fp8.check_precision(Precision.FP8)
    assert set(requirements_in(str(caught.value), tmp_path)) == {"transformer-engine", "torchao"}


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_torchao_multiplies_in_fp8_for_real(torchao, checkpointing):
    plain = loss_of(build_model(rank_plan(Path("nowhere"))), rows())
    model, installed = fp8_model(Fp8Recipe.TORCHAO_TENSORWISE, checkpointing=checkpointing)
    loss = loss_of(model, rows())
    loss.backward()
    fp8.check_fp8_ran(installed, model)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, torchao.Float8Linear) and layer.config.recipe_name == "tensorwise"
    assert layer.num_products == (2 if checkpointing is Checkpointing.FULL else 1)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-3) and loss.item() != plain.item()
    assert "torchao_tensorwise" in fp8.fp8_facts(installed)["fp8 recipe"]
    assert list(model.state_dict()) == list(build_model(rank_plan(Path("nowhere"))).state_dict())


def test_layers_that_multiply_nothing_in_fp8_or_are_no_longer_in_the_model_stop_the_run(te, torchao, monkeypatch):
    model, installed = fp8_model()
    with torch.no_grad():
        model(input_ids=rows())
    with pytest.raises(EnvironmentFaultError, match=r"14 layers.*transformer-engine"):
        fp8.check_fp8_ran(installed, model)
    loss_of(model, rows())
    fp8.check_fp8_ran(installed, model)
    model.model.layers[1].mlp.down_proj = nn.Linear(128, 64, bias=False)
    with pytest.raises(EnvironmentFaultError, match=r"1 of 14 layers.*model\.layers\.1\.mlp\.down_proj"):
        fp8.check_fp8_ran(installed, model)
    monkeypatch.setattr(torchao, "EMULATES", True)
    model, installed = fp8_model(Fp8Recipe.TORCHAO_TENSORWISE)
    loss_of(model, rows())
    with pytest.raises(EnvironmentFaultError, match=r"14 layers.*torchao"):
        fp8.check_fp8_ran(installed, model)


def meta_model(fields):
    with torch.device("meta"):
        return model_from_config(fields, dtype=torch.bfloat16, attention=Attention.SDPA)


def test_one_block_of_each_kind_is_timed_with_the_inputs_of_a_run():
    (block,) = timed_blocks(meta_model(TINY_LLAMA), tokens=64, seq_len=16)
    assert (block.name, block.num_blocks) == ("model.layers.0", 2)
    assert block.args[0].shape == (4, 16, 64) and block.kwargs["attention_mask"] is None
    kinds = {
        each.name: each.num_blocks for each in timed_blocks(meta_model(KINDS["convolution"]), tokens=16, seq_len=64)
    }
    assert kinds == {"model.layers.0": 2, "model.layers.1": 2}, "convolution and attention in turn"


def gain_of(recipes, **facts) -> Fp8Gain:
    request = Fp8GainRequest(model_config=TINY_LLAMA, tokens=32, seq_len=32, recipes=recipes, **facts)
    return time_recipes(request, torch.device("cpu"), budget_s=0.0)


PASSES = 1 + MIN_REPETITIONS * QUEUED  # one to warm up


def test_a_block_runs_in_queues_with_its_products_in_fp8(te):
    gain = gain_of((Fp8Recipe.CURRENT,), compiles=False)
    (block,) = gain.blocks
    assert (block.count, block.flops) == (2, 6 * 32 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128))
    assert te.COUNTS["fp8 products with gradients"] == LINEARS_IN_A_BLOCK * PASSES
    assert not any(name.startswith("16 bit") for name in te.COUNTS)
    assert gain.speedup == pytest.approx(block.bf16_s / block.fp8_s) and block.bf16_s == block.plain_s


@pytest.fixture
def compiled(monkeypatch) -> list[set[str]]:
    """The classes of linear layers in each block that torch.compile was called for; blocks run eagerly all the same."""
    seen = []
    monkeypatch.setattr(
        nn.Module, "compile",
        lambda block: seen.append({type(each).__name__ for each in block.modules() if "Linear" in type(each).__name__}),
    )  # fmt: skip
    return seen


def test_each_library_is_timed_in_the_form_that_it_runs_in_and_the_faster_one_is_first(te, torchao, compiled):
    gain = gain_of((Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.CURRENT))
    assert compiled == [{"Linear"}, {"Float8Linear"}], "bf16 and torchao; Transformer Engine runs eagerly"
    forms = {each.recipe: each.compile for each in gain.all}
    assert forms == {Fp8Recipe.TORCHAO_TENSORWISE: True, Fp8Recipe.CURRENT: False}
    assert [each.speedup for each in gain.all] == sorted((each.speedup for each in gain.all), reverse=True)
    of_te = next(each for each in gain.all if each.recipe is Fp8Recipe.CURRENT).blocks[0]
    assert of_te.bf16_s <= of_te.plain_s, "against the faster form of bf16"
    assert te.COUNTS["fp8 products with gradients"] == LINEARS_IN_A_BLOCK * PASSES


def test_a_library_that_fails_has_its_problem_and_the_other_is_timed(torchao, compiled, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    gain = gain_of((Fp8Recipe.CURRENT, Fp8Recipe.TORCHAO_TENSORWISE))
    assert gain.recipe is Fp8Recipe.TORCHAO_TENSORWISE and gain.speedup is not None
    assert "current was not timed: " in gain.text and "needs transformer-engine" in gain.text
    assert "torchao_tensorwise measured" in gain.text


def test_the_gain_counts_each_kind_of_block_as_often_as_the_model_has_it():
    blocks = (
        BlockTimes(count=3, flops=1e9, bf16_s=2.0, plain_s=3.0, fp8_s=1.0),
        BlockTimes(count=1, flops=5e9, bf16_s=1.0, plain_s=1.0, fp8_s=2.0),
    )
    gain = Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, blocks=blocks)
    assert gain.speedup == 7 / 5 and gain.pays
    assert gain.saved_s_per_flop == pytest.approx((3 * 2.0 - 1.0) / 8e9), "against bf16 in the same form"
    assert not Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, blocks=blocks[1:]).pays
    nothing = Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, problem="no device")
    assert nothing.speedup is None and not nothing.pays


def test_without_a_gpu_the_result_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, out = tmp_path / "request.json", tmp_path / "answer.json"
    codec.write(path, Fp8GainRequest(model_config=TINY_LLAMA, tokens=4096, seq_len=4096, recipes=(Fp8Recipe.CURRENT,)))
    assert run_request([str(path)], Fp8GainRequest, measure_gain) == 2
    assert run_request([str(path), str(out)], Fp8GainRequest, measure_gain) == 0
    result = codec.read(out, Fp8Gain)
    assert (result.recipe, result.tokens, result.blocks) == (Fp8Recipe.CURRENT, 4096, ())
    assert result.problem is not None and "CUDA" in result.problem


def test_the_report_of_a_run_in_fp8_has_what_was_timed_before_it():
    gain = fp8_gain_of(1.31)
    run = replace(engine_plan(Sharding.NONE, precision=Precision.FP8), fp8_gain=gain)
    assert "1.31x" in fp8.timed_facts(run)["fp8 gain"]
    assert fp8.timed_facts(replace(run, fp8_gain=None)) == {}
    assert fp8.timed_facts(replace(engine_plan(Sharding.NONE, precision=Precision.BF16_MIXED), fp8_gain=gain)) == {}
