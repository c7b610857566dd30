"""Why the chosen setting is what it is, and what a reader must know beside it: sentences, each with its number."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from trainer.planning.candidates import candidate_of, setting_of, with_micro_batch
from trainer.planning.context import PlanningContext
from trainer.planning.reasons.certainty import certainty_words, trial_words
from trainer.planning.reasons.data_words import data_words
from trainer.planning.rules.rule import capability_words
from trainer.planning.search.settings_choices import attention, micro_batches, updates_in_backward
from trainer.planning.search.settings_search import SAME_SPEED
from trainer.planning.speed.step import speed_notes
from trainer.spec.data.profile import DataProfile
from trainer.spec.messages.extension import Hook
from trainer.spec.plan import Candidate, TrialResult
from trainer.spec.strategy import Checkpointing, LossHead, Offload, Precision, Sharding, Strategy
from trainer.spec.units import format_bytes

_WHY_SHARDING = {
    Sharding.NONE: "one device: nothing to share",
    Sharding.DDP: "the whole state fits on every device, and ddp exchanges gradients only",
    Sharding.ZERO1: "optimizer state is spread over the ranks",
    Sharding.ZERO2: "optimizer state and gradients are spread over the ranks",
    Sharding.ZERO3: "weights, gradients and optimizer state are spread over the ranks",
    Sharding.FSDP: "weights, gradients and optimizer state are spread over the ranks",
    Sharding.FSDP_GRAD_OP: "gradients and optimizer state are spread; weights stay gathered until the backward ends",
    Sharding.HSDP: "state is spread inside each node and replicated across nodes",
}

_TIMES_FP8_FIRST = "`shardwise train` times it on this model's matrix shapes first and takes it only where it pays"


def reasons(context: PlanningContext, candidate: Candidate) -> tuple[str, ...]:
    """Why each setting of `candidate` was taken."""
    row = candidate.strategy
    return (
        f"{row.sharding}: {_why_sharding(row, candidate.num_ranks)}",
        f"{row.precision}: {_why_precision(context, row.precision)}",
        f"micro batch {candidate.micro_batch}: {_why_micro_batch(context, candidate)}",
        f"checkpointing {candidate.checkpointing}: {_why_checkpointing(context, candidate)}",
        f"attention {candidate.attention}: {attention(context, row.precision)[1]}",
        f"loss {candidate.loss}: {_why_loss(context, candidate)}",
    )


def notes(
    context: PlanningContext, data: DataProfile, trials: Sequence[TrialResult], candidates: Sequence[Candidate]
) -> tuple[str, ...]:
    """Cautions about the plan that chooses `candidates[0]`."""
    chosen = candidates[0]
    return (
        *_batch_notes(context, chosen),
        *_update_notes(context, chosen),
        *_extension_notes(context),
        *_data_notes(data, chosen),
        *trial_words(trials),
        *certainty_words(context.corrections, chosen, context.device),
        *_engine_notes(candidates),
        *_fp8_notes(context, candidates),
        *_host_notes(context, chosen),
        *speed_notes(context.device),
        *context.hardware.notes,
    )


def _extension_notes(context: PlanningContext) -> Iterator[str]:
    """Cautions about a user's own functions, which no closed form covers."""
    if Hook.BUILD_MODEL in context.hooks:
        yield "build_model of extensions: memory and time are those of the config's model, whatever it builds"
    if Hook.LOSS in context.hooks:
        yield "loss of extensions: counted as a cross entropy of whole logits; what it takes beside is not predicted"
    if Hook.ON_STEP in context.hooks:
        yield "on_step of extensions: its time is not predicted"


def _update_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    if context.job.train.clip and updates_in_backward(context, chosen.strategy):
        yield "train.clip is not applied: updates inside the backward pass never have all gradients at once"


def _why_sharding(row: Strategy, num_ranks: int) -> str:
    if num_ranks == 1 and row.offload is not Offload.NONE:
        return f"one device: nothing to spread, but its engine does the offload ({row.offload})"
    return _WHY_SHARDING[row.sharding]


def _why_precision(context: PlanningContext, precision: Precision) -> str:
    if precision is Precision.FP8:
        return _why_fp8(context)
    if context.job.pin.precision is not None:
        return "the job file pins it"
    if context.is_cpu:
        return "the CPU has amx_bf16" if context.fast_bf16 else "this CPU has no fast 16-bit matrix products"
    if precision in (Precision.FP32, Precision.FP16_MIXED):
        return f"bf16 needs compute capability 8.0; {capability_words(context)}"
    return f"bf16 from compute capability 8.0; {capability_words(context)}"


def _why_fp8(context: PlanningContext) -> str:
    is_pinned, timed = context.job.pin.precision is not None, _fp8_words(context)
    if is_pinned:
        return f"the job file pins it; {timed}" if timed else "the job file pins it"
    return timed or f"its speed is assumed; {_TIMES_FP8_FIRST}"


def _fp8_words(context: PlanningContext) -> str | None:
    gain = context.fp8_gain
    if gain is None:
        return None
    return f"{gain.words} ({gain.library})" if gain.library else gain.words


