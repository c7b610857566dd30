"""Merged and whole exports: plain transformers loads them, and their logits are those of what was trained."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from export_factory import EXPERTS, LORA, TINY_GPT2, export, run_of, save_run, write_base
from msgspec.structs import replace
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.checkpoint import find_checkpoint, import_weights
from shardwise.trainer.runtime.export import check
from shardwise.trainer.runtime.export.folder import staged
from shardwise.trainer.runtime.export.run import plan_on
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import base_type
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import ExportFormat, GgufType, WeightType
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

IDS = check.prompt_ids(256)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # PEFT's own
]
CONFIGS = {
    "llama": TINY_LLAMA,
    "tied": {**TINY_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "gpt2": TINY_GPT2,
}
ADAPTERS = {
    "dora": replace(LORA, dora=True),
    "rslora": replace(LORA, rslora=True, dropout=0.1),
    "some": replace(LORA, targets=("up_proj", "layers.1.self_attn.q_proj")),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):

    @cache
    def base(name: str, dtype: torch.dtype = torch.float32) -> Path:
        return write_base(tmp_path_factory.mktemp("base"), CONFIGS[name], dtype)

    return base


def trained_model(run_dir: Path, plan: Plan):
    model = build_model(plan_on(plan, DeviceKind.CPU))
    import_weights(model, find_checkpoint(run_dir / "checkpoints", on_skip=pytest.fail))
    return model


def trained_logits(run_dir: Path, plan: Plan) -> torch.Tensor:
    return check.logits_of(trained_model(run_dir, plan), IDS)


def plain_logits(folder: Path) -> torch.Tensor:
    return check.logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), IDS)


@pytest.mark.parametrize(
    ("config", "kind", "method"),
    [
        ("llama", "rslora", Method.LORA), ("llama", "some", Method.QLORA), ("tied", "dora", Method.LORA),
        ("gpt2", "dora", Method.LORA), ("gpt2", "dora", Method.QLORA),
    ],
)  # fmt: skip
def test_merged_weights_give_the_logits_of_the_adapters_on_their_base(config, kind, method, bases, tmp_path):
    plan = run_of(bases(config), method, lora=ADAPTERS[kind], config=CONFIGS[config])
    run_dir = save_run(tmp_path / "run", plan)
    done = export(run_dir, tmp_path / "out", merge=True)
    expected = trained_logits(run_dir, plan)
    assert check.relative_difference(expected, plain_logits(tmp_path / "out")) < check.SAME
    assert check.relative_difference(expected, plain_logits(bases(config))) > 1e-3, "the adapters do something"
    assert len(done.checks) == 2 and done.notes == ()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    if config == "gpt2":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert isinstance(loaded.get_submodule("transformer.h.0.attn.c_attn"), Conv1D), "layers stay of their kind"
    config_text = (tmp_path / "out" / "config.json").read_text()
    assert "quantization_config" not in config_text and str(tmp_path) not in config_text


def test_lora_is_merged_into_the_weights_on_the_disk_though_it_was_trained_beside_rounded_ones(bases, tmp_path):
    plan = run_of(bases("llama"), Method.LORA, precision=Precision.BF16_MIXED)
    export(save_run(tmp_path / "run", plan), tmp_path / "out", merge=True)
    assert base_type(Method.LORA, Precision.BF16_MIXED) is torch.bfloat16
    embedding, original = (
        AutoModelForCausalLM.from_pretrained(folder).get_parameter("model.embed_tokens.weight")
        for folder in (tmp_path / "out", bases("llama"))
    )
    assert embedding.dtype == torch.float32 and torch.equal(embedding, original)


def test_qlora_is_merged_into_the_4_bit_weights_that_it_was_trained_beside(bases, tmp_path):
    """In another type than the base's; and into the original weights it gives other logits."""
    from peft import PeftModel

    plan = run_of(bases("llama", torch.bfloat16), Method.QLORA, precision=Precision.BF16_MIXED)
    run_dir = save_run(tmp_path / "run", plan)
    export(run_dir, tmp_path / "out", merge=True, dtype=WeightType.FP32)
    expected = trained_logits(run_dir, plan)
    assert check.relative_difference(expected, plain_logits(tmp_path / "out")) < check.SAME
    export(run_dir, tmp_path / "adapters")
    original = AutoModelForCausalLM.from_pretrained(bases("llama", torch.bfloat16), dtype=torch.float32)
    elsewhere = PeftModel.from_pretrained(original, tmp_path / "adapters").merge_and_unload()
    assert check.relative_difference(expected, check.logits_of(elsewhere, IDS)) > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, check.SAME), (WeightType.BF16, check.ROUNDED[torch.bfloat16])])
