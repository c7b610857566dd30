"""A tiny config.json of every architecture, with dimensions that all differ, and of their variants."""

from typing import Any

_SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WITHOUT_GROUPS = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
_GPT = {
    "vocab_size": 200, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {**_SIZES, **_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 56}
_QWEN3_MOE = {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 24}
_FALCON = {**_WITHOUT_GROUPS, "model_type": "falcon"}
del _FALCON["intermediate_size"]

_PLAIN = ("llama", "qwen2", "phi3", "stablelm", "olmo", "olmo2", "cohere", "starcoder2")
TINY: dict[str, dict[str, Any]] = {
    **{name: {**_SIZES, "model_type": name} for name in _PLAIN},
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 16},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 24},
    "gemma2": {**_SIZES, "model_type": "gemma2", "head_dim": 24, "sliding_window": 16},
    "gemma3_text": {**_SIZES, "model_type": "gemma3_text", "head_dim": 24, "sliding_window": 16},
    "phi": {**_WITHOUT_GROUPS, "model_type": "phi"},
    "gpt2": {**_GPT, "model_type": "gpt2"},
    "gpt_bigcode": {**_GPT, "model_type": "gpt_bigcode"},
    "gpt_neox": {**_WITHOUT_GROUPS, "model_type": "gpt_neox"},
    "falcon": _FALCON,
    "opt": {**_WITHOUT_GROUPS, "model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 64},
    "mpt": {"model_type": "mpt", "vocab_size": 200, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 96},
    "gemma": {**_SIZES, "model_type": "gemma", "head_dim": 24},
    "granite": {
        **_SIZES, "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.25,
        "attention_multiplier": 0.125, "logits_scaling": 4.0,
    },
    "olmo3": {**_SIZES, "model_type": "olmo3", "sliding_window": 16},
    "smollm3": {**_SIZES, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "glm": {**_SIZES, "model_type": "glm", "head_dim": 24},
    "glm4": {**_SIZES, "model_type": "glm4", "head_dim": 24},
    "mixtral": {**_SIZES, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": _SHARED,
    "qwen3_moe": _QWEN3_MOE,
}  # fmt: skip


def _like(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**TINY[model_type], **fields}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": _like("llama", attention_bias=True, mlp_bias=True),
    "llama, tied, wide heads": _like("llama", tie_word_embeddings=True, head_dim=20),
    "llama without grouped queries": {**_WITHOUT_GROUPS, "model_type": "llama", "head_dim": None},
    "gemma with biases": _like("gemma", attention_bias=True, tie_word_embeddings=False),
    "granite with biases, tied": _like("granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "olmo3 with layer types": _like("olmo3", layer_types=["full_attention", "sliding_attention", "full_attention"]),
    "smollm3 with windows and biases": _like(
        "smollm3", use_sliding_window=True, sliding_window=16, attention_bias=True
    ),
    "glm fully rotated": _like("glm", partial_rotary_factor=1.0, attention_bias=False),
    "cohere with norms of query and key": _like("cohere", use_qk_norm=True),
    "starcoder2 with a window": _like("starcoder2", sliding_window=16, use_bias=False),
    "mistral without window": _like("mistral", sliding_window=None),
    "qwen2 with windows in the last blocks": _like(
        "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3 with biases": _like("qwen3", attention_bias=True),
    "gemma2 with biases, uncapped": _like("gemma2", attention_bias=True, final_logit_softcapping=None),
    "gemma3 with a capped head": _like("gemma3_text", final_logit_softcapping=5.0, sliding_window_pattern=2),
    "gemma3 with layer types": _like(
        "gemma3_text", layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
    "phi3 partly rotated and tied": _like("phi3", partial_rotary_factor=0.75, tie_word_embeddings=True),
    "phi3 with a window": _like("phi3", sliding_window=16),
    "phi with norms and groups": _like("phi", qk_layernorm=True, num_key_value_heads=2),
    "stablelm with everything": _like(
        "stablelm", use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.5
    ),
    "gpt2 with other fields' names and a narrow MLP": {
        **{name: value for name, value in _WITHOUT_GROUPS.items() if name != "intermediate_size"},
        "model_type": "gpt2",
        "n_inner": 40,
    },
    "gpt_bigcode with all heads": _like("gpt_bigcode", multi_query=False),
    "gpt_neox in sequence, without biases": _like(
        "gpt_neox", use_parallel_residual=False, attention_bias=False, rotary_pct=0.5, tie_word_embeddings=True
    ),
    "falcon 40b": _like("falcon", new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
    "falcon 11b": _like("falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon rw": _like("falcon", alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "mpt, untied": _like("mpt", tie_word_embeddings=False, attn_config={"attn_pdrop": 0, "alibi": True}),
    "mixtral with the other name of its experts": _like("mixtral", num_local_experts=None, num_experts=5),
    "qwen2_moe with every second block dense": _like("qwen2_moe", decoder_sparse_step=2, qkv_bias=False),
    "qwen2_moe with windows": _like("qwen2_moe", use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3_moe with a dense block": _like("qwen3_moe", mlp_only_layers=[1], attention_bias=True),
    "qwen3_moe, every block dense": _like("qwen3_moe", mlp_only_layers=[0, 1, 2]),
    "qwen3_moe as transformers saves it": {
        **{name: value for name, value in _QWEN3_MOE.items() if name != "num_experts"},
        "num_local_experts": 5,
    },
}
del VARIANTS["mixtral with the other name of its experts"]["num_local_experts"]
