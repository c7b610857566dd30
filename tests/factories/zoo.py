"""A small configuration, and a model with random weights, of every causal model that transformers registers."""

from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwise.trainer.simulation.miniature import miniature

WINDOW = 16  # tokens that a block with a window sees
SCALE = 0.4  # of logits, where a default configuration has 1
NUM_IDS = 256  # every vocabulary has as many

NOT_BUILT = MappingProxyType(
    {
        "blt": "its inputs are bytes and patches of them",
        "gemma4_assistant": "it reads hidden states of another model",
        "gemma4_unified_assistant": "it reads hidden states of another model",
        "git": "its text follows images",
        "musicgen": "it models codes of sound, several at a time",
        "musicgen_melody": "it models codes of sound, several at a time",
    }
)
NOT_TRAINED = ("cpmant", "prophetnet", "reformer")  # a plan refuses them: a test compares this with its measurement
# The newest families of each laboratory whose text models are downloaded and fine-tuned most, and the older models that
# most tutorials, benchmarks and published fine-tunes use; of a family each type that transformers has of its own.
USED = (
    "llama", "llama4_text", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "mistral", "ministral3", "mixtral", "phi", "phi3", "phimoe", "gpt_oss",
    "deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "granite", "granitemoehybrid", "olmo2", "olmo3", "olmoe",
    "falcon", "falcon_h1", "mamba2", "nemotron_h", "jamba", "lfm2", "smollm3", "cohere2", "exaone4", "starcoder2",
    "gpt2", "gpt_neox", "opt", "bloom", "stablelm", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "ernie4_5_moe",
    "minimax_m2",
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {  # without which the class refuses to make one
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": WINDOW},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}


def types() -> tuple[str, ...]:
    return tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILT)))


@cache
def config_of(model_type: str) -> PreTrainedConfig:
    """The small configuration of a type; of its text part where that is a type of its own."""
    config = CONFIG_MAPPING[model_type](**_DEFAULTS.get(model_type, {}))
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = text
    fields = _FIELDS.get(config.model_type, {})
    small = miniature(config, **fields)
    return type(config).from_dict({**small.to_dict(), **_more_kinds(small), **fields})


def _more_kinds(small: PreTrainedConfig) -> dict[str, Any]:
    """Fields that make a decoder of an encoder, scale logits, and give half of the blocks a window that is off."""
    fields = small.to_dict()
    found: dict[str, Any] = {name: True for name in ("is_decoder", "causal", "use_sliding_window") if name in fields}
    scales = ("logits_scaling", "logit_scale", "lm_head_multiplier")
    found |= {name: SCALE for name in scales if fields.get(name) == 1}
    if "sliding_window" in fields:
        found["sliding_window"] = WINDOW
        if fields.get("layer_types") == ["full_attention"] * 2:
            found["layer_types"] = ["sliding_attention", "full_attention"]
    return found


def model_of(
    model_type: str, *, dtype: torch.dtype = torch.float32, attention: str | None = None, noise: float = 0.08,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A model in evaluation mode, whose weights are large enough that documents have different losses."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config or config_of(model_type), dtype=dtype, attn_implementation=attention
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(dtype) * noise)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model