def test_a_whole_model_is_written_as_it_was_trained_or_rounded(dtype, tolerance, bases, tmp_path):
    plan = run_of(bases("tied"), Method.FULL, precision=Precision.BF16_MIXED, config=CONFIGS["tied"])
    run_dir = save_run(tmp_path / "run", plan)
    done = export(run_dir, tmp_path / "out", dtype=dtype)
    measured = check.relative_difference(trained_logits(run_dir, plan), plain_logits(tmp_path / "out"))
    assert measured < tolerance
    assert len(done.checks) == (1 if dtype is None else 2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    types = {parameter.dtype for parameter in loaded.parameters()}
    assert types == {torch.float32 if dtype is None else torch.bfloat16}


def test_which_checkpoint_is_exported_can_be_said_and_a_better_one_is_named(bases, tmp_path):
    plan = run_of(bases("llama"), Method.LORA)
    run_dir = save_run(tmp_path / "run", plan, losses={2: 1.0, 4: 2.0, 6: 1.5}, steps=(2, 4, 6))
    last, best, named = (export(run_dir, tmp_path / each, checkpoint=each) for each in ("last", "best", "step-4"))
    assert [each.checkpoint.step for each in (last, best, named)] == [6, 2, 4]
    (note,) = last.notes
    assert all(fact in note for fact in ("step 2", "1.0000", "1.5000", "--checkpoint best"))
    eager = replace(plan, job=replace(plan.job, eval=replace(plan.job.eval, early_stop=2)))
    codec.write(run_dir / "attempts" / "1" / "plan.json", eager)
    assert export(run_dir, tmp_path / "early").checkpoint.step == 2, "as a run that stops early does"
    assert "step 2" in (tmp_path / "best" / "README.md").read_text()
    for wanted, fact in (("step-5", "step 5.* step-2, step-4, step-6"), ("newest", "newest: .*last, best and step-N")):
        with pytest.raises(InputError, match=fact):
            export(run_dir, tmp_path / "none", checkpoint=wanted)


@pytest.mark.parametrize(
    ("method", "settings", "fact"),
    [
        (Method.FULL, {"merge": True}, "--merge: full"),
        (Method.LORA, {"format": ExportFormat.ONNX}, r"--format onnx.*--merge"),
        (Method.LORA, {"dtype": WeightType.BF16}, r"--dtype: .*--merge"),
        (Method.FULL, {"format": ExportFormat.ONNX, "dtype": WeightType.BF16}, "--format onnx: .*bf16"),
        (Method.FULL, {"quant": GgufType.F16}, "--format gguf"),
        (Method.FULL, {"format": ExportFormat.GGUF, "dtype": WeightType.BF16}, "--quant"),
    ],
)
def test_a_request_that_does_not_fit_the_run_is_refused_before_anything_is_built(method, settings, fact, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "attempts").mkdir(parents=True)
    codec.write(run_dir / "plan.json", run_of(None, method))
    with pytest.raises(InputError, match=fact):
        export(run_dir, tmp_path / "out", **settings)


def test_adapters_whose_base_is_gone_are_exported_only_unchecked(bases, tmp_path):
    plan = run_of(bases("llama"), Method.LORA)
    run_dir = save_run(tmp_path / "run", plan)
    (run_dir / "attempts" / "2").mkdir()
    codec.write(run_dir / "attempts" / "2" / "plan.json", replace(plan, model_path=str(tmp_path / "gone")))
    with pytest.raises(InputError, match=r"/gone: (?s:.*)--no-check"):
        export(run_dir, tmp_path / "out")
    export(run_dir, tmp_path / "out", checks=False)
    assert "## Checks" not in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_that_fails_its_check_gets_no_name_and_leaves_nothing(tmp_path):
    with pytest.raises(EnvironmentFaultError), staged(tmp_path / "out") as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
        check.check_logits(torch.ones(1, 1, 2), torch.zeros(1, 1, 2), tolerance=check.SAME, what="out")
    assert list(tmp_path.iterdir()) == []
    good = torch.ones(1, 2, 3)
    with pytest.raises(EnvironmentFaultError, match=r"^out: .*\bnan\b"):
        check.check_logits(good, good * float("nan"), tolerance=check.SAME, what="out")
    assert check.relative_difference(good, good[:, :1]) == float("inf")


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_on_experts_are_merged_and_are_found_again_by_peft(method, tmp_path):
    """They adapt tensors of a module, one around the other; the router has none, in PEFT's description neither."""
    plan = run_of(write_base(tmp_path / "base", EXPERTS), method, config=EXPERTS)
    run_dir = save_run(tmp_path / "run", plan)
    model = trained_model(run_dir, plan)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert any(name.endswith("mlp.experts.base_layer") for name in adapted)
    export(run_dir, tmp_path / "merged", merge=True)
    assert check.relative_difference(check.logits_of(model, IDS), plain_logits(tmp_path / "merged")) < check.SAME
    assert len(export(run_dir, tmp_path / "adapters").checks) == 1
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert sorted(described["target_parameters"]) == ["down_proj", "gate_up_proj"]
    assert sorted(described["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_adapters_of_a_base_that_was_made_up_are_merged_into_it_and_not_compared_without(tmp_path):
    plan = run_of(None, Method.LORA)
    run_dir = save_run(tmp_path / "run", plan)
    export(run_dir, tmp_path / "out", merge=True)
    expected = trained_logits(run_dir, plan)
    assert check.relative_difference(expected, plain_logits(tmp_path / "out")) < check.SAME
    done = export(run_dir, tmp_path / "adapters")
    assert done.checks == () and "--merge" in done.notes[0]
