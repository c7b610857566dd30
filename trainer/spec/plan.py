"""A plan: the chosen candidate, the others, and the rejected ones with reasons. The one artefact for the ranks.

`candidates[0]` is what runs. The ranks cannot plan again: everything they need (schedule, FLOPs per token, predicted
parts) is in here. `attempts/N/plan.json` holds the same value reduced to the candidate that ran.

The learning rate is a function of the step, so that no position has to be saved or restored. Steps count from 1: step 1
is the first update, step `num_steps` the last, as in metrics.jsonl. During warmup the rate rises linearly and is full
at step `warmup_steps`; after it

    cosine    half a cosine from the full rate to a tenth of it (Chinchilla, arXiv:2203.15556, app. B: a tenth)
    linear    a straight line to zero
    constant  the full rate
    wsd       the full rate, then 1 - sqrt over the last fifth of the run (Haegele et al., arXiv:2405.18392)

The end of a course lies one step behind the last update: no update is spent at a rate of zero.

`CalibrationRecord` is one finished run or trial: its measurements with their predictions, keyed by GPU, driver and
torch (a machine's name means nothing to the next one). `predicted_...` is the result of the formulas, before any
correction by earlier runs: a correction is learned from it, so that it never corrects itself. `stated_...` is what the
plan showed, correction included. A record names the version of the formulas and the source of the ceilings
(`shardwise`, `rates`): speed that was predicted with others does not correct today's predictions.
"""

import math
from enum import StrEnum
from typing import Any

from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.job.sections import Job, LrSchedule, TrainJob
from shardwise.trainer.spec.messages.extension import Extension
from shardwise.trainer.spec.model.blocks import Component
from shardwise.trainer.spec.model.shape import ModelCode, ModelShape
from shardwise.trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Precision,
    Strategy,
)
from shardwise.trainer.spec.value import Value

PROFILE_FOLDER = "profile"  # of a run directory
FIGURES_FILE = "profile.json"


class ProfileRequest(Value, frozen=True, kw_only=True):
    """Have rank 0 run the last step under torch's profiler."""

    num_operators: int = 12  # those that take longest first


class OperatorTime(Value, frozen=True, kw_only=True):
    """An operator of torch, over all of its calls in the step."""

    name: str
    num_calls: int
    seconds: float  # its own, without what it calls; of the device, where that is a GPU


class ProfileFigures(Value, frozen=True, kw_only=True):
    """One step of one rank, seen by torch's profiler; times of a step that is profiled are longer than others."""

    step: int
    step_s: float
    operators: tuple[OperatorTime, ...]
    files: dict[str, str]  # name: what it is


PLAN_FORMAT = 1
LEAST_FP8_GAIN = 1.05  # what is within the noise of a few repetitions is no gain


class MemoryEstimate(Value, frozen=True, kw_only=True):
    """Predicted memory of one device and of its share of the host.

    `parts` are the named byte terms of the peak event and sum to `peak_allocated_bytes`. `events` holds the total of
    every event of a step. Allocated, reserved and device: torch's live bytes, its cached segments, what nvidia-smi
    shows. `need_bytes` is what the fit decision compares with the usable memory: the peak with its margin and the
    overheads outside the allocator.
    """

    parts: dict[str, int]
    peak_event: str
    events: dict[str, int]
    steady_allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    need_bytes: int
    usable_bytes: int
    pinned_bytes: int = 0  # host RAM of one node that cannot be paged out
    host_bytes: int = 0  # pageable host RAM of one node
    nvme_bytes: int = 0  # of one node
    outside_bytes: int = 0  # of `device_bytes`, outside of torch's allocator: context and communicators
    checkpoint_bytes: int = 0  # of one checkpoint, from all ranks: trained weights and optimizer state; 0: not known

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.usable_bytes

    @property
    def occupied_bytes(self) -> int:
        """Bytes of the device that a run occupies: those it needs, or those that its allocator reserves."""
        return max(self.need_bytes, self.device_bytes)


class SpeedEstimate(Value, frozen=True, kw_only=True):
    """Predicted seconds of one optimizer step, by part, and what follows from them."""

    parts: dict[str, float]
    step_s: float
    tokens_per_s_per_gpu: float
    flops_per_token: float
    peak_flops_per_s: float | None  # dense, in the precision that runs; None where it is unknown
    mfu: float | None


