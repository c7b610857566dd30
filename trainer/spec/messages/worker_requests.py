"""Requests to workers (`launch.worker.ask`) that write files or text, and the answer in lines that they share."""

from enum import StrEnum
from typing import Any

from shardwise.trainer.spec.value import Value


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


class ExportFormat(StrEnum):
    """Formats of an exported folder; the command line's `--format`."""

    HF = "hf"
    ONNX = "onnx"


class ExportRequest(Value, frozen=True, kw_only=True):
    """The checkpoint of a run to export, and how; `dtype` None: as trained, or of merged weights, the base's own."""

    run_dir: str
    out: str
    merge: bool = False
    format: ExportFormat = ExportFormat.HF
    dtype: WeightType | None = None
    checkpoint: str | None = None
    checks: bool = True
    hides_paths: bool = False  # an uploaded folder does not name paths of this machine


class ExampleRequest(Value, frozen=True, kw_only=True):
    """Prepared data whose first example is shown, `width` columns wide."""

    cache_dir: str
    width: int
    colour: bool = False


class GrowRequest(Value, frozen=True, kw_only=True):
    """A model folder, and the folder to write with `num_rows` rows in its embeddings."""

    folder: str
    num_rows: int
    out: str


class Lines(Value, frozen=True, kw_only=True):
    """Lines of text for the user."""

    lines: tuple[str, ...] = ()


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
