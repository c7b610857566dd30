"""Request and answer of the process that imports a foreign checkpoint."""

from enum import StrEnum
from typing import Any

from trainer.spec.value import Value


class ImportKind(StrEnum):
    """Who wrote a checkpoint; the command line's `--kind`."""

    HUGGINGFACE = "huggingface"
    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    DCP = "dcp"
    PEFT = "peft"


class WeightType(StrEnum):
    """Dtype of the written weights; the command line's `--dtype`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ImportRequest(Value, frozen=True, kw_only=True):
    """Paths are absolute; what is None is taken from the checkpoint itself."""

    checkpoint: str
    out: str
    kind: ImportKind | None = None
    config: dict[str, Any] | None = None
    config_origin: str | None = None  # names `config` in messages
    tokenizer: str | None = None  # a folder, taken where the checkpoint has none
    base: str | None = None  # the model folder that an adapter is merged into
    dtype: WeightType | None = None


class Imported(Value, frozen=True, kw_only=True):
    """Result of an import."""

    kind: ImportKind
    source: str  # what the weights were read from, in words
    num_tensors: int
    num_bytes: int
    dtype: str  # of most weights, as safetensors calls it
    notes: tuple[str, ...] = ()
