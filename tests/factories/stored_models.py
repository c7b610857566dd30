"""Folders in the formats that models are published in: FP8, MXFP4, bitsandbytes' 4 bit, and parts of larger models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwise.trainer.simulation.miniature import miniature

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FP8_EXPERTS = {**SIZES, **EXPERTS, "model_type": "qwen3_moe"}
GPT_OSS = {**SIZES, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **SIZES, "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_new(folder: Path, config: Mapping[str, Any]) -> Path:
    torch.manual_seed(3)
    model: Any = disturbed(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * (0.1 if weight.ndim > 1 else 0.02))
    return model


def change(folder: Path, settings: Mapping[str, Any], convert: Any) -> dict[str, torch.Tensor]:
    """Rewrites a folder of one file; `convert(name, tensor)` gives what is stored and what it stands for."""
    path = folder / "model.safetensors"
    stored, decoded = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(path).items():
        parts, decoded[name] = convert(name, tensor) or ({name: tensor}, tensor.float())
        stored |= parts
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(settings)}))
    return decoded


def as_fp8(folder: Path, block: tuple[int, int] | None = (16, 16)) -> dict[str, torch.Tensor]:
    """Matrices of the blocks in FP8 with a scale for each block, or one, as DeepSeek-V3 is published."""

    def convert(name: str, weight: torch.Tensor) -> Any:
        if weight.ndim != 2 or not name.endswith("proj.weight"):
            return None
        (rows, columns), (height, width) = weight.shape, block or weight.shape
        grid = (-(-rows // height), -(-columns // width))
        padded = torch.zeros(grid[0] * height, grid[1] * width)
        padded[:rows, :columns] = weight
        blocks = padded.view(grid[0], height, grid[1], width)
        scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-6)
        values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        decoded = (values.float() * scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
        held = values.view(padded.shape)[:rows, :columns].contiguous()
        return {name: held, f"{name}_scale_inv": scales if block else scales.view(())}, decoded

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    return change(folder, settings, convert)


def as_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Experts in MXFP4, as gpt-oss is published: two values to a byte, a power of two for 32 of them."""

    def convert(name: str, weight: torch.Tensor) -> Any:
        if weight.ndim != 3 or not name.endswith("proj"):
            return None
        experts, inputs, outputs = weight.shape
        generator = torch.Generator().manual_seed(len(name))
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(117, 124, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        values = torch.stack([_E2M1[(blocks & 15).long()], _E2M1[(blocks >> 4).long()]], dim=-1).flatten(-2)
        decoded = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, decoded

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return change(folder, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, convert)


def as_bnb(base: Path, folder: Path, *, kind: str = "nf4", doubly: bool = True, skipped: tuple[str, ...] = ()) -> Path:
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=doubly,
        bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=list(skipped) or None,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=settings)
    loaded.save_pretrained(folder)
    return folder


_OF_VISION = {"depth": 2, "embed_dim": 64, "text_hidden_size": 64, "out_hidden_size": 64}  # unknown to `miniature`
VISION_TYPES = tuple(sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))


def save_miniature(kind: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    found = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    whole = CONFIG_MAPPING[kind]()
    vision = getattr(whole, "vision_config", None) or whole
    for name in _OF_VISION.keys() & vars(vision):
        setattr(vision, name, _OF_VISION[name])
    config: Any = miniature(whole)
    if kind in ("qwen2_vl", "qwen2_5_vl"):  # sections that sum to half of a head
        config.text_config.rope_parameters["mrope_section"] = [2, 3, 3]
    model = disturbed(getattr(transformers, found)(config).float().eval())
    model.save_pretrained(folder)
    return model
