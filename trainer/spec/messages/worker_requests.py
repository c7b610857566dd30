"""Requests to workers (`launch.worker.ask`) that write files or text, and the answer in lines that they share."""

from enum import StrEnum

from trainer.spec.messages.import_request import WeightType
from trainer.spec.value import Value


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
