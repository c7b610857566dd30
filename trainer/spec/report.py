"""Report of a run: the ending, the verified engine, and measured and predicted figures.

Rank 0 writes one per attempt; the supervisor writes the run's. Both have this shape.
"""

from enum import StrEnum

from msgspec import field

from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.value import Value

REPORT_FORMAT = 1


class Ending(StrEnum):
    """Ending of a run."""

    FINISHED = "finished"
    STOPPED = "stopped"  # by Ctrl-C, after a checkpoint
    PREEMPTED = "preempted"  # by TERM or USR1, after a checkpoint: requeue it
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"


class Fault(StrEnum):
    """Faults that end an attempt."""

    OUT_OF_MEMORY = "out_of_memory"  # of a device, or under a data limit
    HOST_OUT_OF_MEMORY = "host_out_of_memory"  # the kernel ended a rank for want of RAM
    KILLED = "killed"  # a signal ended a rank or the launcher
    HUNG = "hung"  # a rank wrote no heartbeat for too long
    ERROR = "error"  # a rank raised, or ended without a report

    @property
    def is_memory(self) -> bool:
        return self in (Fault.OUT_OF_MEMORY, Fault.HOST_OUT_OF_MEMORY)


class TimePart(StrEnum):
    """Parts of the time of a run, as it was predicted and measured, in their order."""

    START_UP = "start-up"  # until the first step: processes, libraries, data and model; also what is no other part
    STEPS = "steps"  # torch.compile in the first of them included
    EVALUATION = "evaluation"  # held-out rows, and the reference of pairs before the first step
    SAVING = "saving"  # as long as training waits
    SAMPLE = "sample"  # of what the trained model writes
    EXPORT = "export"


class MemoryPoint(Value, frozen=True, kw_only=True):
    """Allocated bytes at a moment of the profiled step."""

    at_s: float  # since the step began
    allocated_bytes: int
    phase: str  # data, forward, backward, optimizer; empty between them


class MemoryFigures(Value, frozen=True, kw_only=True):
    """Bytes on one device; None where a counter does not exist (the CPU has no reserved memory)."""

    steady_allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None  # anonymous resident memory of the rank
    parts: dict[str, int] = {}
    peaks: dict[str, int] = {}  # allocated at most in each phase of the profiled step
    timeline: tuple[MemoryPoint, ...] = ()  # of that step


class SpeedFigures(Value, frozen=True, kw_only=True):
    """Median over the steady steps."""

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None  # positions that go through the model, without padding
    targets_per_s_per_gpu: float | None = None  # tokens that are learned; None: predicted, or of an earlier version,
    # which gave these as tokens
    mfu: float | None = None
    parts: dict[str, float] = {}  # seconds of a step: data, forward, backward, optimizer, wait; predicted ones by cause
    queued_share: float | None = None  # of the time, in which threads of rank 0 waited for a core


class DeviceTime(Value, frozen=True, kw_only=True):
    """Use of the GPU of rank 0 in sampled steps; shares are of the time of these steps."""

    num_steps: int
    idle_share: float  # no stream ran a kernel or a copy
    kinds: dict[str, float] = {}  # in which kernels of a kind ran, the largest first; kinds on several streams overlap


class Figures(Value, frozen=True, kw_only=True):
    """One side of the comparison; predicted and measured have the same shape."""

    memory: MemoryFigures = MemoryFigures()
    speed: SpeedFigures = SpeedFigures()


class Verified(Value, frozen=True, kw_only=True):
    """Configuration that was verified after everything was built, as opposed to requested."""

    world_size: int
    engine_class: str  # class that wraps the model
    sharded_parameters: int  # parameters held as DTensor or ZeRO partition
    partition_elements: int | None  # elements of model state this rank owns, where sharded
    optimizer_class: str
    attention: str
    loss: str
    precision: str
    accumulation: int
    backend: str | None = None
    checkpointed_blocks: int = 0
    not_compiled: str | None = None  # why blocks that failed to compile ran eagerly
    graph_breaks: dict[str, int] = {}  # places where torch.compile left a block's graph, by their reason
    facts: dict[str, str] = {}  # what was seen after the first step: state types, recomputation, scale, trained share


class Evaluation(Value, frozen=True, kw_only=True):
    """Score on the held-out rows; of pairs, the loss is DPO's and the perplexity that of the chosen completions."""

    step: int
    loss: float
    perplexity: float
    num_tokens: int
    unigram_entropy_nats: float | None = None
    accuracy: float | None = None  # share of the targets that are the most likely token
    reward_accuracy: float | None = None  # share of the pairs whose chosen completion has the higher reward
    reward_margin: float | None = None  # reward of the chosen completion less that of the rejected one, mean


