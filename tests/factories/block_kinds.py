"""Small models with every kind of block that newer models have, by the kind: none of these has a closed form."""

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HALVES = ["linear_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "sinks, windows, experts with biases": {
        **_SIZES, "model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "latent attention, shared experts, a dense block": {
        **_SIZES, "model_type": "deepseek_v3", "num_hidden_layers": 4, "num_key_value_heads": 6, "q_lora_rank": 48,
        "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "head_dim": 16,
    },
    "linear attention, gated attention, a shared expert": {
        **_SIZES, "model_type": "qwen3_next", "num_hidden_layers": 4, "layer_types": _HALVES * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
    },
    "linear attention, dense": {
        **_SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "layer_types": _HALVES * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "state space, experts beside a shared one": {
        **_SIZES, "model_type": "granitemoehybrid", "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 48,
        "mamba_d_state": 24, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 64, "position_embedding_type": "nope",
    },
    "state space, attention and MLP in blocks of their own": {
        **_SIZES, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-",
        "mamba_num_heads": 8, "mamba_head_dim": 48, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 64,
        "mamba_expand": 2, "expand": 2,
    },
    "convolution": {
        **_SIZES, "model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_ff_dim": 320,
        "block_auto_adjust_ff_dim": False, "conv_L_cache": 3,
    },
    "chunks, experts beside a shared one": {
        **_SIZES, "model_type": "llama4_text", "num_hidden_layers": 4, "intermediate_size_mlp": 384,
        "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 64, "interleave_moe_layer_step": 2,
    },
    "windows, wider heads without, experts beside an MLP": {
        **_SIZES, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 64,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 1024,
    },
    "logits of its own": {**_SIZES, "model_type": "bert", "num_hidden_layers": 4, "is_decoder": True},
}  # fmt: skip
