"""The job file as a value: goals in `model`, `data`, `train`, `limits`; mechanisms only in `pin`.

One annotated field is one setting: its type, its `Setting` (what it means, what may be written) and its default.
The reader, the writer, the JSON Schema, the nearest names and the tables of docs/job-file.md are derived from it, so
a new setting is one field here, and the tables written again (tests/factories/job_reference.py).
None in a field means "auto" or "off"; `Setting.none` is its spelling in the file.
"""

from enum import StrEnum
from typing import Annotated

from msgspec.structs import replace

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.kinds import (
    Every,
    Setting,
    Warmup,
    byte_size,
    columns,
    interval,
    notification,
    number,
    one_word,
    share,
    text,
    texts,
    time_in_hours,
    warmup_length,
    whole,
    without_secret,
)
from shardwise.trainer.spec.job.sources import DataSource, held_out_rows, sources
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision
from shardwise.trainer.spec.value import Value


class DataFormat(StrEnum):
    """Shape of a training example."""

    AUTO = "auto"
    TEXT = "text"
    PROMPT_COMPLETION = "prompt_completion"
    CHAT = "chat"
    PREFERENCE = "preference"
    TOKENS = "tokens"


class LossOn(StrEnum):
    """Tokens that count in the loss."""

    AUTO = "auto"
    ALL = "all"
    COMPLETION = "completion"
    ASSISTANT = "assistant"


class BadRows(StrEnum):
    """Treatment of a row that cannot be used."""

    FAIL = "fail"
    SKIP = "skip"


class Objective(StrEnum):
    """Training objective, which selects the loss."""

    AUTO = "auto"
    PRETRAIN = "pretrain"
    SFT = "sft"
    DPO = "dpo"


class LrSchedule(StrEnum):
    """Learning rate after warmup, as a function of the step."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


class WandbMode(StrEnum):
    """Use of Weights & Biases."""

    OFF = "off"
    OFFLINE = "offline"
    ONLINE = "online"


class Allowance(StrEnum):
    """Opt-ins beyond exact, on-device strategies."""

    OFFLOAD_CPU = "offload_cpu"
    OFFLOAD_NVME = "offload_nvme"
    OPTIMIZER_8BIT = "optimizer_8bit"
    OPTIMIZER_APPROX = "optimizer_approx"
    BF16_WEIGHTS = "bf16_weights"
    BF16_REDUCTION = "bf16_reduction"  # FSDP2 adds gradients up over ranks in bf16, over micro batches in fp32
    FP8 = "fp8"
    TF32 = "tf32"
    UNCLIPPED = "unclipped"  # train.clip may go unapplied, so that an update runs inside the backward pass
    COMPILE = "compile"  # changes nothing: it is exact and always considered


class NodeNetwork(StrEnum):
    """Access of compute nodes to the hub."""

    AUTO = "auto"  # not known
    NONE = "none"
    DIRECT = "direct"


class Stage(StrEnum):
    """Inputs that are copied to the nodes' own disks before the ranks start."""

    MODEL = "model"
    DATA = "data"


class ModelJob(Value, frozen=True, kw_only=True):
    """The model: exactly one of `name` (weights to start from) and `config` (start from scratch)."""

    name: Annotated[
        str | None,
        Setting(
            "Weights to start from: a hub id, a folder or a preset that names published weights.",
            text("a hub id, a folder or a preset"),
        ),
    ] = None
    config: Annotated[
        str | None,
        Setting(
            "Instead of `name`: the shape of a model that starts from scratch.",
            text("a folder, a config.json file or a preset"),
        ),
    ] = None
    revision: Annotated[
        str | None, Setting("Revision of a model from the hub.", text("a branch, a tag or a commit"))
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            "null is the model's own; `train` makes a byte-level BPE from the data.",
            text('a folder, a hub id or "train"'),
        ),
    ] = None
    trust_remote_code: Annotated[
        str | None,
        Setting(
            "Runs code that comes with the model, only if it is from the repository named here.",
            text("the name of the repository whose code may run"),
            none="false",
        ),
    ] = None
    flash_kernel: Annotated[
        str | None,
        Setting(
            "Allows FlashAttention 2 from the hub, prebuilt code at this commit, where flash-attn is not installed.",
            text(
                "OWNER/flash-attn2@COMMIT, a commit of 40 hexadecimal digits",
                pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*/flash-attn2@[0-9a-f]{40}",
            ),
        ),
    ] = None


