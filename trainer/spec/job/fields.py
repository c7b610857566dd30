"""Every setting of the job file: its path, what it may hold, and one sentence that says what it does.

One table serves the reader, the writer, the JSON Schema and the reference in docs/job-file.md. Defaults are not here:
`trainer.spec.job.sections` holds them. To add a setting: a field there, a row here, and `docs/job-file.md` written
anew.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.spec.job.kinds import (
    Kind,
    auto,
    choice,
    choices,
    columns,
    disabled_by_false,
    flag,
    flash_kernel,
    nullable,
    text,
    texts,
    word,
)
from trainer.spec.job.notify import notification
from trainer.spec.job.quantities import every, hours, number, share, size, warmup, whole
from trainer.spec.job.sections import (
    Allowance,
    BadRows,
    CheckpointJob,
    DataFormat,
    DataJob,
    DpoJob,
    EvalJob,
    GaloreJob,
    Job,
    Limits,
    LogJob,
    LoraJob,
    LossOn,
    LrSchedule,
    ModelJob,
    NodeNetwork,
    NvmeLimit,
    Objective,
    Pin,
    SlurmJob,
    Stage,
    TrainJob,
    WandbMode,
)
from trainer.spec.job.sources import eval_split, sources
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


class Field(NamedTuple):
    """One setting; `path` is its name everywhere: YAML, `key=value`, messages, docs."""

    path: str
    kind: Kind
    says: str


_PATH = text("a path")
_SLURM_TIME = r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}"

FIELDS: tuple[Field, ...] = (
    Field(
        "model.name",
        nullable(text("a hub id, a folder or a preset")),
        "Weights to start from: a hub id, a folder or a preset that names published weights.",
    ),
    Field(
        "model.config",
        nullable(text("a folder, a config.json file or a preset")),
        "Instead of `name`: the shape of a model that starts from scratch.",
    ),
    Field("model.revision", nullable(text("a branch, a tag or a commit")), "Revision of a model from the hub."),
    Field(
        "model.tokenizer",
        nullable(text('a folder, a hub id or "train"')),
        "null is the model's own; `train` makes a byte-level BPE from the data.",
    ),
    Field(
        "model.trust_remote_code",
        disabled_by_false(text("the name of the repository whose code may run")),
        "Runs code that comes with the model, only if it is from the repository named here.",
    ),
    Field(
        "model.flash_kernel",
        nullable(flash_kernel()),
        "Allows FlashAttention 2 from the hub, prebuilt code at this commit, where flash-attn is not installed.",
    ),
    Field(
        "data.train",
        sources(),
        "Rows to learn, by weight; `python-stdlib` is the source text of Python's standard library.",
    ),
    Field("data.eval", eval_split(), "Held-out rows; a share is taken by hash, so it never changes."),
    Field("data.format", choice(DataFormat), "Shape of a row; `auto` looks at the data."),
    Field(
        "data.fields",
        columns(
            "text",
            "tokens",
            "labels",
            "mask",
            "prompt",
            "completion",
            "messages",
            "role",
            "content",
            "tools",
            "instruction",
            "input",
            "output",
            "chosen",
            "rejected",
            "system",
            "user",
            "assistant",
            "tool",
        ),
        "Names of columns, and of the roles in messages, where they differ from ours.",
    ),
    Field("data.chat_template", auto(text("a name or a file")), "`auto` is the tokenizer's own."),
    Field("data.loss_on", choice(LossOn), "Which tokens are learned."),
    Field("data.packing", auto(flag()), "Fills each row of `seq_len` tokens with several short documents."),
    Field("data.bad_rows", choice(BadRows), "What a row that cannot be used does."),
    Field("data.bad_rows_max", share(), "With `bad_rows: skip`: the largest share that may be skipped."),
    Field("data.streaming", flag(), "Reads the data while training instead of preparing it first."),
    Field("train.objective", choice(Objective), "What the loss asks of the model."),
    Field("train.method", auto(choice(Method)), "`auto` takes the first of them that finishes within `limits.hours`."),
    Field("train.seq_len", whole("a number of tokens", minimum=8), "Longest row, in tokens."),
    Field(
        "train.tokens_per_step",
        whole("a number of tokens", minimum=8),
        "The global batch, in tokens; never changed to save memory.",
    ),
    Field("train.epochs", nullable(number(above=0)), "Passes over the data; or `steps`, or `tokens`."),
    Field("train.steps", nullable(whole("a number of steps", minimum=1)), "Optimizer steps, instead of `epochs`."),
    Field("train.tokens", nullable(whole("a number of tokens", minimum=1)), "Tokens to learn, instead of `epochs`."),
    Field("train.lr", auto(number(above=0, maximum=10)), "Peak learning rate; `auto` depends on method and size."),
    Field("train.schedule", choice(LrSchedule), "Course of the learning rate after warmup."),
    Field("train.warmup", auto(warmup()), "Part of the run in which the rate rises; `auto` is 3%, of dpo 10%."),
    Field("train.weight_decay", number(minimum=0, maximum=10), "Decoupled weight decay, on matrices."),
    Field("train.clip", number(above=0), "Largest norm of the gradient."),
    Field("train.seed", whole(minimum=0, maximum=2**32 - 1), "Of initial weights, data order and dropout."),
    Field("train.neftune_alpha", nullable(number(above=0)), "Noise on the embeddings (NEFTune)."),
    Field("train.lora.rank", whole(minimum=1), "Rank of the adapters."),
    Field("train.lora.alpha", number(above=0), "Scale of the adapters: alpha / rank."),
    Field("train.lora.dropout", number(minimum=0, below=1), "Dropout in front of the adapters."),
    Field(
        "train.lora.targets",
        texts("all-linear or a list of module names", may_be_empty=False),
        "Modules that get an adapter.",
    ),
    Field("train.lora.dora", flag(), "Trains magnitude and direction apart (DoRA)."),
    Field("train.lora.rslora", flag(), "Scales by alpha / sqrt(rank) (rank-stabilised LoRA)."),
    Field("train.galore.rank", whole(minimum=1), "Rank of the gradient's projection."),
    Field("train.galore.update_gap", whole("a number of steps", minimum=1), "Steps between two new projections."),
    Field("train.galore.scale", number(above=0), "Scale of the projected update."),
    Field(
        "train.galore.projection",
        word("std", "reverse_std", "right", "left", "full"),
        "Which side of the gradient is projected.",
    ),
    Field("train.galore.layerwise", flag(), "Updates each layer inside the backward pass."),
    Field("train.dpo.beta", number(above=0), "How strongly DPO holds on to the reference."),
    Field("allow", choices(Allowance), "What the planner may use beyond exact, on-device strategies."),
    Field("limits.hours", hours(), "The plan must finish within; a run stops ahead of it with a checkpoint."),
    Field("limits.vram", nullable(size()), "Cap of each device, for planning and at run time."),
    Field("limits.host_ram", nullable(size()), "Cap of host RAM; null is what the cgroup or Slurm allows."),
    Field("limits.nvme.path", nullable(_PATH), "Folder on a local NVMe disk for offloaded state."),
    Field("limits.nvme.size", nullable(size()), "Most bytes to write there."),
    Field(
        "limits.cost",
        nullable(number(above=0)),
        "The plan must cost at most, at `price_per_gpu_hour`; a run stops ahead of it with a checkpoint.",
    ),
    Field("pin.sharding", auto(choice(Sharding)), "How model state is spread over the ranks."),
    Field("pin.offload", auto(choice(Offload)), "What lives in host RAM or on NVMe."),
    Field("pin.optimizer", auto(choice(Optimizer)), "The update rule and its implementation."),
    Field("pin.precision", auto(choice(Precision)), "Of weights and computation."),
    Field("pin.fp8_recipe", auto(choice(Fp8Recipe)), "How FP8 scales are found."),
    Field("pin.checkpointing", auto(choice(Checkpointing)), "Which activations are recomputed."),
    Field(
        "pin.checkpointing_n",
        auto(whole("a number of blocks", minimum=1)),
        "Of `every_n`: one block in so many is recomputed; 2 unless said.",
    ),
    Field("pin.activation_offload", auto(flag()), "Keeps activations in host RAM until the backward pass."),
    Field("pin.attention", auto(choice(Attention)), "The attention kernel."),
    Field("pin.loss", auto(choice(LossHead)), "How much of the logits is ever alive."),
    Field(
        "pin.micro_batch",
        auto(whole("a number of sequences", minimum=1)),
        "Sequences one rank puts through one forward.",
    ),
    Field("pin.compile", auto(flag()), "torch.compile, block by block."),
    Field("pin.optimizer_in_backward", auto(flag()), "Updates each weight as soon as its gradient is complete."),
    Field("checkpoint.every", auto(every(allows_time=True)), "Between two saved states."),
    Field("checkpoint.keep", whole("a number of checkpoints", minimum=1), "Newest checkpoints that are kept."),
    Field(
        "checkpoint.keep_every",
        nullable(every(allows_time=False)),
        "Also keeps the checkpoints of every so many steps, for good.",
    ),
    Field("checkpoint.best", nullable(word("eval_loss")), "Also keeps the checkpoint that is best by this score."),
    Field("checkpoint.async", auto(flag()), "Writes while training goes on."),
    Field("eval.every", auto(every(allows_time=False)), "Between two scores of the held-out rows."),
    Field(
        "eval.early_stop",
        nullable(whole("a number of evaluations", minimum=1)),
        "Stops after so many evaluations without a better loss.",
    ),
    Field("log.wandb", choice(WandbMode), "Whether and how Weights & Biases is told."),
    Field("log.project", text("a name"), "Project of Weights & Biases."),
    Field("log.name", nullable(text("a name")), "Name of the run there; null is the run directory's."),
    Field("log.tensorboard", flag(), "Writes TensorBoard files into the run directory."),
    Field(
        "log.every",
        every(allows_time=False),
        "Between two lines of metrics.jsonl; the first, the last, scored and skipped steps always have one.",
    ),
    Field("log.notify", nullable(notification()), "Told when the run ends, fails or is queued again."),
    Field("slurm.partition", nullable(text("a partition")), "`sbatch --partition`; null is the cluster's default."),
    Field("slurm.nodes", nullable(whole("a number of nodes", minimum=1)), "Nodes to ask for; null is one."),
    Field("slurm.gpus", nullable(whole("a number of GPUs", minimum=1)), "GPUs of each node; null is all it has."),
    Field(
        "slurm.cores",
        nullable(whole("a number of cores", minimum=1)),
        "Cores of each node, which may then be shared with other jobs; null is all of it, or the share of its GPUs.",
    ),
    Field(
        "slurm.memory",
        nullable(size()),
        "RAM of each node, which may then be shared with other jobs; null is all of it, or the share of its GPUs.",
    ),
    Field("slurm.account", nullable(text("an account")), "`sbatch --account`."),
    Field("slurm.qos", nullable(text("a quality of service")), "`sbatch --qos`."),
    Field(
        "slurm.time",
        nullable(text('a time such as "24:00:00" or "2-12:00:00"', pattern=_SLURM_TIME)),
        "`sbatch --time`; null is what the plan predicts, with a margin, and at most what the partition allows.",
    ),
    Field("slurm.constraint", nullable(text("features of nodes")), "`sbatch --constraint`."),
    Field("slurm.reservation", nullable(text("a reservation")), "`sbatch --reservation`."),
    Field("slurm.mail", nullable(text("an address")), "Told by Slurm when a job ends, fails or is requeued."),
    Field("slurm.comment", nullable(text()), "`sbatch --comment`."),
    Field(
        "slurm.requeue",
        flag(),
        "A job that is stopped before the end of the run is queued again; with false a new job follows it.",
    ),
    Field(
        "slurm.chain",
        whole("a number of jobs", minimum=1, maximum=100),
        "Jobs that are submitted at once, each going on where the one before it stopped.",
    ),
    Field(
        "slurm.network",
        choice(NodeNetwork),
        "Whether compute nodes reach the hub; with `none` everything must be here before a job is submitted.",
    ),
    Field(
        "slurm.stage",
        choices(Stage),
        "What is copied to each node's own disk before the ranks start; `folders.scratch` in config.yaml says where.",
    ),
    Field("slurm.modules", texts("a list of modules", may_be_empty=True), "Loaded before the run."),
    Field(
        "slurm.container",
        nullable(text("an image")),
        "Image that the ranks run in: `docker://NAME` or a `.sqsh` file (pyxis), a `.sif` file (Apptainer).",
    ),
    Field(
        "slurm.extra",
        texts('a list of options such as "--constraint=a100"', may_be_empty=True),
        "More options of sbatch.",
    ),
    Field(
        "extensions", nullable(text("the path of a Python file")), "Your own format_row, build_model, loss or on_step."
    ),
    Field(
        "output", nullable(_PATH), "Run directories are made beside this name; null is runs/ and the job file's name."
    ),
    Field("price_per_gpu_hour", nullable(number(above=0)), "What one GPU costs for an hour, in your currency."),
)

BY_PATH: Mapping[str, Field] = {entry.path: entry for entry in FIELDS}

SECTIONS: Mapping[str, type[Value]] = {
    "": Job,
    "model": ModelJob,
    "data": DataJob,
    "train": TrainJob,
    "train.lora": LoraJob,
    "train.galore": GaloreJob,
    "train.dpo": DpoJob,
    "limits": Limits,
    "limits.nvme": NvmeLimit,
    "pin": Pin,
    "checkpoint": CheckpointJob,
    "eval": EvalJob,
    "log": LogJob,
    "slurm": SlurmJob,
}

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("model.name", "model.config"),
    ("train.epochs", "train.steps", "train.tokens"),
)


def attribute(path: str) -> str:
    """The name in the value; `async` is a word of Python's own."""
    name = path.rpartition(".")[2]
    return "is_async" if path == "checkpoint.async" else name


def children(section: str) -> tuple[str, ...]:
    """Paths of the settings and sections directly in a section, in the order of the table."""
    prefix = f"{section}." if section else ""
    inside = (entry.path[len(prefix) :] for entry in FIELDS if entry.path.startswith(prefix))
    return tuple(dict.fromkeys(prefix + path.partition(".")[0] for path in inside))


def section_says(section: str) -> str:
    """What a section is for, in one sentence; what follows a semicolon there is about the value in Python."""
    first = (SECTIONS[section].__doc__ or "").partition("\n")[0]
    return first.partition(";")[0].rstrip(".") + "."
