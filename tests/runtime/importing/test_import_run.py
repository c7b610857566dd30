"""A foreign checkpoint becomes a folder that plain transformers loads, with a few tensors in memory at a time."""

import json
import shutil
from pathlib import Path
from shutil import _ntuple_diskusage
from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from export_factory import TINY_GPT2, write_base
from import_factory import IDS, assert_refused, config_of, distributed, imported, logits, saved_by_torch, zero
from prepare_request_factory import numbered_text
from programs import printed_by
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export.check import logits_of, prompt_ids
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.worker_requests import ImportKind, WeightType


def test_safetensors_are_linked_and_the_original_may_go(base, tmp_path):
    done = imported(base, tmp_path / "out")
    assert done.kind is ImportKind.HUGGINGFACE and done.dtype == "F32"
    assert (tmp_path / "out" / "model.safetensors").samefile(base / "model.safetensors")


def wrapped(before, wrapper):
    return lambda weights: {name.replace(before, before + wrapper, 1): each for name, each in weights.items()}


@pytest.mark.parametrize(
    "change",
    [
        dict, lambda weights: {"model": weights, "epoch": 3}, wrapped("", "module._orig_mod."),
        wrapped("", "base_model.model."), wrapped("layers.0.", "_fsdp_wrapped_module."),
        wrapped("layers.0.", "_checkpoint_wrapped_module."), wrapped("layers.0.", "_orig_mod."),
    ],
    ids=["plain", "nested", "of a model", "of PEFT", "of FSDP", "of a checkpoint", "compiled"],
)  # fmt: skip
def test_pickled_weights_become_safetensors_without_the_names_of_wrappers(change, base, tmp_path):
    saved_by_torch(base, tmp_path / "in", change)
    done = imported(tmp_path / "in", tmp_path / "out")
    assert done.source.endswith(": pytorch_model.bin")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["config.json", "model.safetensors"]
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_pickled_weights_in_several_files_are_read_by_their_index(base, tmp_path):
    folder = saved_by_torch(base, tmp_path / "in")
    weights = load_file(base / "model.safetensors")
    first = dict(list(weights.items())[:5])
    places = {name: "pytorch_model-1.bin" if name in first else "pytorch_model-2.bin" for name in weights}
    torch.save(first, folder / "pytorch_model-1.bin")
    stale = {name: each + 1 for name, each in first.items()}
    torch.save(weights | stale, folder / "pytorch_model-2.bin")
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    imported(folder, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(base))


def test_files_are_of_a_bounded_size_and_have_an_index(base, tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.trainer.runtime.importing.run.FILE_BYTES", 100_000)
    imported(saved_by_torch(base, tmp_path / "in"), tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = load_file(base / "model.safetensors")
    assert len(files) > 2 and {*index["weight_map"].values()} == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(each.numel() * 4 for each in weights.values())
    held = [sum(each.numel() * 4 for each in load_file(path).values()) for path in files]
    assert max(held) <= 100_000
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    imported(tmp_path / "out", tmp_path / "again")
    assert all((tmp_path / "again" / path.name).samefile(path) for path in files)
    assert torch.equal(logits(tmp_path / "again"), logits(base))


def test_weights_are_of_the_requested_type_if_it_has_room_for_them_or_of_their_own(base, tmp_path):
    done = imported(base, tmp_path / "out", dtype=WeightType.BF16)
    assert done.dtype == "BF16" and config_of(tmp_path / "out")["dtype"] == "bfloat16"
    written, held = load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")
    assert all(torch.equal(written[name], each.bfloat16()) for name, each in held.items())
    assert done.num_bytes == sum(each.numel() * 2 for each in held.values())
    saved_by_torch(base, tmp_path / "in", lambda weights: {name: each.half() for name, each in weights.items()})
    assert imported(tmp_path / "in", tmp_path / "kept").dtype == "F16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "kept").dtype is torch.float16
    large = saved_by_torch(base, tmp_path / "large", lambda weights: changed(weights, NORM, lambda each: each * 1e6))
    assert_refused(large, tmp_path / "no", r"model\.norm\.weight .*torch\.float16.*--dtype", dtype=WeightType.FP16)
    imported(large, tmp_path / "yes", dtype=WeightType.BF16)


def test_tied_weights_are_stored_once(tmp_path):
    tied = write_base(tmp_path / "base", {**TINY_LLAMA, "tie_word_embeddings": True})

    def with_head(weights):
        return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    done = imported(saved_by_torch(tied, tmp_path / "in", with_head), tmp_path / "out")
    assert any("tied" in note and "lm_head.weight" in note for note in done.notes)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "out"), logits(tied))
    other = saved_by_torch(tied, tmp_path / "other", lambda weights: changed(with_head(weights), HEAD))
    assert_refused(other, tmp_path / "no", r"lm_head\.weight.*model\.embed_tokens\.weight.*ties")