class DataJob(Value, frozen=True, kw_only=True):
    """Rows to learn from, and their use."""

    train: Annotated[
        tuple[DataSource, ...],
        Setting(
            "Rows to learn, by weight; `python-stdlib` is the source text of Python's standard library.", sources()
        ),
    ] = ()
    # `data.eval` fills four fields; all are None if evaluation is off.
    eval_share: Annotated[
        float | None,
        Setting(
            "Held-out rows; a share is taken by hash, so it never changes.",
            held_out_rows(),
            name="eval",
            further_fields=("eval_source", "eval_subset", "eval_split"),
        ),
    ] = 0.01
    eval_source: str | None = None
    eval_subset: str | None = None
    eval_split: str | None = None
    format: Annotated[DataFormat, Setting("Shape of a row; `auto` looks at the data.")] = DataFormat.AUTO
    fields: Annotated[
        dict[str, str],
        Setting(
            "Names of columns, and of the roles in messages, where they differ from the standard names.",
            columns(
                *("text", "tokens", "labels", "mask", "prompt", "completion", "messages", "role", "content", "tools"),
                *("instruction", "input", "output", "chosen", "rejected", "system", "user", "assistant", "tool"),
            ),
        ),
    ] = {}
    chat_template: Annotated[
        str | None, Setting("`auto` is the tokenizer's own.", text("a name or a file"), none="auto")
    ] = None
    loss_on: Annotated[LossOn, Setting("Tokens that count in the loss.")] = LossOn.AUTO
    packing: Annotated[
        bool | None, Setting("Fills each row of `seq_len` tokens with several short documents.", none="auto")
    ] = None
    bad_rows: Annotated[BadRows, Setting("Treatment of a row that cannot be used.")] = BadRows.FAIL
    bad_rows_max: Annotated[
        float, Setting("With `bad_rows: skip`: the largest share that may be skipped.", share())
    ] = 0.001
    drop_copies: Annotated[
        bool, Setting("Does not learn rows that the source of `eval` has as well; not with `streaming`.")
    ] = False
    streaming: Annotated[bool, Setting("Reads the data while training instead of preparing it first.")] = False


class LoraJob(Value, frozen=True, kw_only=True, cache_hash=True):
    """Low-rank adapters."""

    rank: Annotated[int, Setting("Rank of the adapters.", whole(minimum=1))] = 16
    alpha: Annotated[float, Setting("Scale of the adapters: alpha / rank.", number(above=0))] = 32.0
    dropout: Annotated[float, Setting("Dropout in front of the adapters.", number(minimum=0, below=1))] = 0.0
    targets: Annotated[
        tuple[str, ...],
        Setting("Modules that get an adapter.", texts("all-linear or a list of module names", may_be_empty=False)),
    ] = ("all-linear",)
    dora: Annotated[bool, Setting("Trains magnitude and direction separately (DoRA).")] = False
    rslora: Annotated[bool, Setting("Scales by alpha / sqrt(rank) (rank-stabilised LoRA).")] = False


class GaloreJob(Value, frozen=True, kw_only=True, cache_hash=True):
    """Gradient low-rank projection."""

    rank: Annotated[int, Setting("Rank of the gradient's projection.", whole(minimum=1))] = 256
    update_gap: Annotated[int, Setting("Steps between two new projections.", whole("a number of steps", minimum=1))] = (
        200
    )
    scale: Annotated[float, Setting("Scale of the projected update.", number(above=0))] = 0.25
    projection: Annotated[
        str,
        Setting("Side of the gradient that is projected.", one_word("std", "reverse_std", "right", "left", "full")),
    ] = "std"
    layerwise: Annotated[bool, Setting("Updates each layer inside the backward pass.")] = False


class DpoJob(Value, frozen=True, kw_only=True):
    """Direct preference optimisation."""

    beta: Annotated[float, Setting("Strength of the penalty for moving away from the reference.", number(above=0))] = (
        0.1
    )


