"""The model with vision or sound that a text part was taken from, as transformers loads it with all of its parts.

Adapters of a text part are exported under the names that its layers have there, so that they fit the base as it is:
`PeftModel.from_pretrained(base, folder)`, and programs that serve the whole model.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.runtime.models.meta_model import causal_model
from shardwise.trainer.spec.plan import Plan

OF_EXPERTS = ".base_layer.lora_"  # PEFT puts one adapter of experts around another


class Outer(NamedTuple):
    """The class of the whole model, and where the text part is in it."""

    model_class: type[PreTrainedModel]
    inside: str  # `model.`: the beginning of a layer's name in the text model
    outside: str  # `model.language_model.`: in the whole model

    def name_of(self, name: str) -> str:
        """The name in the whole model of a parameter or module of the text model."""
        return f"{self.outside}{name.removeprefix(self.inside)}" if name.startswith(self.inside) else name

    def targets(self, layers: Iterable[str]) -> str:
        """PEFT's pattern for linear layers of the text part alone, by the last parts of their names."""
        dots = r"\."
        return f"{self.outside.replace('.', dots)}(.*{dots})?({'|'.join(layers)})"


def is_part(plan: Plan) -> bool:
    """True if the base of a plan is the text part of another model."""
    if plan.model_path is None or plan.model_code is not None:
        return False
    path = Path(plan.place_of(plan.model_path), "config.json")
    return path.is_file() and json.loads(path.read_bytes()).get("model_type") != plan.model_config["model_type"]


def outer_of(plan: Plan, adapters: Iterable[str]) -> Outer | None:
    """The model that adapters of these names fit, if the base of a plan is a part of it; None if it is none.

    None as well where transformers cannot build it here, and for adapters of experts in one tensor, which PEFT finds by
    the type of the model.
    """
    if not is_part(plan) or any(OF_EXPERTS in name for name in adapters):
        return None
    assert plan.model_path is not None
    folder = Path(plan.place_of(plan.model_path))
    architectures = json.loads((folder / "config.json").read_bytes()).get("architectures") or ()
    model_class = next((found for name in architectures if (found := _class(name))), None)
    if model_class is None:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"), no_init_weights():
            whole, part = model_class(config), causal_model(config_of(plan.model_config))
    except (ImportError, ValueError, TypeError, StrictDataclassError):  # a library for images that is not here
        return None
    outside, inside = (_path(model, model.get_input_embeddings()) for model in (whole, part))
    own = inside.rsplit(".", 1)[-1]
    if not outside.endswith(own):
        return None
    return Outer(model_class, inside.removesuffix(own), outside.removesuffix(own))


def _class(name: str) -> type[PreTrainedModel] | None:
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _path(model: nn.Module, module: nn.Module) -> str:
    paths: dict[nn.Module, str] = {each: path for path, each in model.named_modules()}
    return paths[module]