@pytest.fixture(scope="module")
def trainer_folder(base, tmp_path_factory) -> Path:
    from transformers import Trainer, TrainingArguments  # they load PEFT and datasets

    root = tmp_path_factory.mktemp("trainer")
    ids = prompt_ids(256)[0]
    rows = [{"input_ids": ids, "labels": ids}] * 4
    settings = TrainingArguments(
        output_dir=str(root), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(base), settings, train_dataset=rows)
    trainer.train()
    folder = root / "checkpoint-2"
    write_trained_tokenizer(train_tokenizer(iter([numbered_text(50)]), vocab_size=256 + 1), root / "tokenizer")
    for path in (root / "tokenizer").iterdir():
        path.rename(folder / path.name)
    return folder


def test_a_checkpoint_of_transformers_trainer_is_its_model_and_its_tokenizer(trainer_folder, base, tmp_path):
    done = imported(trainer_folder, tmp_path / "out")
    assert done.kind is ImportKind.TRAINER and done.source.endswith(": model.safetensors")
    assert any("optimizer.pt, rng_state.pth" in note for note in done.notes)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= written
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"} & written
    trained = AutoModelForCausalLM.from_pretrained(trainer_folder).eval()
    assert torch.equal(logits(tmp_path / "out"), logits_of(trained, prompt_ids(256)))
    assert not torch.allclose(logits(tmp_path / "out"), logits(base), atol=1e-3)


def test_a_trainers_folder_under_deepspeed_has_two_forms_of_the_weights(base, tmp_path):
    folder = zero(base, tmp_path / "in")
    (folder / "trainer_state.json").write_text("{}")
    rounded = {name: each.bfloat16() for name, each in load_file(base / "model.safetensors").items()}
    save_file(rounded, folder / "model.safetensors")
    done = imported(folder, tmp_path / "out")
    assert done.dtype == "BF16" and done.source.endswith(": model.safetensors")
    assert any("global_step2" in note and "--kind deepspeed" in note for note in done.notes)
    done = imported(folder, tmp_path / "masters", kind=ImportKind.DEEPSPEED)
    assert done.dtype == "F32" and torch.equal(logits(tmp_path / "masters"), logits(base))
    shutil.rmtree(folder / "global_step2")
    assert imported(folder, tmp_path / "again").dtype == "BF16", "people delete the masters and leave `latest`"


@pytest.mark.parametrize(
    ("kind", "fact"), [(ImportKind.DEEPSPEED, "DeepSpeed.*Trainer"), (ImportKind.PEFT, r"PEFT.*adapter_config\.json")]
)
def test_a_kind_that_the_files_are_not_is_refused(kind, fact, trainer_folder, tmp_path):
    assert_refused(trainer_folder, tmp_path / "out", fact, kind=kind)
    assert imported(trainer_folder, tmp_path / "out", kind=ImportKind.HUGGINGFACE).kind is ImportKind.HUGGINGFACE


HEAD, NORM = "lm_head.weight", "model.norm.weight"


def changed(weights, name, change=lambda each: each + 1):
    return {**weights, name: change(weights.get(name, torch.zeros(2)))}