class TrainJob(Value, frozen=True, kw_only=True):
    """Goal of the training; nothing here depends on the machine."""

    objective: Annotated[Objective, Setting("Training objective, which selects the loss.")] = Objective.AUTO
    method: Annotated[
        Method | None,
        Setting("`auto` selects the first of them that finishes within `limits.hours`, or 24 hours.", none="auto"),
    ] = None
    seq_len: Annotated[
        int,
        Setting("Longest row, in tokens.", whole("a number of tokens", minimum=8)),
    ] = 2048
    tokens_per_step: Annotated[
        int | None,
        Setting(
            "The global batch, in tokens, never changed to save memory; `auto` depends on the data and the objective.",
            whole("a number of tokens", minimum=8),
            none="auto",
        ),
    ] = None
    # At most one of epochs, steps and tokens is set.
    epochs: Annotated[
        float | None,
        Setting(
            "Passes over the data, or `steps`, or `tokens`; `auto` is 1, and up to 4 of few data.",
            number(above=0),
            none="auto",
        ),
    ] = None
    steps: Annotated[
        int | None,
        Setting("Optimizer steps, instead of `epochs`.", whole("a number of steps", minimum=1)),
    ] = None
    tokens: Annotated[
        int | None, Setting("Tokens to learn, instead of `epochs`.", whole("a number of tokens", minimum=1))
    ] = None
    lr: Annotated[
        float | None,
        Setting("Peak learning rate; `auto` depends on method and size.", number(above=0, maximum=10), none="auto"),
    ] = None
    schedule: Annotated[LrSchedule, Setting("Learning rate after warmup.")] = LrSchedule.COSINE
    warmup: Annotated[
        Warmup | None,
        Setting(
            "Part of the run in which the rate rises; `auto` is 3%, and 10% for dpo.", warmup_length(), none="auto"
        ),
    ] = None
    weight_decay: Annotated[float, Setting("Decoupled weight decay, on matrices.", number(minimum=0, maximum=10))] = 0.1
    clip: Annotated[float, Setting("Largest norm of the gradient.", number(above=0))] = 1.0
    skip_spikes: Annotated[
        bool, Setting("Skips a step whose loss or gradient norm is 6 standard deviations above the last 128 steps.")
    ] = False
    seed: Annotated[
        int, Setting("Seed of initial weights, data order and dropout.", whole(minimum=0, maximum=2**32 - 1))
    ] = 0
    check_first_steps: Annotated[
        bool,
        Setting("Compares rows, loss, gradient and update of the first steps with the plan; what differs is named."),
    ] = True
    neftune_alpha: Annotated[float | None, Setting("Noise on the embeddings (NEFTune).", number(above=0))] = None
    router_aux_loss: Annotated[
        float | None,
        Setting(
            "Coefficient of the loss that balances the experts of a mixture; null: it is not added.",
            number(above=0, maximum=10),
        ),
    ] = None
    lora: LoraJob = LoraJob()
    galore: GaloreJob = GaloreJob()
    dpo: DpoJob = DpoJob()


class NvmeLimit(Value, frozen=True, kw_only=True):
    """Folder and size of NVMe offload."""

    path: Annotated[str | None, Setting("Folder on a local NVMe disk for offloaded state.", text("a path"))] = None
    size: Annotated[int | None, Setting("Most bytes to write there.", byte_size())] = None


class Limits(Value, frozen=True, kw_only=True):
    """Most time, memory and money that a run may use."""

    hours: Annotated[
        float | None,
        Setting(
            "The plan must finish within; a run stops ahead of it with a checkpoint. null is no limit.", time_in_hours()
        ),
    ] = None
    vram: Annotated[int | None, Setting("Cap of each device, for planning and at run time.", byte_size())] = None
    host_ram: Annotated[
        int | None,
        Setting("Host RAM for a run; null is what a grant or the reserve of the system allows.", byte_size()),
    ] = None
    nvme: NvmeLimit = NvmeLimit()
    cost: Annotated[
        float | None,
        Setting(
            "The plan must cost at most, at `price_per_gpu_hour`; a run stops ahead of it with a checkpoint.",
            number(above=0),
        ),
    ] = None


