"""transformers' config object from the config of a plan."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shardwise.trainer.spec.model.config_json import decoded


def config_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The config object of a config.json; its dtype is left out, which the plan decides."""
    left_out = ("model_type", "dtype", "torch_dtype")
    fields = {name: decoded(value) for name, value in config.items() if name not in left_out}
    made: PreTrainedConfig = AutoConfig.for_model(config["model_type"], **fields)
    return made