class Buckets(Value, frozen=True, kw_only=True, cache_hash=True):
    """Sizes of a sharding engine's buffers, in elements."""

    reduce_elements: int
    allgather_elements: int
    prefetch_elements: int
    live_parameters: int
    persistence_elements: int


class Candidate(Value, frozen=True, kw_only=True):
    """A strategy with its settings for this job on this machine, and what it would need."""

    strategy: Strategy
    method: Method
    num_ranks: int
    micro_batch: int  # sequences one rank puts through one forward
    accumulation: int  # micro batches one rank adds up before a step
    seq_len: int
    checkpointing: Checkpointing
    attention: Attention
    loss: LossHead
    memory: MemoryEstimate
    speed: SpeedEstimate
    checkpoint_every_n: int | None = None
    loss_chunk_tokens: int | None = None
    compile: bool = False
    fused_kernels: bool = False  # Liger's, in blocks that run eagerly
    activation_offload: bool = False
    optimizer_in_backward: bool = False
    fp8_recipe: Fp8Recipe | None = None  # of precision fp8
    tf32: bool = False  # of precision fp32: matrix products round their inputs to TF32
    flash_kernel: str | None = None  # of attention flash, OWNER/flash-attn2@COMMIT on the hub; None: flash-attn
    buckets: Buckets | None = None
    shard_group: int | None = None  # ranks that share one copy of the state under hsdp; None: those of a machine
    reduce_every_micro_batch: bool = False  # FSDP2 sums gradients over the ranks with each, not with the last alone
    bf16_reduction: bool = False  # of FSDP2: gradients are added up over the ranks in bf16
    embedding_on_host: bool = False  # the frozen table of input embeddings is in host RAM, and rows are looked up there
    prefetch_two_blocks: bool = False  # FSDP2 gathers the weights of two blocks ahead of the one at work, not of one
    fused_adapters: bool = False  # an adapted layer is one autograd function, which adds in place
    compiled_head: bool = False  # torch.compile of the slices of the loss head, each as long as the others
    reasons: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return self.strategy.is_exact_with(tf32=self.tf32, optimizer_in_backward=self.optimizer_in_backward)


class Rejection(Value, frozen=True, kw_only=True):
    """A row of the catalogue that was not chosen, and the number or the rule that decided."""

    strategy: str
    reason: str
    remedy: str | None = None  # the smallest change that would make it fit
    rule: str | None = None  # the name of the rule, None where a number decided


class MethodRow(Value, frozen=True, kw_only=True):
    """One line of the table of methods."""

    method: Method
    memory_bytes: int | None
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    verdict: str  # taken, fits, or the reason against it
    kwh: float | None = None  # of the boards alone
    occupied_bytes: int | None = None  # of a device, by a run: what it needs, or what its allocator reserves
    is_within_limits: bool = False  # it could be selected


class Schedule(Value, frozen=True, kw_only=True):
    """The run in steps: a function of job and data, and of the number of ranks if the job does not set the batch."""

    num_steps: int
    length_source: str = ""
    sequences_per_step: int
    tokens_per_step: int
    batch_source: str = ""
    warmup_steps: int
    lr: float
    lr_source: str
    warmup_source: str = ""
    eval_every_steps: int | None
    checkpoint_every_steps: int | None
    checkpoint_every_s: float | None = None  # of the two that are set, whichever comes first
    saving_max_share: float | None = None  # of the run's time that saving may cost; None: no limit
    rehearses_save: bool = False  # saves after the first step and reads that back
    eval_every_s: float | None = None


class TrialResult(Value, frozen=True, kw_only=True):
    """Measurements of a few real steps of a candidate."""

    strategy: str
    micro_batch: int
    step_s: float | None
    peak_allocated_bytes: int | None
    ran_out_of_memory: bool = False
    predicted_step_s: float | None = None  # by the plan that the trial was of


class ShapeTimes(Value, frozen=True, kw_only=True):
    """Seconds of one forward and backward of a linear layer, as version 0.7 timed them; no longer read."""

    in_features: int
    out_features: int
    count: int  # layers of this shape in the model
    bf16_s: float
    fp8_s: float


class BlockTimes(Value, frozen=True, kw_only=True):
    """Seconds of one forward and backward of a kind of block, each started without waiting for the one before."""

    count: int  # blocks of this kind in the model
    flops: float  # of the products that run in FP8, forward and backward
    bf16_s: float  # compiled or eager, whichever is faster
    plain_s: float  # bf16 in the form that FP8 runs in
    fp8_s: float


