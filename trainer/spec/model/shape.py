"""The dimensions of a causal language model, from its Hugging Face config.json alone.

Covered: the decoder-only architectures in `_READERS`. Parameter counts are exact for them: tests build each on the
meta device with transformers and compare, as they do for the class of the blocks and for what adapters can target.
Of a Gemma 3 config with a vision part, the text part is read. Not covered: anything else, which is refused rather
than guessed at.

What a shape consists of is in `architecture`, what a config may leave out in `config_fields`, and the readers, a
function for each model type, are in `llama_readers`, `gpt_readers` and `expert_readers`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.spec.errors import InputError
from trainer.spec.model.architecture import Linear, ModelShape, Norm, Positions
from trainer.spec.model.config_fields import Fields, fields_of
from trainer.spec.model.expert_readers import read_mixtral, read_qwen2_moe, read_qwen3_moe
from trainer.spec.model.gpt_readers import read_falcon, read_gpt2, read_gpt_bigcode, read_gpt_neox, read_mpt, read_phi
from trainer.spec.model.llama_readers import (
    read_gemma2,
    read_gemma3,
    read_llama,
    read_mistral,
    read_phi3,
    read_qwen2,
    read_qwen3,
    read_stablelm,
)

__all__ = ["Linear", "ModelShape", "Norm", "Positions", "read_model_shape", "supported_model_types", "text_part"]

_READERS: dict[str, Callable[[Fields], ModelShape]] = {
    "falcon": read_falcon,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt_bigcode,
    "gpt_neox": read_gpt_neox,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "mpt": read_mpt,
    "phi": read_phi,
    "phi3": read_phi3,
    "qwen2": read_qwen2,
    "qwen2_moe": read_qwen2_moe,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "stablelm": read_stablelm,
}


def supported_model_types() -> tuple[str, ...]:
    """The model types that a shape can be read from, sorted."""
    return tuple(sorted(_READERS))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model inside a Gemma 3 with vision; any other config as it is."""
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return config
    return {**text, "model_type": "gemma3_text"}


def read_model_shape(config: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
    """The shape a config describes; InputError where the architecture or a field is not understood."""
    config = text_part(config)
    model_type = config.get("model_type")
    reader = _READERS.get(str(model_type))
    if reader is None:
        raise InputError(
            f"{origin}: model_type {model_type!r} is not supported; supported: {', '.join(supported_model_types())}; "
            "`shardwise plan --simulate` predicts any model of transformers by a dry run"
        )
    try:
        shape = reader(fields_of(config, str(model_type), origin=origin))
    except KeyError as error:
        raise InputError(f"{origin}: {model_type} needs {error.args[0]!r}, which is missing") from None
    if shape.num_heads % shape.num_kv_heads:
        raise InputError(
            f"{origin}: num_attention_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}"
        )
    return shape
