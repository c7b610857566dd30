"""The dimensions of a causal language model, from its Hugging Face config.json alone.

Covered: decoder-only models with one kind of block (Llama, Mistral, Qwen2, Qwen3). Parameter counts are exact for
them: tests build each on the meta device with transformers and compare. An architecture not in `_READERS` is refused
rather than guessed at.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from trainer.spec.errors import InputError
from trainer.spec.value import Value


class Norm(StrEnum):
    """The normalisation of a block: RMSNorm runs as a chain of kernels, LayerNorm as one."""

    RMS = "rms"
    LAYER = "layer"


class Linear(Value, frozen=True, kw_only=True):
    """The weight of one linear layer of a block."""

    name: str
    num_inputs: int
    num_outputs: int
    has_bias: bool = False

    @property
    def num_parameters(self) -> int:
        return self.num_inputs * self.num_outputs + (self.num_outputs if self.has_bias else 0)


class ModelShape(Value, frozen=True, kw_only=True):
    """Dimensions of a model; sizes are elements."""

    model_type: str
    block_class: str  # the class FSDP wraps and checkpointing recomputes, in transformers
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int | None
    is_tied: bool  # lm_head shares the embedding's weight
    linears: tuple[Linear, ...]  # of one block, in the order they run
    norm: Norm = Norm.RMS
    norm_parameters_per_block: int = 0
    is_gated: bool = True
    sliding_window: int | None = None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def linear_parameters_per_block(self) -> int:
        """Weights of the linear layers of one block, biases left out."""
        return sum(linear.num_inputs * linear.num_outputs for linear in self.linears)

    @property
    def parameters_per_block(self) -> int:
        return sum(linear.num_parameters for linear in self.linears) + self.norm_parameters_per_block

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Weights of lm_head that are not the embedding's."""
        return 0 if self.is_tied else self.embedding_parameters

    @property
    def num_parameters(self) -> int:
        return (
            self.num_layers * self.parameters_per_block
            + self.embedding_parameters
            + self.head_parameters
            + self.hidden_size
        )


def read_model_shape(config: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
    """The shape a config describes; InputError where the architecture or a field is not understood."""
    model_type = config.get("model_type")
    reader = _READERS.get(str(model_type))
    if reader is None:
        raise InputError(
            f"{origin}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(_READERS))}"
        )
    try:
        shape = reader(config)
    except KeyError as error:
        raise InputError(f"{origin}: {model_type} needs {error.args[0]!r}, which is missing") from None
    problems = [
        f"{origin}: {name} must be a positive whole number, not {value!r}"
        for name in ("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        if not isinstance(value := getattr(shape, name), int) or value < 1
    ]
    if problems:
        raise InputError("\n".join(problems))
    if shape.num_heads % shape.num_kv_heads:
        raise InputError(
            f"{origin}: num_attention_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}"
        )
    return shape


def _llama_like(
    config: Mapping[str, Any], *, block_class: str, qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool
) -> ModelShape:
    hidden, ffn = _whole(config, "hidden_size"), _whole(config, "intermediate_size")
    num_heads = _whole(config, "num_attention_heads")
    num_kv_heads = _whole(config, "num_key_value_heads", default=num_heads)
    head_dim = _whole(config, "head_dim", default=hidden // num_heads)
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    return ModelShape(
        model_type=str(config["model_type"]),
        block_class=block_class,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=config.get("max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        linears=(
            Linear(name="q_proj", num_inputs=hidden, num_outputs=query, has_bias=qkv_bias),
            Linear(name="k_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias),
            Linear(name="v_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias),
            Linear(name="o_proj", num_inputs=query, num_outputs=hidden, has_bias=output_bias),
            Linear(name="gate_proj", num_inputs=hidden, num_outputs=ffn, has_bias=mlp_bias),
            Linear(name="up_proj", num_inputs=hidden, num_outputs=ffn, has_bias=mlp_bias),
            Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden, has_bias=mlp_bias),
        ),
        norm_parameters_per_block=2 * hidden + (2 * head_dim if qk_norm else 0),
        sliding_window=config.get("sliding_window"),
    )


def _whole(config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise KeyError(name)
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config.json: {name} must be a positive whole number, not {value!r}")
    return value


def _llama(config: Mapping[str, Any]) -> ModelShape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(
        config,
        block_class="LlamaDecoderLayer",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=False,
    )


def _mistral(config: Mapping[str, Any]) -> ModelShape:
    return _llama_like(
        config, block_class="MistralDecoderLayer", qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False
    )


def _qwen2(config: Mapping[str, Any]) -> ModelShape:
    return _llama_like(
        config, block_class="Qwen2DecoderLayer", qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False
    )


def _qwen3(config: Mapping[str, Any]) -> ModelShape:
    bias = bool(config.get("attention_bias", False))
    return _llama_like(
        config, block_class="Qwen3DecoderLayer", qkv_bias=bias, output_bias=bias, mlp_bias=False, qk_norm=True
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