class Sample(Value, frozen=True, kw_only=True):
    """The same prompt continued before and after."""

    prompt: str
    before: str | None
    after: str | None


class RollBack(Value, frozen=True, kw_only=True):
    """A return to the last checkpoint, after steps that were not finite."""

    from_step: int
    to_step: int


class AttemptRecord(Value, frozen=True, kw_only=True):
    """One attempt of a run: what ran, and how it ended."""

    number: int  # of attempts/N
    strategy: str
    num_ranks: int
    micro_batch: int
    accumulation: int
    resumed_from_step: int | None  # None: from the beginning
    step: int  # optimizer steps done
    ending: Ending
    fault: Fault | None = None  # None: it ended in order
    cause: str | None = None  # of the fault, in a sentence
    duration_s: float
    predicted_peak_bytes: int
    measured_peak_bytes: int | None = None  # allocated; where memory ran out, what was held by then
    phases_s: dict[str, float] = {}  # of rank 0, by `TimePart`; the rest of the time is start-up


class Report(Value, frozen=True, kw_only=True):
    """The end of an attempt or of a run."""

    format: int = REPORT_FORMAT
    ending: Ending
    exit_code: int
    plan: Candidate
    predicted: Figures
    measured: Figures
    verified: Verified | None = field(name="engaged")
    incidents: tuple[str, ...]
    roll_backs: tuple[RollBack, ...] = ()
    versions: dict[str, str]
    step: int  # optimizer steps done
    num_steps: int
    tokens: int  # positions that went through the model, without padding
    targets: int | None = None  # tokens that were learned; None: of an earlier version, which gave these as tokens
    duration_s: float  # of a run: of all its attempts, without the time between them
    predicts_longest_row: bool = False  # predicted memory is of the longest row, measured memory of one step's rows
    predicted_s: float | None = None  # of the whole run of `plan`: the sum of its parts
    predicted_parts_s: dict[str, float] = {}  # by `TimePart`; what it lacks was not predicted
    phases_s: dict[str, float] = {}  # as an attempt's; of a run: of all its attempts
    saved_bytes: int | None = None  # of checkpoints that training waited for, written and read back, by all ranks
    final_loss: float | None = None
    evaluations: tuple[Evaluation, ...] = ()
    sample: Sample | None = None
    checkpoint: str | None = None  # newest committed, relative to the run directory
    export: str | None = None  # relative to the run directory
    resumed_from_step: int | None = None
    attempts: int = 1
    history: tuple[AttemptRecord, ...] = ()  # of a run: every attempt, those before a resumption too
    limit: str | None = None  # of a run that was stopped: the limit of the job that did it, limits.hours or limits.cost
    error: str | None = None  # one line
    device_time: DeviceTime | None = None  # of the last attempt; None: not sampled

    @property
    def parts_s(self) -> dict[str, float]:
        """Measured seconds of each part, which sum to the duration; empty in a report of an earlier version."""
        if not self.phases_s:
            return {}
        known = {part.value: self.phases_s[part] for part in TimePart if part in self.phases_s}
        return {TimePart.START_UP.value: max(0.0, self.duration_s - sum(known.values())), **known}

    @property
    def tokens_per_s(self) -> float | None:
        """Measured tokens per second of all devices, without padding: the median of the steady steps."""
        each = self.measured.speed.tokens_per_s_per_gpu
        return None if each is None else each * self.plan.num_ranks


def predicted_figures(candidate: Candidate) -> Figures:
    """The plan's side of the comparison."""
    memory, speed = candidate.memory, candidate.speed
    return Figures(
        memory=MemoryFigures(
            steady_allocated_bytes=memory.steady_allocated_bytes,
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            device_bytes=memory.device_bytes,
            host_bytes=memory.host_bytes,
            parts=memory.parts,
        ),
        speed=SpeedFigures(
            step_s=speed.step_s, tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu, mfu=speed.mfu, parts=speed.parts
        ),
    )


def relative_difference(predicted: float | None, measured: float | None) -> float | None:
    """(measured - predicted) / predicted: -0.1 if a tenth less was measured; None without both figures."""
    return None if measured is None or not predicted else measured / predicted - 1


MOST_QUEUED = 0.25  # of the time; one other program on each core makes it a half


def busy_cores(report: Report) -> str | None:
    """That other programs used the cores for so much of the time that measured speeds mean little; None if not."""
    queued = report.measured.speed.queued_share or 0.0
    return f"other programs used the cores {queued:.0%} of the time" if queued > MOST_QUEUED else None
