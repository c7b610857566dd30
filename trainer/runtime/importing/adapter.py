"""A PEFT adapter put into its base while that is copied, tensor by tensor.

    W' = W + s B A                                   LoRA; s = alpha / rank, or alpha / sqrt(rank) for rsLoRA
    W' = m (W + s B A) / |W + s B A|_row             DoRA (arXiv:2402.09353)
    E' = E + s (B A)^T                               LoRA of an embedding, A [rank, vocabulary], B [width, rank]

Sums are made in fp32 and rounded once, to the type of the base. Weights that the adapter has whole (`modules_to_save`)
take the place of the base's. Any other kind of adapter is refused by its name.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.runtime.importing.tensors import Stored, Tensors
from trainer.spec.errors import InputError

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that are taken off the base
_UNKNOWN = (
    "use_qalora",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
)


class _Lora(NamedTuple):
    """What stands beside one weight."""

    a: Stored
    b: Stored
    magnitudes: Stored | None
    scaling: float
    is_embedding: bool
    is_transposed: bool  # the base keeps its weight as [in, out]


def merged(
    base: Tensors, model_names: Mapping[str, str], adapter: Tensors, config: Mapping[str, Any], origin: Path
) -> dict[str, Stored]:
    """The base's tensors with the adapter in them, merged when they are read.

    `model_names`: what the model calls the base's tensors. InputError where a part of the adapter has no place.
    """
    _check_config(config, origin)
    parts, whole = _parts(adapter, origin)
    by_model_name = {model_name: name for name, model_name in model_names.items()}
    tensors = dict(base)
    for name, stored in whole.items():
        place = by_model_name.get(name)
        if place is None or base[place].shape != stored.shape:
            raise InputError(
                f"{origin}: its {name} {stored.shape} has no place of that shape in the base; is it the adapter's base?"
            )
        tensors[place] = stored
    for module, found in parts.items():
        place = by_model_name.get(f"{module}.weight")
        if place is None:
            raise InputError(f"{origin}: adapts {module}, which the base does not have as one weight")
        lora = _lora(module, found, config, origin)
        _check_shapes(lora, tensors[place], module, origin)
        tensors[place] = tensors[place]._replace(read=partial(_merge, tensors[place], lora))
    return tensors


def base_name(config: Mapping[str, Any]) -> str:
    """What the adapter calls its base, for a message."""
    return str(config.get("base_model_name_or_path") or "its base")[:200]


def _check_config(config: Mapping[str, Any], origin: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{origin}: is a {config.get('peft_type')} adapter; LoRA and DoRA are merged here")
    initial = str(config.get("init_lora_weights")).lower()
    if initial.startswith(_CHANGE_THE_BASE):
        raise InputError(
            f"{origin}: was initialised by {initial}, which changes the base as well;\n"
            "merge it by PEFT where it was trained"
        )
    found = [name for name in _UNKNOWN if config.get(name)]
    if found:
        raise InputError(f"{origin}: has {found[0]}, which is not merged here; merge it by PEFT: merge_and_unload()")


def _parts(adapter: Tensors, origin: Path) -> tuple[dict[str, dict[str, Stored]], dict[str, Stored]]:
    """The adapter's tensors by module and part, and those that are whole weights."""
    parts: dict[str, dict[str, Stored]] = {}
    whole: dict[str, Stored] = {}
    for key, stored in adapter.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.weight", ".weight")  # an adapted embedding, saved whole
        match = _PART.fullmatch(name)
        if match is not None:
            parts.setdefault(match["module"], {})[match["part"]] = stored
        elif "lora_" in name or not key.startswith(_PREFIX):
            raise InputError(f"{origin}: {key[:80]} is no tensor of a LoRA adapter")
        else:
            whole[name] = stored
    return parts, whole


def _lora(module: str, found: Mapping[str, Stored], config: Mapping[str, Any], origin: Path) -> _Lora:
    is_embedding = "lora_embedding_A" in found
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if not {*names} <= {*found}:
        raise InputError(f"{origin}: lacks A or B of {module}; save the adapter again")
    a, b = (found[name] for name in names)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise InputError(f"{origin}: A {a.shape} and B {b.shape} of {module} do not make a product")
    alpha = _of_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise InputError(f"{origin}: says no lora_alpha of {module}")
    scaling = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
    is_transposed = bool(config.get("fan_in_fan_out")) and not is_embedding
    return _Lora(a, b, found.get("lora_magnitude_vector"), scaling, is_embedding, is_transposed)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: object) -> object:
    """As PEFT's `get_pattern_key`: the first pattern that the end of a module's name has."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _check_shapes(lora: _Lora, weight: Stored, module: str, origin: Path) -> None:
    out_features, in_features = lora.b.shape[0], lora.a.shape[1]
    is_turned = lora.is_transposed or lora.is_embedding
    expected = (in_features, out_features) if is_turned else (out_features, in_features)
    if weight.shape != expected:
        raise InputError(f"{origin}: is of a {module} {expected}, that of the base is {weight.shape}")
    if lora.magnitudes is not None and (lora.is_embedding or torch.Size(lora.magnitudes.shape).numel() != out_features):
        raise InputError(f"{origin}: its magnitudes of {module} are not one for each of {out_features} rows")


def _merge(weight: Stored, lora: _Lora) -> Tensor:
    """The weight in its own type, laid out as it was."""
    base, a, b = weight.read().float(), lora.a.read().float(), lora.b.read().float()
    if lora.is_transposed or lora.is_embedding:
        base = base.t()
    total = torch.addmm(base, b, a, alpha=lora.scaling)
    if lora.magnitudes is not None:
        lengths = lora.magnitudes.read().float().reshape(-1)
        total *= (lengths / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
    if lora.is_transposed or lora.is_embedding:
        total = total.t()
    return total.to(weight.dtype).contiguous()