class Fp8Gain(Value, frozen=True, kw_only=True):
    """Speedup of a model's blocks in FP8 by one recipe, as they would run; measured before planning."""

    recipe: Fp8Recipe
    tokens: int  # of the micro batch that was timed
    library: str | None = None  # what multiplied, with its version
    compile: bool = False  # FP8 ran under torch.compile
    blocks: tuple[BlockTimes, ...] = ()
    shapes: tuple[ShapeTimes, ...] = ()
    problem: str | None = None  # why nothing was timed
    others: "tuple[Fp8Gain, ...]" = ()  # by the other recipes, which are slower

    @property
    def speedup(self) -> float | None:
        """Seconds of all blocks in bf16 over their seconds in FP8; None where nothing was timed."""
        fp8_s = sum(block.count * block.fp8_s for block in self.blocks)
        return sum(block.count * block.bf16_s for block in self.blocks) / fp8_s if fp8_s else None

    @property
    def all(self) -> "tuple[Fp8Gain, ...]":
        """The gain of each FP8 recipe, the fastest first."""
        return (self, *self.others)

    @property
    def saved_s_per_flop(self) -> float | None:
        """Seconds that a FLOP of the converted products saves against bf16 in the same form, casts included."""
        flops = sum(block.count * block.flops for block in self.blocks)
        return sum(block.count * (block.plain_s - block.fp8_s) for block in self.blocks) / flops if flops else None

    @property
    def pays(self) -> bool:
        """True if FP8 is worth its rounding."""
        return self.speedup is not None and self.speedup >= LEAST_FP8_GAIN

    @property
    def text(self) -> str:
        """Text that follows `fp8` in a sentence."""
        if self.speedup is None:
            return f"was not timed: {self.problem}"
        return f"{'; '.join(each._measured for each in self.all)}, on this model's blocks"

    @property
    def _measured(self) -> str:
        fp8 = self.recipe
        if self.speedup is None:
            return f"{fp8} was not timed: {self.problem}"
        form = ", ".join(filter(None, (self.library, "compiled" if self.compile else "eager")))
        return f"{fp8} measured {self.speedup:.2f}x of bf16 ({form})"


class RecordSource(StrEnum):
    """Source of the measurement."""

    RUN = "run"
    TRIAL = "trial"  # a few steps


class RatesSource(StrEnum):
    """Source of the ceilings of a predicted step time."""

    DATASHEET = "datasheet"  # or assumed, where there is none
    MEASURED = "measured"  # probe --measure


class CalibrationRecord(Value, frozen=True, kw_only=True):
    """Predicted and measured figures of one run; what lines of earlier versions lack is None."""

    device: str  # GPU catalogue or probe name, or the CPU's
    driver: str | None
    torch: str
    strategy: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_s: float
    measured_step_s: float
    finished_at: str  # UTC, ISO 8601
    shardwise: str | None = None  # version whose formulas predicted
    source: RecordSource = RecordSource.RUN
    rates: RatesSource | None = None
    host: str | None = None  # for a person who wonders where a line is from
    method: Method | None = None
    sharding: Sharding | None = None
    offload: Offload | None = None
    precision: Precision | None = None
    num_ranks: int | None = None
    is_padded: bool = False  # the measured peak is of one step's rows, the predicted one of the longest
    micro_batch: int | None = None
    seq_len: int | None = None
    tokens_per_step: int | None = None
    model_type: str | None = None
    num_parameters: int | None = None
    peak_event: str | None = None
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    predicted_device_bytes: int | None = None
    measured_device_bytes: int | None = None
    stated_peak_bytes: int | None = None
    stated_step_s: float | None = None
    transformers: str | None = None
    is_compiled: bool | None = None  # torch.compile ran; False: blocks failed to compile; None: it was not planned
    not_compiled: str | None = None  # why they failed
    moves_activations: bool = False  # all of them to host RAM, none recomputed
    start_up_s: float | None = None  # of one attempt that began at the beginning
    saved_bytes_per_s: float | None = None  # of checkpoints for which training waited, written and read back together
    exported_bytes_per_s: float | None = None  # of the export, likewise


class Calibration(Value, frozen=True, kw_only=True):
    """The records that apply to the machine at hand, oldest first."""

    records: tuple[CalibrationRecord, ...] = ()


