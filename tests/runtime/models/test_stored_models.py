"""Folders as models are published: the text part of others, weights in FP8, MXFP4 and 4 bit, and what is refused."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from export_factory import export, run_of, save_run
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import (
    DEEPSEEK,
    FP8_EXPERTS,
    GPT_OSS,
    SIZES,
    VISION_TYPES,
    as_bnb,
    as_fp8,
    as_mxfp4,
    save_miniature,
    save_new,
)
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from shardwise.launch.inputs.model_files import read_model_config
from shardwise.launch.inputs.weight_files import check_weights, packed_weights
from shardwise.trainer.runtime.export import check
from shardwise.trainer.runtime.models import decoding, weight_files
from shardwise.trainer.runtime.models.build import stored_model
from shardwise.trainer.runtime.models.meta_model import MetaModel, fill, meta_model_from_folder
from shardwise.trainer.runtime.models.quantisation import Packing
from shardwise.trainer.runtime.tools.check_model import check_model
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import Job, ModelJob, TrainJob
from shardwise.trainer.spec.messages.worker_requests import CheckModelRequest
from shardwise.trainer.spec.model.stored import Treatment, refuse_two_way, text_part, weight_format
from shardwise.trainer.spec.strategy import Method, Precision, Quant

CPU = torch.device("cpu")
IDS = check.prompt_ids(240)
LLAMA = {**SIZES, "model_type": "llama"}
NAMED = ("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "mistral3")  # and Llama 4: large
OTHERS = ("idefics3", "minimax_m3_vl", "qianfan_ocr")  # under `text_model`, with converters and names of their own
UNSCALED = ("aya_vision", "cohere2_vision")  # transformers' whole models leave out the scale of the logits
NEED_IMAGES = ("blip-2", "instructblip", "instructblipvideo")  # their whole models compute nothing without
NO_MINIATURE = (  # packages that are not here, sizes that depend on each other, attention to later tokens
    "fast_vlm", "perception_lm", "inkling_mm_model", "gemma3n", "cohere_compass", "dots3_note", "qwen4_exp",
    "paligemma",
)  # fmt: skip


@cache
def text_of(kind: str) -> str | None:
    found = text_part(CONFIG_MAPPING[kind]().to_dict()).get("model_type")
    return found if found in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def files_of(folder: Path, method: Method | None = None) -> Any:
    job = Job(model=ModelJob(name=str(folder), tokenizer="train"), train=TrainJob(method=method))
    return read_model_config(job)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, packing: Packing | None = None) -> tuple[MetaModel, Any]:
    method = None if packing is None else Method.QLORA
    stored = stored_model(str(folder), files_of(folder).config, method=method)
    stored.check()
    meta_model = meta_model_from_folder(stored, dtype=dtype, attention="eager", packing=packing)
    return meta_model, fill(meta_model, CPU).eval()


def logits_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def check_text_part(kind: str, folder: Path) -> None:
    """The text part computes what the whole model computes of text, is saved without a prefix, and loads again."""
    whole = save_miniature(kind, folder / "whole")
    _, model = loaded(folder / "whole")
    logits = logits_of(model)
    if kind in NEED_IMAGES:
        held, first = {weight.numel(): weight for weight in whole.parameters()}, next(model.parameters())
        assert torch.equal(held[first.numel()].flatten(), first.flatten())
    else:
        scale = model.config.logit_scale if kind in UNSCALED else 1.0
        assert check.relative_difference(logits, logits_of(whole)[..., : logits.shape[-1]] * scale) < check.SAME
    model.save_pretrained(folder / "part")
    with safe_open(folder / "part" / "model.safetensors", "pt") as file:
        assert not any("language_model" in name or "text_model" in name for name in file.keys())  # noqa: SIM118
    seam: Any = AutoModelForCausalLM
    again, found = seam.from_pretrained(folder / "part", output_loading_info=True, attn_implementation="eager")
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(logits_of(again.eval()), logits)


@pytest.mark.parametrize("kind", [*NAMED, *OTHERS])
def test_the_text_part_of_a_model_with_vision_computes_what_the_whole_does_and_is_saved_alone(kind, tmp_path):
    check_text_part(kind, tmp_path)


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("kind", [kind for kind in VISION_TYPES if kind not in {*NAMED, *OTHERS, *NO_MINIATURE}])
def test_so_does_that_of_every_other_type_or_it_is_refused_in_one_line(kind, tmp_path):
    if text_of(kind) is not None:
        check_text_part(kind, tmp_path)
        return
    config = dict(text_part(CONFIG_MAPPING[kind]().to_dict()))
    request = CheckModelRequest(model_config=config, model_path=None, model_code=None, method=None, targets=())
    with pytest.raises(InputError) as caught:
        check_model(request)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 250


def test_a_model_whose_tokens_see_those_after_them_is_refused(tmp_path):
    for switch in ({"use_bidirectional_attention": True}, {"is_causal": False}, {"use_bidirectional_attention": "all"}):
        with pytest.raises(InputError, match=f"{next(iter(switch))} is (true|false|all)"):
            refuse_two_way(switch, origin="config.json")
    refuse_two_way({"use_bidirectional_attention": "vision", "is_causal": True}, origin="config.json")


def test_a_text_part_is_read_from_a_flat_config_and_tied_as_the_outer_one_says():
    flat = {
        "hidden_size": 64, "model_type": "qwen2_5_vl", "vision_config": {}, "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 9,
    }  # fmt: skip
    part = text_part(flat)
    assert part["model_type"] == "qwen2" and part["rope_scaling"] == {"type": "default"} and part["tie_word_embeddings"]
    assert part["rms_norm_eps"] == 1e-5 and not {"vision_config", "image_token_id"} & part.keys()
    outer = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}}
    ties = [text_part(outer, has_head=each).get("tie_word_embeddings") for each in (True, False, None)]
    assert ties == [False, True, None]
    assert text_part({**outer, "tie_word_embeddings": False}, has_head=False)["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"])
def test_a_twin_has_the_defaults_of_the_part_that_it_stands_for(kind):
    ours = AutoConfig.for_model(**text_part({"model_type": "x", "text_config": {"model_type": kind}})).to_dict()
    sizes = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_types",
    }  # fmt: skip
    own = CONFIG_MAPPING[kind]().to_dict()
    differing = {name for name in own.keys() & ours.keys() - sizes if own[name] != ours[name]}
    assert differing <= {"model_type", "bos_token_id", "eos_token_id", "tie_word_embeddings"}


FORMATS = {
    "fp8": (LLAMA, as_fp8), "fp8 experts": ({**FP8_EXPERTS, "moe_intermediate_size": 32}, as_fp8),
    "fp8 of a tensor": (LLAMA, lambda folder: as_fp8(folder, None)), "mxfp4": (GPT_OSS, as_mxfp4),
    "ragged": (DEEPSEEK, as_fp8), "ragged experts": (FP8_EXPERTS, as_fp8),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_fp8_and_mxfp4_are_decoded_to_the_values_that_they_stand_for_row_by_row_as_well(name, tmp_path):
    config, convert = FORMATS[name]
    folder = save_new(tmp_path / "stored", config)
    decoded = convert(folder)
    plain = save_new(tmp_path / "plain", config)
    save_weights(plain, {each: value.contiguous() for each, value in decoded.items()})
    for dtype in (torch.bfloat16, torch.float32):
        meta_model, model = loaded(folder, dtype)
        held, expected = model.state_dict(), loaded(plain, dtype)[1].state_dict()
        assert held.keys() == expected.keys() and all(torch.equal(held[each], expected[each]) for each in held)
        if not name.startswith("ragged"):  # W66
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
            assert all(torch.equal(held[each], theirs[each]) for each in held)
        for each in meta_model.wanted:
            rows = [rows_of(meta_model, each, *ends) for ends in ((0, 1), (1, len(held[each])))]
            assert torch.equal(torch.cat(rows).to(dtype), held[each])
    config = model.config.to_dict()
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in config and "quantization_config" not in saved_config(tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float32}


def save_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rows_of(meta_model: MetaModel, name: str, start: int, stop: int) -> torch.Tensor:
    seam: Any = meta_model.source
    rows = seam._reader.read_rows(name, start, stop)
    assert isinstance(rows, torch.Tensor)
    return rows


def saved_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(("name", "operation"), [("fp8 experts", decoding.Fp8), ("mxfp4", decoding.Mxfp4)])
def test_experts_are_decoded_without_those_that_are_not_asked_for(name, operation, tmp_path, monkeypatch):
    config, convert = FORMATS[name]
    convert(save_new(tmp_path, config))
    meta_model, model = loaded(tmp_path)
    decode, seen = operation.convert, list[int]()

    def note(self: Any, inputs: dict[str, Any], **settings: Any) -> Any:
        seen.extend(len(parts) if operation is decoding.Fp8 else len(parts[0]) for parts in inputs.values())
        return decode(self, inputs, **settings)

    monkeypatch.setattr(operation, "convert", note)
    stacked = [each for each in meta_model.wanted if "experts" in each and model.get_parameter(each).dim() == 3]
    for each in stacked:
        rows_of(meta_model, each, 1, 3)
    assert stacked and {*seen} == {2}
    seen.clear()
    monkeypatch.setattr(weight_files, "SLICE_BYTES", 1)
    seam: Any = meta_model.source
    for each in stacked:
        assert torch.equal(seam._reader.read(each), model.get_parameter(each))
    assert {*seen} == {1}, "one after the other"


def test_w66_transformers_divides_a_matrix_evenly_among_its_scales(tmp_path):
    folder = save_new(tmp_path / "stored", FP8_EXPERTS)  # 24 rows of blocks of 16
    decoded = as_fp8(folder)
    ours = loaded(folder)[1].state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    expected = torch.stack([decoded[f"model.layers.0.mlp.experts.{each}.down_proj.weight"] for each in range(4)])
    assert torch.equal(ours[name], expected) and not torch.equal(theirs[name], expected)


def test_weights_beside_scales_that_nothing_reads_are_refused(tmp_path):
    folder = save_new(tmp_path / "stored", LLAMA)
    as_fp8(folder)
    config = saved_config(folder)
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"down_proj.weight is quantised, as there is .*_scale_inv"):
        loaded(folder)


def test_values_that_stand_for_others_without_scales_are_refused(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = save_new(tmp_path / "whole numbers", LLAMA)
    tensors = load_file(folder / "model.safetensors")
    save_weights(folder, {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(InputError, match=rf"{name} is stored in int8 and no scales"):
        loaded(folder)
    for config in (LLAMA, FP8_EXPERTS):
        folder = save_new(tmp_path / config["model_type"], config)
        as_fp8(folder)
        tensors = load_file(folder / "model.safetensors")
        del tensors[min(each for each in tensors if each.endswith("up_proj.weight_scale_inv"))]
        save_weights(folder, tensors)
        with pytest.raises(InputError, match=r"is stored in float8_e4m3fn and no scales|count mismatch"):
            loaded(folder)


def test_two_tensors_of_one_place_are_refused(tmp_path):
    folder = save_new(tmp_path / "stored", LLAMA)
    tensors = load_file(folder / "model.safetensors")
    save_weights(folder, {**tensors, "norm.weight": tensors["model.norm.weight"].clone()})
    with pytest.raises(InputError, match=r"model.norm.weight and norm.weight are both its model.norm.weight"):
        loaded(folder)


@pytest.mark.parametrize(("kind", "doubly", "skipped"), [("nf4", True, ()), ("fp4", False, ("o_proj", "lm_head"))])
def test_a_base_in_bitsandbytes_4_bit_keeps_its_bytes_and_its_export_has_them_decoded(kind, doubly, skipped, tmp_path):
    base = save_new(tmp_path / "base", LLAMA)
    folder = as_bnb(base, tmp_path / "stored", kind=kind, doubly=doubly, skipped=skipped)
    files, tensors = files_of(folder), load_file(folder / "model.safetensors")
    quant = Quant.NF4_DQ if doubly else Quant.NF4
    assert (files.weights.treatment, files.weights.quant) == (Treatment.ADAPTED, quant)
    packed = sorted(name for name in tensors if f"{name}.absmax" in tensors)
    assert packed_weights(check_weights(folder)) == sum(2 * tensors[name].numel() for name in packed)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for storage in (torch.uint8, torch.bfloat16):
        kept = Packing(quant=quant, compute=torch.bfloat16, storage=storage, works_on=CPU, lives_on=CPU)
        meta_model, model = loaded(folder, torch.bfloat16, kept)
        assert sorted(meta_model.packed) == packed and len(packed) == (14 if doubly else 12)
        for name in packed:
            ours, other = model.get_parameter(name), theirs.get_parameter(name)  # of bitsandbytes
            assert torch.equal(ours.data.view(torch.uint8).flatten(), tensors[name].flatten())
            decoded = [dequantize_4bit(each.data, each.quant_state) for each in (ours, other)]
            assert torch.equal(*decoded)
    plan = run_of(folder, Method.QLORA, precision=Precision.BF16_MIXED, config=LLAMA)
    plan = replace(plan, model_config=files.config, model_shape=replace(plan.model_shape, quant=quant))
    run_dir = save_run(tmp_path / "run", plan)
    export(run_dir, tmp_path / "adapters")
    done = export(run_dir, tmp_path / "merged", merge=True)
    assert len(done.checks) == 2 and saved_config(tmp_path / "merged")["dtype"] == "bfloat16"
    assert "quantization_config" not in saved_config(tmp_path / "merged")
    merged, whole = (load_file(each / "model.safetensors") for each in (tmp_path / "merged", base))
    assert merged.keys() == whole.keys()


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_a_run_on_the_text_part_of_a_model_with_vision_is_exported_for_text_and_its_adapters_for_the_whole(
    method, tmp_path
):
    save_miniature("gemma3", tmp_path / "whole")
    files = files_of(tmp_path / "whole")
    plan = run_of(tmp_path / "whole", method, config=files.config)
    plan = replace(plan, model_config=files.config)
    run_dir = save_run(tmp_path / "run", plan)
    merged = export(run_dir, tmp_path / "text", merge=method is Method.LORA)
    assert len(merged.checks) >= 1 and saved_config(tmp_path / "text")["model_type"] == "gemma3_text"
    if method is Method.LORA:
        done = export(run_dir, tmp_path / "adapters")
        assert done.checks, "PEFT put them into the whole model, whose logits of text are those that were trained"
        names = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
        assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
        assert "Gemma3ForConditionalGeneration" in (tmp_path / "adapters" / "README.md").read_text()


def test_every_format_that_transformers_registers_is_decoded_kept_or_refused():
    treatments: dict[Treatment, set[str]] = {}
    for name in AUTO_QUANTIZATION_CONFIG_MAPPING:
        method, _, bits = name.partition("_") if name.startswith("bitsandbytes_") else (name, "", "")
        found = weight_format({"quantization_config": {"quant_method": method, f"load_in_{bits}": True}})
        assert found is not None
        treatments.setdefault(found.treatment, set()).add(name)
    assert treatments[Treatment.DECODED] == {"fp8", "mxfp8", "mxfp4"}
    assert treatments[Treatment.ADAPTED] == {"bitsandbytes_4bit"}
    assert sum(map(len, treatments.values())) > 20


def test_4_bit_tensors_that_are_no_matrices_of_the_model_are_refused(tmp_path):
    folder = as_bnb(save_new(tmp_path / "base", LLAMA), tmp_path / "stored")
    config = {**saved_config(folder), "intermediate_size": 80}
    (folder / "config.json").write_text(json.dumps(config))
    kept = Packing(quant=Quant.NF4_DQ, compute=torch.bfloat16, storage=torch.uint8, works_on=CPU, lives_on=CPU)
    with pytest.raises(InputError, match=r"has shape .* of different models"):
        loaded(folder, torch.bfloat16, kept)
