"""What a config.json shows of its folder: the part that is a language model, and the format of its weights.

A checkpoint with vision or sound describes its language model in `text_config`; Qwen2-VL and Qwen2.5-VL are published
with its fields at the top level. That part is planned, trained and exported, as the type that transformers
registers for causal language models. Where transformers has the part only inside the larger model, `_TWINS` names the
causal type that computes the same of text from the same tensors: positions of an image have three axes, those of text
one. Whether the head is the embedding is decided by the outer config, as in transformers.

Weights that are quantised are marked by `quantization_config` (https://huggingface.co/docs/transformers/quantization).
FP8 and MXFP4 are decoded while they are read. The 4-bit layers of bitsandbytes stay as they are, under adapters.
Everything else is refused, by whatever name.
"""

from collections.abc import Mapping, Set
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.strategy import Method, Quant
from shardwise.trainer.spec.value import Value

Config = Mapping[str, Any]

_QWEN2_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
_QWEN3_VL = {"rope_theta": 5e5, "max_position_embeddings": 128000}
_QWEN3_VL_MOE = {
    **_QWEN3_VL,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_TWINS: Mapping[str, tuple[str, Config, Config]] = MappingProxyType(
    {  # the causal type; defaults of the part's own config class that differ; fields that the part has none of
        "qwen2_vl_text": ("qwen2", _QWEN2_VL, {}),
        "qwen2_5_vl_text": ("qwen2", _QWEN2_VL, {}),
        "qwen3_vl_text": ("qwen3", _QWEN3_VL, {}),
        "qwen3_vl_moe_text": ("qwen3_moe", _QWEN3_VL_MOE, {"norm_topk_prob": True}),
    }
)
_FLAT = frozenset({"qwen2_vl", "qwen2_5_vl"})  # published without `text_config`
_OF_OTHER_PARTS = ("vision_", "image_", "video_", "audio_")
_OUTER = frozenset({"text_config", "model_type", "architectures"})
_FORMAT = "quantization_config"


def text_part(config: Config, *, has_head: bool | None = None) -> Config:
    """The config of the language model inside one with vision or sound, of any other the same; without its format.

    Where the outer config does not decide if the head is the embedding, the weights do: `has_head` of them, if known.
    """
    kind, text = str(config.get("model_type")), config.get("text_config")
    if isinstance(text, Mapping) and not config.get("is_encoder_decoder"):
        part = dict(text)
    elif kind in _FLAT:
        part = {name: each for name, each in config.items() if name not in _OUTER}
        part = {name: each for name, each in part.items() if not name.startswith(_OF_OTHER_PARTS)}
    else:
        return without_format(config)
    part.pop(_FORMAT, None)
    part["model_type"] = part.get("model_type") or f"{kind}_text"
    if "auto_map" in config:
        part["auto_map"] = config["auto_map"]
    outer = config.get("tie_word_embeddings")
    if isinstance(outer, bool):
        part["tie_word_embeddings"] = outer or (kind in _FLAT and bool(part.get("tie_word_embeddings")))
    elif has_head is not None:
        part["tie_word_embeddings"] = not has_head
    return _as_causal(part)


def without_format(config: Config) -> Config:
    """The config without the format of the weights, which is that of a file."""
    return {name: each for name, each in config.items() if name != _FORMAT}


def _as_causal(part: Config) -> Config:
    """A text part under the causal type that computes the same, if its own type is none."""
    if part["model_type"] not in _TWINS:
        return part
    model_type, defaults, fixed = _TWINS[part["model_type"]]
    causal = {**defaults, **part, **fixed, "model_type": model_type}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(causal.get(name), Mapping):
            rope = {key: "default" if each == "mrope" else each for key, each in causal[name].items()}
            causal[name] = {key: each for key, each in rope.items() if not key.startswith("mrope_")}
    return causal


def refuse_two_way(config: Config, *, origin: str) -> None:
    """InputError for a model whose tokens see those after them, as embedding models do; it predicts nothing."""
    switch = "is_causal" if config.get("is_causal") is False else "use_bidirectional_attention"
    if switch == "is_causal" or config.get(switch) in (True, "all"):
        raise InputError(
            f"{origin}: {switch} is {str(config[switch]).lower()}: its tokens see those after them, so it is no causal "
            "language model; start from the model that it was made from"
        )


class Treatment(StrEnum):
    """What is done with weights that are stored in fewer bits than 16."""

    DECODED = "decoded"  # to 16 bit, or 32, while they are read
    ADAPTED = "adapted"  # retained as they are, under adapters
    REFUSED = "refused"


class WeightFormat(Value, frozen=True, kw_only=True):
    """The format of quantised weights."""

    name: str
    treatment: Treatment
    quant: Quant | None = None  # of 4-bit weights that are retained

    @property
    def note(self) -> str:
        """A line for the plan."""
        if self.treatment is Treatment.ADAPTED:
            return f"the base stays in {self.name}, as it is stored; adapters are trained on it"
        return f"the weights are stored in {self.name} and decoded while they are read"


_DECODED = frozenset({"fp8", "mxfp8", "mxfp4"})
_WHOLE_TYPES = frozenset({"F64", "F32", "F16", "BF16"})  # as safetensors calls them


def format_settings(config: Config) -> Config | None:
    """The settings of the format of the weights of a config.json, or of its text part; None if they have none."""
    text = config.get("text_config")
    settings = config.get(_FORMAT) or (text.get(_FORMAT) if isinstance(text, Mapping) else None)
    return settings if isinstance(settings, Mapping) else None


def weight_format(config: Config) -> WeightFormat | None:
    """The format of the weights of a config.json, or of its text part; None if they are not quantised."""
    settings = format_settings(config)
    if settings is None:
        return None
    bits = next((bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit")), None)
    if bits is not None:
        quant = Quant.NF4_DQ if settings.get("bnb_4bit_use_double_quant") else Quant.NF4
        is_4_bit = bits == 4
        return WeightFormat(
            name=f"bitsandbytes {bits} bit",
            treatment=Treatment.ADAPTED if is_4_bit else Treatment.REFUSED,
            quant=quant if is_4_bit else None,
        )
    name = str(settings.get("quant_method") or "an unnamed format")
    return WeightFormat(name=name, treatment=Treatment.DECODED if name in _DECODED else Treatment.REFUSED)


def refuse_plain_weights(config: Config, stored_types: Set[str], *, origin: str) -> None:
    """InputError for a format of weights that is none, or that none of the files' types, if they are known, is of.

    transformers would make scales of its own for weights in 16 bit. Those under bitsandbytes' name are quantised anew.
    """
    settings = config.get(_FORMAT)
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(
            f"{origin}: {_FORMAT} must be an object, not {shown(settings)}; remove it, or download it again"
        )
    weights = weight_format(config)
    if weights is None or weights.quant is not None or not stored_types or not stored_types <= _WHOLE_TYPES:
        return
    raise InputError(
        f"{origin}: {_FORMAT} has the weights in {weights.name}, and the files have all of them in "
        f"{', '.join(sorted(stored_types))}; remove {_FORMAT}, or download the model again"
    )


def refuse_format(weights: WeightFormat | None, *, origin: str, method: Method | None, source: str | None) -> None:
    """InputError for weights that cannot be the base of a method; `source` is the model they were quantised from.

    `method` is None where the planner chooses it.
    """
    if weights is None or weights.treatment is Treatment.DECODED:
        return
    start = f"start from the 16-bit ones: model.name={source}" if source else "start from the 16-bit ones"
    if weights.treatment is Treatment.REFUSED:
        raise InputError(f"{origin}: its weights are quantised already ({weights.name}); {start}")
    if method not in (None, Method.QLORA):
        raise InputError(
            f"train.method: {method}: {origin} holds {weights.name} weights, which adapters alone can be trained on; "
            f"use train.method=qlora, or {start}"
        )