def _fp8_notes(context: PlanningContext, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Of rows in FP8 that stand behind the chosen one."""
    chosen = candidates[0].strategy
    if chosen.precision is Precision.FP8 or all(row.strategy.precision is not Precision.FP8 for row in candidates):
        return
    timed = _fp8_words(context) or f"the speed of its rows is assumed; {_TIMES_FP8_FIRST}"
    yield f"fp8: {timed}" + ("; rows that are exact come first" if chosen.is_exact else "")


def _why_micro_batch(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.micro_batch is not None:
        return "the job file pins it"
    larger = next((size for size in micro_batches(context, candidate.strategy) if size > candidate.micro_batch), None)
    if larger is None:
        return "a rank's whole share of a step at once"
    other = candidate_of(context, with_micro_batch(context, setting_of(context, candidate), larger))
    if not other.memory.fits:
        return f"{larger} would need {format_bytes(other.memory.need_bytes)}"
    gain = candidate.speed.step_s / other.speed.step_s - 1
    return f"{larger} would be {gain:.1%} faster" if gain > 0 else f"{larger} would be no faster"


def _why_checkpointing(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.checkpointing is not None:
        return f"the job file pins it{_every_n_words(context, candidate)}"
    is_kept = candidate.checkpointing is Checkpointing.NONE
    setting = setting_of(context, candidate)
    other = candidate_of(context, replace(setting, checkpointing=Checkpointing.FULL if is_kept else Checkpointing.NONE))
    if is_kept:
        share = other.speed.step_s / candidate.speed.step_s - 1
        return f"activations fit; recomputing them would cost {share:.0%} of the speed"
    if other.memory.fits:
        gain = candidate.speed.step_s / other.speed.step_s - 1
        slower = "a larger micro batch gains more" if gain > SAME_SPEED else "recomputing them costs no time"
        return f"kept activations would fit at {format_bytes(other.memory.need_bytes)}, but {slower}"
    return f"kept activations would need {format_bytes(other.memory.need_bytes)}"


def _every_n_words(context: PlanningContext, candidate: Candidate) -> str:
    """Which blocks `every_n` recomputes; nothing for other kinds."""
    every, blocks = candidate.checkpoint_every_n, context.shape.num_layers
    if every is None:
        return ""
    words = f"; the first of every {every} blocks is recomputed, {blocks // every} of {blocks}"
    return words if context.job.pin.checkpointing_n is not None else f"{words} (pin.checkpointing_n)"


def _why_loss(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.loss is not None:
        return "the job file pins it"
    if candidate.loss is LossHead.CHUNKED:
        tokens = candidate.micro_batch * candidate.seq_len
        logits = format_bytes(4 * context.shape.vocab_size * tokens)
        if tokens <= (candidate.loss_chunk_tokens or 0):
            return f"one slice holds all {tokens} tokens of a micro batch; kept for no longer than it is used"
        return f"slices of {candidate.loss_chunk_tokens} tokens; all logits would be {logits} in fp32, and copies of it"
    return "whole logits fit and save a second product of the head"


def _batch_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    train, schedule = context.job.train, context.schedule
    if schedule.tokens_per_step != train.tokens_per_step:
        yield (
            f"train.tokens_per_step {train.tokens_per_step} is no multiple of seq_len {train.seq_len}: a step has "
            f"{schedule.sequences_per_step} sequences, {schedule.tokens_per_step} tokens"
        )
    num_rows = chosen.num_ranks * chosen.micro_batch * chosen.accumulation
    if schedule.sequences_per_step < chosen.num_ranks:
        yield (
            f"a step has {schedule.sequences_per_step} sequences for {chosen.num_ranks} ranks: some idle; "
            f"train.tokens_per_step: {chosen.num_ranks * train.seq_len} or more keeps all busy"
        )
    elif num_rows > schedule.sequences_per_step:
        empty = num_rows - schedule.sequences_per_step
        yield f"{empty} of {num_rows} rows of each step are padding: the global batch does not divide evenly"


def _data_notes(data: DataProfile, chosen: Candidate) -> Iterator[str]:
    yield from data.notes
    yield from data_words(data, chosen.micro_batch)
    if data.source == "estimated":
        yield "the data was not read yet: steps and hours follow from an estimate of its tokens by file size"


def _host_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    if not context.is_cpu and context.host_ram_bytes is None:
        need = format_bytes(chosen.memory.pinned_bytes + chosen.memory.host_bytes)
        yield f"host RAM of the nodes is unknown; the plan needs {need} a node"


def _engine_notes(candidates: Sequence[Candidate]) -> Iterator[str]:
    chosen = candidates[0]
    number, fastest = min(enumerate(candidates, start=1), key=lambda numbered: numbered[1].speed.step_s)
    ratio = chosen.speed.step_s / fastest.speed.step_s
    if fastest.strategy.sharding.shards_optimizer and ratio > 1 + SAME_SPEED:
        yield (
            f"{fastest.strategy.name} (--take {number}) is predicted {ratio:.2f}x as fast; an engine that shards is "
            "taken where it gains more than a prediction of it may err"
        )
