"""transformers' config object from the config of a plan, and the refusal of one that no model is built from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.model.config_json import decoded

# What transformers raises for a config with fields missing, of a wrong type or that do not go together.
_FAULTS = (
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError, ImportError),
    StrictDataclassError,
)


def config_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The config object of a config.json; its dtype is left out, which the plan decides."""
    left_out = ("model_type", "dtype", "torch_dtype")
    fields = {name: decoded(value) for name, value in config.items() if name not in left_out}
    made: PreTrainedConfig = AutoConfig.for_model(config["model_type"], **fields)
    return made


@contextmanager
def faults_of_config(config: Mapping[str, Any], *, origin: str) -> Iterator[None]:
    """Makes what transformers raises while it builds from a config an InputError that names its file and field."""
    try:
        yield
    except _FAULTS as error:
        raise InputError(f"{origin}: {_fault_of(config, error)}") from error


def refuse_padding(model: PreTrainedModel, *, origin: str) -> None:
    """InputError for a negative pad_token_id that torch counts from the last token, which then is not trained."""
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)  # a class of its own may lack it
    row = getattr(model.get_input_embeddings(), "padding_idx", None)
    if isinstance(pad, int) and pad < 0 and row is not None:
        raise InputError(
            f"{origin}: pad_token_id {pad} stands for token {row}, whose embedding would not be trained; "
            "write an id of the tokenizer, or null"
        )


def _fault_of(config: Mapping[str, Any], error: BaseException) -> str:
    model_type, pad, vocab_size = (config.get(name) for name in ("model_type", "pad_token_id", "vocab_size"))
    if isinstance(error, AssertionError) and isinstance(pad, int) and isinstance(vocab_size, int) and pad >= vocab_size:
        return f"pad_token_id {pad} is beyond its vocab_size {vocab_size}; write an id of the tokenizer, or null"
    sentence = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()  # the cause comes last
    if isinstance(error, KeyError) and error.args:
        named = [name for name, value in _texts(config) if value == error.args[0]]
        if named:
            return f"{named[0]} {shown(error.args[0])} is unknown to transformers for {model_type}; correct it"
        key = str(error.args[0])
        sentence = key if " " in key else f"{key} is missing, or unknown to it"
    return f"transformers does not build {model_type} from it: {sentence}"


def _texts(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The fields that are text or lists of text, by the names that lead to them; model_type last."""
    for name, value in sorted(config.items(), key=lambda item: item[0] == "model_type"):
        if isinstance(value, Mapping):
            yield from _texts(value, f"{path}{name}.")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield f"{path}{name}", each