class Pin(Value, frozen=True, kw_only=True):
    """Mechanisms fixed by hand; the planner selects those that are None."""

    sharding: Annotated[
        Sharding | None,
        Setting("Distribution of the model state over the ranks.", none="auto"),
    ] = None
    shard_group: Annotated[
        int | None,
        Setting(
            "With `hsdp`: the ranks that share one copy of the state.",
            whole("a number of ranks", minimum=2),
            none="auto",
        ),
    ] = None
    reduce_every_micro_batch: Annotated[
        bool | None,
        Setting(
            "FSDP2 reduces gradients with every micro batch (less memory, more traffic), or with the last alone.",
            none="auto",
        ),
    ] = None
    embedding_on_host: Annotated[
        bool | None,
        Setting(
            "On one GPU, the input embeddings of a frozen base stay in host RAM, where rows are looked up.",
            none="auto",
        ),
    ] = None
    prefetch_two_blocks: Annotated[
        bool | None,
        Setting(
            "FSDP2 gathers the weights of two blocks ahead, or of one (less memory); `auto` is one.",
            none="auto",
        ),
    ] = None
    fused_adapters: Annotated[
        bool | None,
        Setting(
            "Each layer and its adapter are one function, which saves its input once and adds in place; `auto` is "
            "PEFT's layer.",
            none="auto",
        ),
    ] = None
    compiled_head: Annotated[
        bool | None,
        Setting("torch.compile of the slices of the loss head `chunked`; `auto` is plain torch.", none="auto"),
    ] = None
    offload: Annotated[Offload | None, Setting("State that is held in host RAM or on NVMe.", none="auto")] = None
    optimizer: Annotated[Optimizer | None, Setting("The update rule and its implementation.", none="auto")] = None
    precision: Annotated[
        Precision | None,
        Setting("Precision of weights and computation.", none="auto"),
    ] = None
    fp8_recipe: Annotated[Fp8Recipe | None, Setting("Computation of the FP8 scales.", none="auto")] = None
    checkpointing: Annotated[
        Checkpointing | None,
        Setting("Activations that are recomputed.", none="auto"),
    ] = None
    checkpointing_n: Annotated[
        int | None,
        Setting(
            "With `every_n`: one block in this many is recomputed; `auto` is 2.",
            whole("a number of blocks", minimum=1),
            none="auto",
        ),
    ] = None
    activation_offload: Annotated[
        bool | None, Setting("Keeps activations in host RAM until the backward pass.", none="auto")
    ] = None
    attention: Annotated[Attention | None, Setting("The attention kernel.", none="auto")] = None
    loss: Annotated[LossHead | None, Setting("Part of the logits that is in memory at one time.", none="auto")] = None
    micro_batch: Annotated[
        int | None,
        Setting("Sequences in one forward pass of one rank.", whole("a number of sequences", minimum=1), none="auto"),
    ] = None
    compile: Annotated[bool | None, Setting("torch.compile, block by block.", none="auto")] = None
    fused_kernels: Annotated[
        bool | None, Setting("Liger's RMSNorm, rotary embedding and SwiGLU in blocks that run eagerly.", none="auto")
    ] = None
    optimizer_in_backward: Annotated[
        bool | None, Setting("Updates each weight as soon as its gradient is complete.", none="auto")
    ] = None


class CheckpointJob(Value, frozen=True, kw_only=True):
    """When state is saved, and which checkpoints are retained."""

    every: Annotated[
        Every | None,
        Setting("Between two saved states.", interval(allows_time=True), none="auto"),
    ] = None
    keep: Annotated[
        int,
        Setting("Number of newest checkpoints that are retained.", whole("a number of checkpoints", minimum=1)),
    ] = 3
    keep_every: Annotated[
        Every | None,
        Setting("Also retains one checkpoint in each interval, permanently.", interval(allows_time=False)),
    ] = None
    best: Annotated[
        str | None, Setting("Also retains the checkpoint with the best value of this score.", one_word("eval_loss"))
    ] = "eval_loss"
    is_async: Annotated[bool | None, Setting("Writes while training continues.", name="async", none="auto")] = None


class EvalJob(Value, frozen=True, kw_only=True):
    """When the held-out split is scored."""

    every: Annotated[
        Every | None,
        Setting("Between two scores of the held-out rows.", interval(allows_time=False), none="auto"),
    ] = None
    early_stop: Annotated[
        int | None,
        Setting(
            "Stops after this many evaluations without a better loss.", whole("a number of evaluations", minimum=1)
        ),
    ] = None


class LogJob(Value, frozen=True, kw_only=True):
    """Destinations of metrics."""

    wandb: Annotated[WandbMode, Setting("Use of Weights & Biases.")] = WandbMode.OFF
    project: Annotated[str, Setting("Project of Weights & Biases.", text("a name"))] = "shardwise"
    name: Annotated[str | None, Setting("Name of the run there; null is the run directory's.", text("a name"))] = None
    tensorboard: Annotated[bool, Setting("Writes TensorBoard files into the run directory.")] = False
    every: Annotated[
        Every,
        Setting(
            "Between two lines of metrics.jsonl; the first, the last, scored, skipped and reported steps have one.",
            interval(allows_time=False),
        ),
    ] = Every(steps=1)
    device_time: Annotated[
        bool, Setting("On a GPU, samples two steps with torch's profiler: idle time, time by kind of kernel.")
    ] = True
    notify: Annotated[
        tuple[str, ...] | None,
        Setting("Receives a notice when the run ends, fails or is queued again.", notification()),
    ] = None