def poison(tensor):
    return tensor.index_fill(0, torch.tensor(-1), torch.nan)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda weights: {name: each for name, each in weights.items() if name != NORM},
            r"Llama.*/config\.json(?s:.*)\nmissing: model\.norm\.weight$",
        ),
        (lambda weights: changed(weights, "model.extra"), r"\nunexpected: model\.extra$"),
        (
            lambda weights: {f"x.{name}": each for name, each in weights.items()},
            r"missing: lm_head\.weight, .* 18 more\nunexpected: x\.lm_head\.weight, .* 18 more",
        ),
        (lambda weights: changed(weights, HEAD, lambda each: each[:-1]), r"lm_head\.weight .*\(255, 64\)"),
        (lambda weights: changed(weights, NORM, poison), r"model\.norm\.weight .*NaN"),
        (lambda weights: changed(weights, NORM, torch.Tensor.to_sparse), r"torch\._utils\._rebuild_sparse_tensor"),
        (lambda weights: {**weights, "module.lm_head.weight": weights["lm_head.weight"]}, r"lm_head\.weight twice"),
        (lambda weights: {**weights, "step": 3}, "'step'"),
        (lambda weights: [*weights.values()], r"\blist\b"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_and_leave_nothing(change, fact, base, tmp_path):
    saved_by_torch(base, tmp_path / "in", change)
    assert_refused(tmp_path / "in", tmp_path / "out", fact)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_safetensors_that_would_be_linked_are_looked_through_for_nan(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "in")
    save_file(changed(load_file(base / "model.safetensors"), NORM, poison), folder / "model.safetensors")
    assert_refused(folder, tmp_path / "out", r"model\.norm\.weight .*NaN")


def test_three_ranks_of_zero_3_have_a_padded_third_of_every_weight(base, tmp_path):
    weights, folder = load_file(base / "model.safetensors"), tmp_path / "in" / "global_step2"
    folder.mkdir(parents=True)
    thirds = [functional.pad(each.reshape(-1), (0, -each.numel() % 3)).chunk(3) for each in weights.values()]
    shapes = [{name: each.shape for name, each in weights.items()}]
    for rank in range(3):
        states = {"module": {}, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flats = [torch.cat([parts[rank] for parts in thirds])]
        masters = {"zero_stage": 3, "partition_count": 3, "fp32_flat_groups": flats}
        torch.save({"optimizer_state_dict": masters}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder.parent / "latest").write_text("global_step2\n")
    done = imported(folder.parent, tmp_path / "out", config=config_of(base), config_origin="preset")
    assert "ZeRO-3 on 3 ranks" in done.source
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], each) for name, each in weights.items())


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"vocab_size": 3}, r"config\.json: .*model_type"),
        ({"model_type": "nothing"}, r"config\.json: .*nothing"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, r"layers 1000000000\b.* 21 tensors"),
        ({"model_type": "bert"}, "BertLMHeadModel"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised.*gptq"),
    ],
)
def test_a_config_of_another_model_is_refused(config, fact, base, tmp_path):
    saved_by_torch(base, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert_refused(tmp_path / "in", tmp_path / "out", fact)


def test_a_checkpoint_without_a_config_names_the_option(base, tmp_path):
    saved_by_torch(base, tmp_path / "in")
    (tmp_path / "in" / "config.json").unlink()
    assert_refused(tmp_path / "in", tmp_path / "out", r"config\.json.*--config FOLDER")
    imported(tmp_path / "in", tmp_path / "out", config=config_of(base), config_origin="preset")


def test_code_that_a_config_names_is_not_kept(base, tmp_path):
    assert_refused(base, tmp_path / "out", r"--base: .*/base .*adapter", base=str(base))
    saved_by_torch(base, tmp_path / "in")
    config = {**config_of(base), "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "modeling.py").write_text("raise SystemExit")
    imported(tmp_path / "in", tmp_path / "out")
    assert "auto_map" not in config_of(tmp_path / "out") and not (tmp_path / "out" / "modeling.py").exists()


def test_a_disk_in_the_way_is_an_environment_fault(base, tmp_path, monkeypatch):
    """It has a file in the place of a folder, a folder that is not replaced, or too little room."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFaultError, match=r"file/out: "):
        imported(base, tmp_path / "file" / "out")
    theirs = tmp_path / "theirs" / "kept"
    theirs.parent.mkdir()
    theirs.write_text("")
    with pytest.raises(EnvironmentFaultError, match=r"/theirs: .*Directory not empty"):
        imported(base, theirs.parent)
    assert theirs.exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: _ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(EnvironmentFaultError, match=r"/out: .* 4\d\d KiB.* 1000 B\b"):
        imported(saved_by_torch(base, tmp_path / "in"), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file", "theirs"}


LARGE = {"vocab_size": 6000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
WATCH = """
import json, sys
small, pickled, zero, dcp, folder_of_peak = sys.argv[1:]
sys.path.append(folder_of_peak)
from rank_process import Peak
from shardwise.trainer.runtime.importing.run import import_checkpoint
from shardwise.trainer.spec.messages.worker_requests import ImportRequest, WeightType

def peak(folder, dtype):
    with Peak() as found:
        import_checkpoint(ImportRequest(checkpoint=folder, out=f"{folder}-{dtype}", dtype=dtype))
    return found.highest

peak(small, None)
print(json.dumps([peak(pickled, None), peak(zero, WeightType.BF16), peak(dcp, WeightType.BF16)]))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads what Linux tells of a process")
def test_no_more_than_four_of_the_largest_tensors_are_in_memory(tmp_path):
    small = saved_by_torch(write_base(tmp_path / "small-base"), tmp_path / "small")
    base = write_base(tmp_path / "base", {**TINY_LLAMA, **LARGE})
    sizes = [each.numel() * 4 for each in load_file(base / "model.safetensors").values()]
    kinds = ((saved_by_torch, "bin"), (zero, "zero"), (distributed, "dcp"))
    folders = [save(base, tmp_path / name) for save, name in kinds]
    places = (small, *folders, Path(__file__).parents[2] / "distributed")
    peaks = json.loads(printed_by("-W", "ignore", "-c", WATCH, *places))
    assert max(sizes) < max(peaks) < 4 * max(sizes), peaks  # ZeRO and DCP put each tensor together
    assert sum(sizes) > 8 * max(sizes), "the bound is far from the model"


pytestmark = [  # PEFT's
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning"),
]

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj", "lm_head"]},
    "rslora": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "k_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {r"layers\.0.*k_proj": 3},
    },
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "transposed": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
}  # fmt: skip


