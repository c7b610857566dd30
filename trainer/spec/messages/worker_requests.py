"""Requests to workers (`launch.worker.ask`) and their results: files or text, measurements, dry runs.

Of the measuring processes: requests, results, the parts that are stored, and facts about the installed torch and the
GPUs that it sees.

A dry run is one rank of one configuration. The result is what torch's counters would show on that rank in a steady
step, and what was alive at the peak.
"""

from enum import StrEnum
from typing import Any

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind, MeasuredRates
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.blocks import Mode
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelCode
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Fp8Gain
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision, Quant
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


class GgufType(StrEnum):
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
    quant: GgufType | None = None  # of GGUF; None: q8_0
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


class CheckModelRequest(Value, frozen=True, kw_only=True):
    """A model, the folder of its weights, if they are compared, and the targets of adapters, if they are."""

    model_config: dict[str, Any]
    origin: str = "config.json"  # names the config in messages
    model_path: str | None
    model_code: ModelCode | None
    method: Method | None
    targets: tuple[str, ...]


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
    """The request to time FP8: a model's config.json, the tokens of one micro batch in rows, and scaling recipes."""

    model_config: dict[str, Any]
    tokens: int
    seq_len: int
    recipes: tuple[Fp8Recipe, ...]
    compiles: bool = True  # blocks may run under torch.compile


class Fp8GainKey(Value, frozen=True, kw_only=True):
    """Conditions under which a timing of FP8 holds."""

    model_type: str
    layers: tuple[tuple[int, int, int], ...]  # (inputs, outputs, number in the model) of the blocks' linear layers
    device: str  # GPU catalogue or probe name
    recipes: tuple[Fp8Recipe, ...]
    compiles: bool
    tokens: int
    seq_len: int
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


class SimulationRequest(Value, frozen=True, kw_only=True):
    """A model and everything of a configuration that determines the contents of one rank."""

    model_config: dict[str, Any]
    model_code: ModelCode | None = None
    method: Method = Method.FULL
    lora: LoraJob = LoraJob()
    quant: Quant = Quant.NF4_DQ
    sharding: Sharding = Sharding.NONE
    num_ranks: int = 1
    ranks_per_node: int = 8
    shard_group: int | None = None  # ranks that share one copy of the state under hsdp; None: those of a node
    reduce_every_micro_batch: bool = False
    bf16_reduction: bool = False
    embedding_on_host: bool = False  # the frozen table of input embeddings is in host RAM
    prefetch_two_blocks: bool = False
    fused_adapters: bool = False
    precision: Precision = Precision.BF16_MIXED
    optimizer: Optimizer = Optimizer.ADAMW
    micro_batch: int = 1  # examples
    rows_per_example: int = 1  # 2: DPO, a chosen and a rejected completion
    seq_len: int = 2048
    document_tokens: float | None = None  # of packed rows, the length of a document; None: a row is one document
    accumulation: int = 1
    checkpointing: Checkpointing = Checkpointing.NONE
    attention: Attention = Attention.SDPA
    loss: LossHead = LossHead.CHUNKED
    loss_chunk_tokens: int | None = None
    activation_offload: bool = False
    packages: tuple[str, ...] = ()  # that the machine has, of those with a kernel for some layers
    device_kind: DeviceKind = DeviceKind.CUDA
    device_name: str | None = None
    compute_capability: tuple[int, int] = (9, 0)  # decides which attention kernels there are


class TraceRequest(Value, frozen=True, kw_only=True):
    """A model whose blocks are traced, and everything that decides what they allocate."""

    description: DescriptionRequest
    modes: tuple[Mode, ...]
    lora: LoraJob = LoraJob()
    quant: Quant = Quant.NF4_DQ
    seq_len: int = 2048
    is_packed: bool = False  # rows hold several documents
    packages: tuple[str, ...] = ()  # that the machine has, of those with a kernel for some layers
    device_kind: DeviceKind = DeviceKind.CUDA
    compute_capability: tuple[int, int] = (9, 0)


class LiveGroup(Value, frozen=True, kw_only=True):
    """Live bytes of one kind, made by one operation in one module; blocks of the same class are counted together."""

    kind: str  # a key of `Simulation.parts`
    module: str
    operation: str
    num_tensors: int
    num_bytes: int


class Simulation(Value, frozen=True, kw_only=True):
    """Bytes of one rank in a steady step, its second.

    `events` holds the most live bytes until the next event begins, under the names of the closed form's events.
    `parts` split the live bytes at the peak and sum to `peak_allocated_bytes`. Reserved bytes are a replay of every
    allocation through a model of torch's caching allocator; `min_capacity_bytes` is the smallest memory for that
    allocator in which the two steps still ran. `pinned_host_bytes` is what was page-locked in host RAM at most.
    """

    steady_allocated_bytes: int
    peak_allocated_bytes: int
    peak_event: str
    events: dict[str, int]
    parts: dict[str, int]
    live: tuple[LiveGroup, ...]  # at the peak, largest first
    peak_reserved_bytes: int
    expandable_reserved_bytes: int
    min_capacity_bytes: int
    pinned_host_bytes: int = 0
    checks: tuple[str, ...]
    num_parameters: int
    num_trained_parameters: int
    seconds: float
    versions: dict[str, str]

    def reserved_bytes(self, *, is_expandable: bool) -> int:
        """Peak bytes that the allocator reserves, with or without expandable segments."""
        return self.expandable_reserved_bytes if is_expandable else self.peak_reserved_bytes