class SlurmJob(Value, frozen=True, kw_only=True):
    """Options of the Slurm job."""

    partition: Annotated[
        str | None, Setting("`sbatch --partition`; null is the cluster's default.", text("a partition"))
    ] = None
    nodes: Annotated[int | None, Setting("Number of nodes; null is one.", whole("a number of nodes", minimum=1))] = None
    gpus: Annotated[
        int | None, Setting("GPUs of each node; null is all it has.", whole("a number of GPUs", minimum=1))
    ] = None
    cores: Annotated[
        int | None,
        Setting(
            "Cores of each node, which may then be shared with other jobs; null is all, or the share of its GPUs.",
            whole("a number of cores", minimum=1),
        ),
    ] = None
    memory: Annotated[
        int | None,
        Setting(
            "RAM of each node, which may then be shared with other jobs; null is all, or the share of its GPUs.",
            byte_size(),
        ),
    ] = None
    account: Annotated[str | None, Setting("`sbatch --account`.", text("an account"))] = None
    qos: Annotated[str | None, Setting("`sbatch --qos`.", text("a quality of service"))] = None
    time: Annotated[
        str | None,
        Setting(
            "`sbatch --time`; null is the predicted time with a margin, and at most what the partition allows.",
            text('a time such as "24:00:00" or "2-12:00:00"', pattern=r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}"),
        ),
    ] = None
    constraint: Annotated[str | None, Setting("`sbatch --constraint`.", text("features of nodes"))] = None
    reservation: Annotated[str | None, Setting("`sbatch --reservation`.", text("a reservation"))] = None
    mail: Annotated[
        str | None,
        Setting("Receives Slurm's mail when a job ends, fails or is requeued.", text("an address")),
    ] = None
    comment: Annotated[str | None, Setting("`sbatch --comment`.", text())] = None
    requeue: Annotated[
        bool,
        Setting("A job that is stopped before the end of the run is queued again; with false a new job follows it."),
    ] = True
    chain: Annotated[
        int,
        Setting(
            "Jobs that are submitted at once; each continues where the previous one stopped.",
            whole("a number of jobs", minimum=1, maximum=100),
        ),
    ] = 1
    network: Annotated[
        NodeNetwork,
        Setting("Access of compute nodes to the hub; with `none` everything must be here before a job is submitted."),
    ] = NodeNetwork.AUTO
    stage: Annotated[
        tuple[Stage, ...],
        Setting(
            "Inputs that are copied to each node's own disk before the ranks start; the folder is `folders.scratch` in "
            "config.yaml."
        ),
    ] = ()
    modules: Annotated[
        tuple[str, ...], Setting("Loaded before the run.", texts("a list of modules", may_be_empty=True))
    ] = ()
    container: Annotated[
        str | None,
        Setting(
            "Image that the ranks run in: `docker://NAME` or a `.sqsh` file (pyxis), a `.sif` file (Apptainer).",
            text("an image"),
        ),
    ] = None
    extra: Annotated[
        tuple[str, ...],
        Setting("More options of sbatch.", texts('a list of options such as "--constraint=a100"', may_be_empty=True)),
    ] = ()


class Job(Value, frozen=True, kw_only=True):
    """One training job, complete: every default filled in."""

    model: ModelJob = ModelJob()
    data: DataJob = DataJob()
    train: TrainJob = TrainJob()
    allow: Annotated[tuple[Allowance, ...], Setting("Opt-ins beyond exact, on-device strategies.")] = (
        Allowance.OFFLOAD_CPU,
    )
    limits: Limits = Limits()
    pin: Pin = Pin()
    checkpoint: CheckpointJob = CheckpointJob()
    eval: EvalJob = EvalJob()
    log: LogJob = LogJob()
    slurm: SlurmJob = SlurmJob()
    extensions: Annotated[
        str | None,
        Setting("Your own format_row, build_model, loss or on_step.", text("the path of a Python file")),
    ] = None
    output: Annotated[
        str | None,
        Setting("Prefix of the run directories; null is runs/ and the job file's name.", text("a path")),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None, Setting("Price of one GPU for an hour, in your currency.", number(above=0))
    ] = None


def without_url(job: Job) -> Job:
    """The job as a run stores it: of a literal URL in `log.notify`, the host alone."""
    return replace(job, log=replace(job.log, notify=without_secret(job.log.notify)))