def adapter_of(base: Path, folder: Path, **settings) -> Path:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_merged_as_peft_merges_it(name, base, tmp_path):
    from peft import PeftModel

    base = write_base(tmp_path / "base", TINY_GPT2) if name == "transposed" else base
    adapter = adapter_of(base, tmp_path / "adapter", **ADAPTERS[name])
    done = imported(adapter, tmp_path / "out", base=str(base))
    assert all(name in done.source for name in ("adapter_model.safetensors", "base"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    expected = logits_of(model.eval(), IDS)
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(expected, logits(base), atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"peft_type": "IA3"}, "IA3.*LoRA and DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"lora_alpha": None}, r"lora_alpha .*model\.layers\.0\."),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, r"model\.layers\.0\.mlp\.up_proj \(64, 128\).* \(128, 64\)"),
    ],
)
def test_an_adapter_that_is_not_merged_right_or_comes_without_its_base_is_refused(changes, fact, base, tmp_path):
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    assert_refused(adapter, tmp_path / "out", rf"{base}\b(?s:.*)--base")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    assert_refused(adapter, tmp_path / "out", fact, base=str(base))


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", r"model\.layers\.7\.mlp\.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", r"A or B of model\.layers\.0\.mlp\.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.bias", r"up_proj\.lora_B\.bias"),
        ("lm_head.weight", r"lm_head\.weight"),
        ("base_model.model.score.weight", r"score\.weight \(3, 3\)"),
    ],
)
def test_a_part_of_an_adapter_without_a_place_is_refused(name, fact, base, tmp_path):
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, name: torch.ones(3, 3)}, adapter / "adapter_model.safetensors")
    assert_refused(adapter, tmp_path / "out", fact, base=str(base))


def test_checkpoints_of_shardwise_are_shown_the_way(tmp_path):
    folder = tmp_path / "runs" / "cats" / "checkpoints" / "step-00000030"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    (folder.parents[1] / "plan.json").write_text("{}")
    assert_refused(folder, tmp_path / "out", r"shardwise export .*/runs/cats OUT --checkpoint step-30$")
    assert_refused(folder.parents[1], tmp_path / "out", r"\nshardwise export .*/runs/cats OUT$")
