"""Fields of a config.json as the readers in this folder read them.

A missing field has the default of that model's config class in transformers. The table below repeats the defaults of
all fields that a shape needs, since nothing here may import transformers; a test compares it with the installed
classes. The fields of a model's size (`hidden_size`, the number of layers, heads and tokens) have no default: a file
without them is refused. Gemma 3 is the exception, whose published files omit default values.

A field that is null is not missing: the readers treat it as the config class does.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.model.config_json import decoded
from shardwise.trainer.spec.value import Value

_NO_DROPOUT = {"attention_dropout": 0.0}
_GPT = {
    "n_positions": 1024,
    "n_inner": None,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_GEMMA = {
    **_NO_DROPOUT,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "layer_types": None,
}
_QWEN = {
    **_NO_DROPOUT,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_LAYERS = {"max_window_layers": 28, "layer_types": None}
_QWEN_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_PHI = {**_NO_DROPOUT, "num_key_value_heads": None, "resid_pdrop": 0.0, "tie_word_embeddings": False}
_LIKE_LLAMA = {
    **_NO_DROPOUT,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_GLM = {
    **_LIKE_LLAMA,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_LIKE_LLAMA, "head_dim": None, "mlp_bias": False},
    "mistral": {
        **_NO_DROPOUT,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    "qwen2": {**_QWEN, **_QWEN_LAYERS, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, **_QWEN_LAYERS, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
    },
    "gemma": {
        **_NO_DROPOUT,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "granite": {**_LIKE_LLAMA, "mlp_bias": False},
    "olmo": _LIKE_LLAMA,
    "olmo2": _LIKE_LLAMA,
    "olmo3": {**_LIKE_LLAMA, "sliding_window": 4096, "layer_types": None},
    "smollm3": {
        **_LIKE_LLAMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "cohere": {
        **_LIKE_LLAMA,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "use_qk_norm": False,
    },
    "starcoder2": {
        **_NO_DROPOUT,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "residual_dropout": 0.0,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "phi3": {**_PHI, "hidden_act": "silu", "max_position_embeddings": 4096, "sliding_window": None},
    "phi": {**_PHI, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "qk_layernorm": False},
    "stablelm": {
        **_NO_DROPOUT,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
    },
    "gpt2": {**_GPT, "activation_function": "gelu_new"},
    "gpt_bigcode": {**_GPT, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_neox": {
        **_NO_DROPOUT,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "opt": {
        **_NO_DROPOUT,
        "dropout": 0.1,
        "activation_function": "relu",
        "max_position_embeddings": 2048,
        "enable_bias": True,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": None,
        "tie_word_embeddings": True,
    },
    "mpt": {"expansion_ratio": 4, "max_seq_len": 2048, "attn_config": None, "tie_word_embeddings": True},
    "falcon": {
        **_NO_DROPOUT,
        "num_ln_in_parallel_attn": None,
        "num_kv_heads": None,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "hidden_dropout": 0.0,
    },
    "mixtral": {
        **_NO_DROPOUT,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2_moe": {
        **_QWEN,
        **_QWEN_LAYERS,
        **_QWEN_EXPERTS,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        **_QWEN,
        **_QWEN_EXPERTS,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
}

# Other names that transformers accepts for a field, by the name that is read here.
_GPT_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": _GPT_ALIASES,
    "gpt_bigcode": _GPT_ALIASES,
    "mpt": {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    "falcon": {"hidden_size": "n_embed"},
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}

MOST_LAYERS = 100_000  # far above any model; more would not be counted in reasonable time


class Fields(Value, frozen=True, kw_only=True):
    """A config with its defaults filled in; each read raises InputError for a value of another kind."""

    origin: str
    values: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        """True if the field is present and not null."""
        return self.values.get(name) is not None

    def whole(self, name: str, *, null: int | None = None, least: int = 1, most: int = 2**40) -> int:
        """A whole number; `null` if the field is missing or null."""
        value = self.values.get(name, null)
        value = null if value is None else value
        if value is None:
            raise KeyError(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive whole number" if least else "a whole number, zero or more"
            raise InputError(f"{self.origin}: {name} must be {kind}, not {shown(value)}")
        if value > most:
            raise InputError(f"{self.origin}: {name} must be at most {most}, not {shown(value)}")
        return value

    def number(self, name: str, *, null: float = 0.0) -> float:
        """A number, zero or more."""
        value = self.values.get(name)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InputError(f"{self.origin}: {name} must be a number, not {shown(value)}")
        return float(value)

    def cap(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def is_on(self, name: str) -> bool:
        """True if a switch is on; null is off."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise InputError(f"{self.origin}: {name} must be true or false, not {shown(value)}")
        return bool(value)

    def text(self, name: str) -> str:
        return str(self.values[name])

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of block numbers; empty if there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(index) is int and index >= 0 for index in value):
            raise InputError(f"{self.origin}: {name} must be a list of whole numbers, not {shown(value)}")
        return tuple(value)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names, one for each block."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise InputError(f"{self.origin}: {name} must be a list of names, not {shown(value)}")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        """An object in the config; empty if it is missing or null."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise InputError(f"{self.origin}: {name} must be an object, not {shown(value)}")
        return value

    def head_dim(self, *, hidden: int, num_heads: int) -> int:
        """`head_dim`, or an equal share of the hidden size for each head."""
        return self.whole("head_dim") if "head_dim" in self else self.equal_share(hidden=hidden, num_heads=num_heads)

    def equal_share(self, *, hidden: int, num_heads: int) -> int:
        """The hidden size divided by the number of heads, independent of `head_dim`."""
        if hidden % num_heads:
            raise InputError(
                f"{self.origin}: hidden size {hidden} is not a multiple of the number of attention heads {num_heads}"
            )
        return hidden // num_heads


def fields_of(config: Mapping[str, Any], model_type: str, *, origin: str) -> Fields:
    """The fields of a config of this type, under one name each, with defaults."""
    values = decoded(dict(config))
    for name, other in ALIASES.get(model_type, {}).items():
        if other in values:
            values.setdefault(name, values[other])
    return Fields(origin=origin, values={**DEFAULTS[model_type], **values})
