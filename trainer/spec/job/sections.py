"""The job file as a value: goals in `model`, `data`, `train`, `limits`; mechanisms only in `pin`.

Reading, checking and merging a file into this value is `job_file`; every default stands here and nowhere else.
A field that is `None` means "auto" or "off", as its comment says; there is no second spelling in the value.
"""

from enum import StrEnum

from trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
)
from trainer.spec.value import Value


class DataFormat(StrEnum):
    """The shape of a training example."""

    AUTO = "auto"
    TEXT = "text"
    PROMPT_COMPLETION = "prompt_completion"
    CHAT = "chat"
    PREFERENCE = "preference"
    TOKENS = "tokens"


class LossOn(StrEnum):
    """Which tokens are learned."""

    AUTO = "auto"
    ALL = "all"
    COMPLETION = "completion"
    ASSISTANT = "assistant"


class BadRows(StrEnum):
    """What a row that cannot be used does."""

    FAIL = "fail"
    SKIP = "skip"


class Objective(StrEnum):
    """What the loss asks of the model."""

    AUTO = "auto"
    PRETRAIN = "pretrain"
    SFT = "sft"
    DPO = "dpo"


class LrSchedule(StrEnum):
    """The course of the learning rate after warmup, a function of the step."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


class WandbMode(StrEnum):
    """Whether and how wandb is written."""

    OFF = "off"
    OFFLINE = "offline"
    ONLINE = "online"


class Allowance(StrEnum):
    """What the planner may use beyond exact, on-device strategies."""

    OFFLOAD_CPU = "offload_cpu"
    OFFLOAD_NVME = "offload_nvme"
    OPTIMIZER_8BIT = "optimizer_8bit"
    OPTIMIZER_APPROX = "optimizer_approx"
    BF16_WEIGHTS = "bf16_weights"
    FP8 = "fp8"
    TF32 = "tf32"
    COMPILE = "compile"


class Every(Value, frozen=True, kw_only=True):
    """An interval; exactly one of the two is set."""

    steps: int | None = None
    seconds: float | None = None


class Warmup(Value, frozen=True, kw_only=True):
    """Steps until the full learning rate: a share of the run or a number; exactly one is set."""

    share: float | None = None
    steps: int | None = None


class ModelJob(Value, frozen=True, kw_only=True):
    """Which model: exactly one of `name` (weights to start from) and `config` (start from scratch)."""

    name: str | None = None
    config: str | None = None
    revision: str | None = None
    tokenizer: str | None = None  # None: the model's own; "train": a byte-level BPE made from the data
    trust_remote_code: str | None = None  # the repository whose code may run, or None
    flash_kernel: str | None = None  # OWNER/flash-attn2@COMMIT: may run where flash-attn is missing


class DataSource(Value, frozen=True, kw_only=True):
    """One source of rows and how often it is drawn."""

    source: str  # a file, a folder, python-stdlib, or ORG/NAME[@REVISION] of the hub
    weight: float = 1.0
    subset: str | None = None  # of a data set that has several
    split: str | None = None  # None: train


class DataJob(Value, frozen=True, kw_only=True):
    """Which rows are learned and how."""

    train: tuple[DataSource, ...] = ()
    eval_share: float | None = 0.01  # of train, by hash; None where `eval_source` stands or evaluation is off
    eval_source: str | None = None
    eval_subset: str | None = None  # of `eval_source`
    eval_split: str | None = None  # of `eval_source`
    format: DataFormat = DataFormat.AUTO
    fields: dict[str, str] = {}
    chat_template: str | None = None  # None: the tokenizer's
    loss_on: LossOn = LossOn.AUTO
    packing: bool | None = None  # None: auto
    bad_rows: BadRows = BadRows.FAIL
    bad_rows_max: float = 0.001
    streaming: bool = False


class LoraJob(Value, frozen=True, kw_only=True):
    """Low-rank adapters."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    dora: bool = False
    rslora: bool = False


class GaloreJob(Value, frozen=True, kw_only=True):
    """Gradient low-rank projection."""

    rank: int = 256
    update_gap: int = 200
    scale: float = 0.25
    projection: str = "std"
    layerwise: bool = False


class DpoJob(Value, frozen=True, kw_only=True):
    """Direct preference optimisation."""

    beta: float = 0.1


