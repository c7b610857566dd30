"""Requests to workers (`launch.worker.ask`) that write files or text, their result lines, and measurements.

Of the measuring processes: requests, results, the parts that are stored, and facts about the installed torch and the
GPUs that it sees.
"""

from enum import StrEnum
from typing import Any

from shardwise.trainer.spec.hardware import MeasuredRates
from shardwise.trainer.spec.plan import Fp8Gain
from shardwise.trainer.spec.strategy import Fp8Recipe
from shardwise.trainer.spec.value import Value


class ImportKind(StrEnum):
    """Program that wrote a checkpoint; the command line's `--kind`."""

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
    GGUF = "gguf"


class Quant(StrEnum):
    """Types of the weights in a GGUF file; the command line's `--quant`."""

    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    F16 = "f16"


class ExportRequest(Value, frozen=True, kw_only=True):
    """The checkpoint of a run to export, and how; `dtype` None: as trained, or of merged weights, the base's own."""

    run_dir: str
    out: str
    merge: bool = False
    format: ExportFormat = ExportFormat.HF
    dtype: WeightType | None = None
    quant: Quant | None = None  # of GGUF; None: q8_0
    checkpoint: str | None = None
    checks: bool = True
    hides_paths: bool = False  # an uploaded folder does not name paths of this machine


class ExampleRequest(Value, frozen=True, kw_only=True):
    """Prepared data whose first example is shown, `width` columns wide."""

    cache_dir: str
    width: int
    colour: bool = False


class ExtendVocabularyRequest(Value, frozen=True, kw_only=True):
    """A model folder, and the folder to write with `num_rows` rows in its embeddings."""

    folder: str
    num_rows: int
    out: str


class Lines(Value, frozen=True, kw_only=True):
    """Lines of text for the user."""

    lines: tuple[str, ...] = ()


class ImportRequest(Value, frozen=True, kw_only=True):
    """Paths are absolute; None stands for the checkpoint's own."""

    checkpoint: str
    out: str
    kind: ImportKind | None = None
    config: dict[str, Any] | None = None
    config_origin: str | None = None  # names `config` in messages
    tokenizer: str | None = None  # a folder, used if the checkpoint has none
    base: str | None = None  # the model folder that an adapter is merged into
    dtype: WeightType | None = None


class Imported(Value, frozen=True, kw_only=True):
    """Result of an import."""

    kind: ImportKind
    source: str  # text that describes the source of the weights
    num_tensors: int
    num_bytes: int
    dtype: str  # of most weights, as safetensors calls it
    notes: tuple[str, ...] = ()


class Measurement(Value, frozen=True, kw_only=True):
    """The figures of one device so far; those of a process that was stopped are incomplete."""

    rates: MeasuredRates = MeasuredRates()
    notes: tuple[str, ...] = ()
    is_unfinished: bool = False  # its time was over first: it hangs, or the machine is slow


class GatherResult(Value, frozen=True, kw_only=True):
    """Result of an all-gather on one rank."""

    bytes_per_s: int  # each way through its device
    is_correct: bool


class Fp8GainRequest(Value, frozen=True, kw_only=True):
    """The request to time FP8: a model's config.json, the tokens of one micro batch, and the scaling recipe."""

    model_config: dict[str, Any]
    tokens: int
    recipe: Fp8Recipe = Fp8Recipe.CURRENT


class Fp8GainKey(Value, frozen=True, kw_only=True):
    """Conditions under which a timing of FP8 holds."""

    model_type: str
    layers: tuple[tuple[int, int, int], ...]  # (inputs, outputs, number in the model) of the blocks' linear layers
    device: str  # GPU catalogue or probe name
    recipe: Fp8Recipe
    tokens: int
    versions: dict[str, str]


class StoredFp8Gain(Value, frozen=True, kw_only=True):
    """A timing of FP8 as the cache holds it."""

    key: Fp8GainKey
    gain: Fp8Gain


class DeviceTrial(Value, frozen=True, kw_only=True):
    """Result of allocating and multiplying on a device."""

    problem: str | None = None  # the first line of what torch raised; None: it works
    is_out_of_memory: bool = False


class TorchFacts(Value, frozen=True, kw_only=True):
    """The result of `trainer.runtime.tools.torch_check`."""

    version: str
    cuda: str | None  # that torch was built for; None: a build for the CPU
    architectures: tuple[str, ...] = ()  # that it has code for; empty: unknown
    devices: tuple[DeviceTrial, ...] = ()  # that torch sees, in the order of CUDA_VISIBLE_DEVICES
    expands_segments: bool | None = None  # whether the trials' memory came from expandable segments; None: not known
    problem: str | None = None  # what torch raised when CUDA was to be initialised