class Coverage(Value, frozen=True, kw_only=True):
    """Weights of the linear layers of one part of all blocks, and how many of them adapters and 4-bit storage cover."""

    component: Component
    num_weights: int
    num_adapted: int
    num_packed: int | None = None  # None: no 4-bit base, or one whose files decide


class Plan(Value, frozen=True, kw_only=True):
    """The decision, with everything it was made from."""

    format: int = PLAN_FORMAT
    name: str
    job: Job
    hardware: Hardware
    model_shape: ModelShape
    model_config: dict[str, Any]
    model_path: str | None  # the folder that holds the weights to start from; None: from scratch
    tokenizer_path: str | None
    data: DataProfile
    device_kind: DeviceKind
    schedule: Schedule
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    methods: tuple[MethodRow, ...]
    coverage: tuple[Coverage, ...] = ()  # of adapters; none where all weights are trained
    fallbacks: tuple[Candidate, ...]
    calibration: Calibration
    versions: dict[str, str]
    trials: tuple[TrialResult, ...] = ()  # what --trial measured before the candidates were ranked
    fp8_gain: Fp8Gain | None = None  # None: not timed, or FP8 not requested
    extension: Extension | None = None  # a user's own functions; of a run, the copy in its directory
    model_code: ModelCode | None = None  # of the model's repository, trusted by the job
    staged: dict[str, str] = {}  # set by the supervisor: folders that ranks read, and their copies on each node
    warnings: tuple[str, ...] = ()  # cautions that every form of the plan shows
    notes: tuple[str, ...] = ()
    needs_version: str | None = None  # in plans of shardwise 0.5, which its runs still have; not used
    resume: bool = False  # set by the supervisor: go on from the newest committed checkpoint of the run
    is_trial: bool = False  # set by the supervisor: measure a few steps, score, save and export nothing
    profile: ProfileRequest | None = None  # set by the supervisor: profile the last step

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole run without padding; of a stream, whose rows are not known, positions of its steps."""
        data, schedule = self.data, self.schedule
        if data.is_stream or not data.num_rows:
            return schedule.num_steps * schedule.tokens_per_step
        of_rows = data.num_tokens * schedule.num_steps * schedule.sequences_per_step // data.num_rows
        return min(of_rows, schedule.num_steps * schedule.tokens_per_step)

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """`warnings`, and the Python code that the model brings."""
        return self.warnings if self.model_code is None else (*self.warnings, self.model_code.description)

    def place_of(self, folder: str) -> str:
        """Path at which the ranks read a folder of this plan: its copy on their node, if there is one."""
        return self.staged.get(folder, folder)

    @property
    def num_machines(self) -> int:
        """Machines that the chosen candidate runs on: all of them, or one where it does not use every device."""
        return self.hardware.num_nodes if self.chosen.num_ranks == self.hardware.num_devices else 1

    @property
    def hybrid_mesh(self) -> tuple[int, int] | None:
        """(replicas, shards) under hybrid sharding: neighbouring ranks share one of several copies; else None."""
        chosen = self.chosen
        if not chosen.strategy.sharding.facts.shards_within_group:
            return None
        shards = chosen.shard_group or chosen.num_ranks // self.num_machines
        return chosen.num_ranks // shards, shards


COSINE_FLOOR = 0.1  # of the full rate
WSD_COOLDOWN_SHARE = 0.2  # of the run


def learning_rate(schedule: Schedule, train: TrainJob, step: int) -> float:
    """The rate of update `step`, counted from 1; ValueError outside of 1 .. num_steps."""
    if not 1 <= step <= schedule.num_steps:
        raise ValueError(f"step {step} is outside of 1 .. {schedule.num_steps}")
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    return schedule.lr * _share_of_full_rate(schedule, train.schedule, step)


def _share_of_full_rate(schedule: Schedule, course: LrSchedule, step: int) -> float:
    num_done, num_falling = step - 1 - schedule.warmup_steps, schedule.num_steps - schedule.warmup_steps
    if course is LrSchedule.CONSTANT:
        return 1.0
    if course is LrSchedule.LINEAR:
        return 1 - num_done / num_falling
    if course is LrSchedule.COSINE:
        return COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * num_done / num_falling)) / 2
    num_cooldown = min(num_falling, max(1, round(WSD_COOLDOWN_SHARE * schedule.num_steps)))
    num_cooled = max(0, step - 1 - (schedule.num_steps - num_cooldown))
    return 1 - math.sqrt(num_cooled / num_cooldown)