class TrainJob(Value, frozen=True, kw_only=True):
    """What the training is to do; nothing here depends on the machine."""

    objective: Objective = Objective.AUTO
    method: Method | None = None  # None: auto
    seq_len: int = 2048
    tokens_per_step: int = 65536
    epochs: float | None = 1.0  # exactly one of epochs, steps, tokens is set
    steps: int | None = None
    tokens: int | None = None
    lr: float | None = None  # None: auto
    schedule: LrSchedule = LrSchedule.COSINE
    warmup: Warmup | None = None  # None: auto
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    neftune_alpha: float | None = None
    lora: LoraJob = LoraJob()
    galore: GaloreJob = GaloreJob()
    dpo: DpoJob = DpoJob()


class NvmeLimit(Value, frozen=True, kw_only=True):
    """Where NVMe offload may write, and how much."""

    path: str | None = None
    size: int | None = None  # bytes


class Limits(Value, frozen=True, kw_only=True):
    """What the run may take."""

    hours: float = 24.0
    vram: int | None = None  # bytes a device
    host_ram: int | None = None  # bytes; None: what the cgroup or Slurm allows
    nvme: NvmeLimit = NvmeLimit()
    cost: float | None = None


class Pin(Value, frozen=True, kw_only=True):
    """Mechanisms fixed by hand; None leaves one to the planner."""

    sharding: Sharding | None = None
    offload: Offload | None = None
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    fp8_recipe: Fp8Recipe | None = None
    checkpointing: Checkpointing | None = None
    checkpointing_n: int | None = None  # of every_n; None: 2
    activation_offload: bool | None = None
    attention: Attention | None = None
    loss: LossHead | None = None
    micro_batch: int | None = None
    compile: bool | None = None
    optimizer_in_backward: bool | None = None


class CheckpointJob(Value, frozen=True, kw_only=True):
    """When state is saved and what is kept."""

    every: Every | None = None  # None: auto
    keep: int = 3
    keep_every: Every | None = None  # in steps; None: none but the newest, and the best
    best: str | None = "eval_loss"
    is_async: bool | None = None  # `async` in the file; None: auto


class EvalJob(Value, frozen=True, kw_only=True):
    """When the held-out split is scored."""

    every: Every | None = None  # None: auto
    early_stop: int | None = None  # evaluations without a better loss


class LogJob(Value, frozen=True, kw_only=True):
    """Where metrics go."""

    wandb: WandbMode = WandbMode.OFF
    project: str = "shardwise"
    name: str | None = None
    tensorboard: bool = False
    every: Every = Every(steps=1)
    notify: tuple[str, ...] | None = None  # a URL, or the words of a command


class NodeNetwork(StrEnum):
    """Whether compute nodes reach the hub."""

    AUTO = "auto"  # not known
    NONE = "none"
    DIRECT = "direct"


class Stage(StrEnum):
    """What is copied to the nodes' own disks before the ranks start."""

    MODEL = "model"
    DATA = "data"


class SlurmJob(Value, frozen=True, kw_only=True):
    """How the cluster is asked."""

    partition: str | None = None
    nodes: int | None = None
    gpus: int | None = None  # of each node; None: all it has
    cores: int | None = None  # of each node; None: all, where nodes are not shared
    memory: int | None = None  # bytes of each node; None: all, where nodes are not shared
    account: str | None = None
    qos: str | None = None
    time: str | None = None  # None: what the plan predicts, with a margin
    constraint: str | None = None
    reservation: str | None = None
    mail: str | None = None
    comment: str | None = None
    requeue: bool = True
    chain: int = 1
    network: NodeNetwork = NodeNetwork.AUTO
    stage: tuple[Stage, ...] = ()
    modules: tuple[str, ...] = ()
    container: str | None = None
    extra: tuple[str, ...] = ()


class Job(Value, frozen=True, kw_only=True):
    """One training job, complete: every default filled in."""

    model: ModelJob = ModelJob()
    data: DataJob = DataJob()
    train: TrainJob = TrainJob()
    allow: tuple[Allowance, ...] = (Allowance.OFFLOAD_CPU,)
    limits: Limits = Limits()
    pin: Pin = Pin()
    checkpoint: CheckpointJob = CheckpointJob()
    eval: EvalJob = EvalJob()
    log: LogJob = LogJob()
    slurm: SlurmJob = SlurmJob()
    extensions: str | None = None
    output: str | None = None  # None: runs/<name of the job file>
    price_per_gpu_hour: float | None = None
