"""Reasons for the chosen settings, the notes of a plan, and the gains of opting in: sentences, each with its number.

Notes are about the cost of row lengths and the certainty of a plan's figures.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import Correction, Corrections, Factor
from shardwise.trainer.planning.candidates import candidate_of, configuration_of, with_micro_batch
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.rules.rule import Rule, may_run, rule_named
from shardwise.trainer.planning.rules.rule_input import capability_text
from shardwise.trainer.planning.schedule import padding_share, widths_at
from shardwise.trainer.planning.search.choice import best_of, one_a_layout
from shardwise.trainer.planning.search.configurations import (
    SAME_SPEED,
    attention,
    micro_batches,
    supports_tf32,
    updates_in_backward,
)
from shardwise.trainer.planning.speed.step import speed_notes
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.planning.tables.gpu_specs import MIG_MARK
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Candidate, Plan, Rejection, TrialResult
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Precision, Strategy
from shardwise.trainer.spec.units import format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

WORTH_REPORTING = 0.005  # of the tokens


def data_text(data: DataProfile, micro_batch: int) -> tuple[str, ...]:
    """Lengths of documents, the cost of padding or the gain of packing at `micro_batch`, and the longest row.

    Empty if the lengths have not been counted.
    """
    if data.mean_document_tokens is None or data.mean_cut_tokens is None or not data.batch_widths:
        return ()
    return tuple(_length_text(data, data.mean_document_tokens, data.mean_cut_tokens, micro_batch))


def _length_text(data: DataProfile, mean_tokens: float, mean_cut: float, micro_batch: int) -> Iterator[str]:
    widths = widths_at(data, micro_batch)
    shuffled = padding_share(widths.mean_width, mean_cut)
    ordered = padding_share(widths.mean_width_sorted, mean_cut)
    lost = 1 - mean_cut / mean_tokens
    longest = data.documents.edges[-1] if data.documents is not None else data.longest_row
    yield f"{data.num_documents:,} documents of {mean_tokens:,.0f} tokens on average, the longest {longest:,}"
    batches = f"batches of {micro_batch}" if micro_batch > 1 else "single rows"
    if data.is_packed:
        saved = (
            f"packing saves {shuffled:.0%} of what padded {batches} would compute ({ordered:.0%} if sorted by length)"
        )
        retained = f", and keeps {lost:.0%} of the tokens, which would be cut off at the end of a row"
        yield saved + (retained if lost > WORTH_REPORTING else "")
        return
    packing = "" if SHAPES[data.format].rows_per_example == 2 else "; data.packing=true has none"
    yield (
        f"{ordered:.0%} of the tokens of {batches} are padding, as rows of like length are learned together "
        f"({shuffled:.0%} in random order){packing}"
    )
    yield f"the longest row, {data.longest_row:,} tokens, sets the peak of memory"


# Errors of nine in ten predictions of published runs (`python benchmarks/accuracy.py`). Cards without NVLink, cards
# rated by their driver's report, and CPUs depend on facts that no datasheet has.
WELL_KNOWN_CARDS = ("A100", "H100", "H200")
WELL_KNOWN_SPEED, OTHER_SPEED, ASSUMED_SPEED = 0.15, 0.5, 1.0
MEMORY = "2 %"


def certainty_text(corrections: Corrections, chosen: Candidate, device: Device) -> tuple[str, ...]:
    """Certainty of the predictions for `chosen`, from earlier runs or, without any, from published accuracy."""
    return tuple(_run_text(corrections, chosen, device))


def trial_text(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """Measurements of trials and their predictions, in the order they ran; empty without trials."""
    timed = [
        (trial.strategy, trial.step_s, trial.predicted_step_s)
        for trial in trials
        if trial.step_s is not None and trial.predicted_step_s is not None
    ]
    if not timed:
        return ()
    measured = ", ".join(f"{name} {format_seconds(step_s)}" for name, step_s, _ in timed)
    expected = ", ".join(format_seconds(step_s) for _, _, step_s in timed)
    return (f"trial: {measured} a step; predicted {expected}",)


def usual_error(device: Device) -> float | None:
    """Expected error of a predicted step time, as a share, before any run on this device.

    None if the speed of the device is not known, so that nothing was predicted.
    """
    if not device.has_known_speed:
        return None
    if device.kind is DeviceKind.CPU or device.is_rated_by_driver:
        return ASSUMED_SPEED
    return WELL_KNOWN_SPEED if _is_well_known(device) else OTHER_SPEED


def _run_text(corrections: Corrections, chosen: Candidate, device: Device) -> Iterator[str]:
    correction = corrections.of(chosen.strategy, chosen.method)
    is_tried = chosen.strategy.name in corrections.tried  # `trial_text` has the measurement
    if correction.step.num_runs and not is_tried:
        like = "like this one" if correction.is_of_class else "in this precision"
        yield f"step time {_applied(correction.step, like)}"
    if correction.peak.num_runs:
        yield f"peak memory {_applied(correction.peak, 'like this one')}"
    if not correction.step.num_runs and not is_tried:
        unknown = "no run like this one" if corrections.num_unused or correction.peak.num_runs else "no run"
        expected = [text for text in (_speed_text(device), _memory_text(correction)) if text]
        if expected:
            yield f"{unknown} on this device yet: expect {', '.join(expected)}"
    if corrections.num_unused:
        runs = _runs(corrections.num_unused)
        yield f"{runs} on this device not used: another version, or a model of another size"


def _applied(factor: Factor, like: str) -> str:
    spread = "" if factor.spread is None else f" (spread {factor.spread:.1%})"
    runs = f"{_runs(factor.num_runs)} {like} on this device{spread}"
    if abs(factor.value - 1) < 0.0005:
        return f"not corrected: {runs} measured {factor.measured:.3f} of it"
    return f"corrected by {factor.value:.3g} from {runs}, which measured {factor.measured:.3g} of what was predicted"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _speed_text(device: Device) -> str | None:
    error = usual_error(device)
    if error is None:
        return None
    return "tokens/s within " + ("a factor of 2" if error == ASSUMED_SPEED else f"+-{error:.0%}".replace("%", " %"))


def _memory_text(correction: Correction) -> str | None:
    return None if correction.peak.num_runs else f"peak memory within {MEMORY}"


def _is_well_known(device: Device) -> bool:
    """No published run was made on a MIG slice of one of these cards."""
    return device.name.startswith(WELL_KNOWN_CARDS) and MIG_MARK not in device.name


_TIMES_FP8_FIRST = "`shardwise train` times it on this model's matrix shapes first and uses it only if it pays"


def reasons(context: PlanningContext, candidate: Candidate) -> tuple[str, ...]:
    """The reason for each setting of `candidate`."""
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
        *trial_text(trials),
        *certainty_text(context.corrections, chosen, context.device),
        *_engine_notes(candidates),
        *_fp8_notes(context, candidates),
        *_host_notes(context, chosen),
        *speed_notes(context.device),
        *context.hardware.notes,
    )


def _extension_notes(context: PlanningContext) -> Iterator[str]:
    """Cautions about a user's own functions, which no closed form covers."""
    if Hook.BUILD_MODEL in context.hooks:
        yield "build_model of extensions: memory and time are predicted for the config's model"
    if Hook.LOSS in context.hooks:
        yield "loss of extensions: counted as a cross entropy of whole logits; its other memory and time are unknown"
    if Hook.ON_STEP in context.hooks:
        yield "on_step of extensions: its time is not predicted"


def _update_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    if context.job.train.clip and updates_in_backward(context, chosen.strategy):
        yield "train.clip is not applied: updates inside the backward pass never have all gradients at once"


def _why_sharding(row: Strategy, num_ranks: int) -> str:
    if num_ranks == 1 and row.offload is not Offload.NONE:
        return f"one device: nothing to spread, but its engine does the offload ({row.offload})"
    return row.sharding.facts.reason


def _why_precision(context: PlanningContext, precision: Precision) -> str:
    if precision is Precision.FP8:
        return _why_fp8(context)
    if context.job.pin.precision is not None:
        return "the job file pins it"
    if context.is_cpu:
        return "the CPU has amx_bf16" if context.fast_bf16 else "this CPU has no fast 16-bit matrix products"
    if precision in (Precision.FP32, Precision.FP16_MIXED):
        return f"bf16 needs compute capability 8.0; {capability_text(context.device)}"
    return f"bf16 from compute capability 8.0; {capability_text(context.device)}"


def _why_fp8(context: PlanningContext) -> str:
    is_pinned, timed = context.job.pin.precision is not None, _fp8_text(context)
    if is_pinned:
        return f"the job file pins it; {timed}" if timed else "the job file pins it"
    return timed or f"its speed is assumed; {_TIMES_FP8_FIRST}"


def _fp8_text(context: PlanningContext) -> str | None:
    gain = context.fp8_gain
    if gain is None:
        return None
    return f"{gain.text} ({gain.library})" if gain.library else gain.text


def _fp8_notes(context: PlanningContext, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Notes on FP8 candidates that are not chosen."""
    chosen = candidates[0].strategy
    if chosen.precision is Precision.FP8 or all(row.strategy.precision is not Precision.FP8 for row in candidates):
        return
    timed = _fp8_text(context) or f"the speed of its rows is assumed; {_TIMES_FP8_FIRST}"
    yield f"fp8: {timed}" + ("; rows that are exact come first" if chosen.is_exact else "")


def _why_micro_batch(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.micro_batch is not None:
        return "the job file pins it"
    larger = next((size for size in micro_batches(context, candidate.strategy) if size > candidate.micro_batch), None)
    if larger is None:
        return "a rank's whole share of a step at once"
    other = candidate_of(context, with_micro_batch(context, configuration_of(context, candidate), larger))
    if not other.memory.fits:
        return f"{larger} would need {format_bytes(other.memory.need_bytes)}"
    gain = candidate.speed.step_s / other.speed.step_s - 1
    return f"{larger} would be {gain:.1%} faster" if gain > 0 else f"{larger} would be no faster"


def _why_checkpointing(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.checkpointing is not None:
        return f"the job file pins it{_every_n_text(context, candidate)}"
    is_retained = candidate.checkpointing is Checkpointing.NONE
    configuration = configuration_of(context, candidate)
    other = candidate_of(
        context, replace(configuration, checkpointing=Checkpointing.FULL if is_retained else Checkpointing.NONE)
    )
    if is_retained:
        share = other.speed.step_s / candidate.speed.step_s - 1
        return f"activations fit; recomputing them would cost {share:.0%} of the speed"
    if other.memory.fits:
        gain = candidate.speed.step_s / other.speed.step_s - 1
        slower = "a larger micro batch gains more" if gain > SAME_SPEED else "recomputing them costs no time"
        return f"without it a step would fit at {format_bytes(other.memory.need_bytes)}, but {slower}"
    return f"without it a step would need {format_bytes(other.memory.need_bytes)}"


def _every_n_text(context: PlanningContext, candidate: Candidate) -> str:
    """The blocks that `every_n` recomputes; empty for other kinds."""
    every, blocks = candidate.checkpoint_every_n, context.shape.num_layers
    if every is None:
        return ""
    text = f"; the first of every {every} blocks is recomputed, {blocks // every} of {blocks}"
    return text if context.job.pin.checkpointing_n is not None else f"{text} (pin.checkpointing_n)"


def _why_loss(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.loss is not None:
        return "the job file pins it"
    if candidate.loss is LossHead.CHUNKED:
        tokens = candidate.micro_batch * candidate.seq_len
        logits = format_bytes(4 * context.shape.vocab_size * tokens)
        if tokens <= (candidate.loss_chunk_tokens or 0):
            return f"one slice holds all {tokens} tokens of a micro batch and is freed after use"
        return f"slices of {candidate.loss_chunk_tokens} tokens; all logits would be {logits} in fp32, and copies of it"
    if candidate.loss is LossHead.FUSED_LINEAR:
        return "Liger's kernels compute each product of the head once and hold a slice of the logits"
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
    yield from data_text(data, chosen.micro_batch)
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
            "chosen only if its gain exceeds the error of such predictions"
        )


WORTH_A_LINE = 1.10  # times as fast
WORTH_OPTING_IN = 1.25  # times the memory


class OptIn(Value, frozen=True, kw_only=True):
    """The best candidate that an entry of `allow` would add."""

    allowance: Allowance
    candidate: Candidate


def opt_ins(context: PlanningContext, plan: Plan) -> tuple[OptIn, ...]:
    """Opt-ins that are missing from `allow` and would be faster or need less memory than the chosen candidate."""
    waiting = list(_waiting(plan.rejections))
    found = (
        (allowance, _opened_by(context, allowance, waiting, plan.chosen.strategy))
        for allowance in Allowance
        if allowance not in context.job.allow
    )
    return tuple(
        OptIn(allowance=allowance, candidate=candidate)
        for allowance, candidate in found
        if candidate is not None and _is_worth_opting_in(candidate, plan.chosen)
    )


def _waiting(rejections: Sequence[Rejection]) -> Iterator[tuple[Strategy, Rule]]:
    """Strategies that a missing opt-in refuses, each with its rule."""
    rows = {row.name: row for row in CATALOGUE}
    for rejection in rejections:
        rule = None if rejection.rule is None else rule_named(rejection.rule)
        if rule is not None and rule.needs_opt_in:
            yield rows[rejection.strategy], rule


def _opened_by(
    context: PlanningContext, allowance: Allowance, waiting: Sequence[tuple[Strategy, Rule]], chosen: Strategy
) -> Candidate | None:
    """The best of the `waiting` strategies that this opt-in would allow; TF32 speeds up the chosen one."""
    allowed = replace(context, job=replace(context.job, allow=(*context.job.allow, allowance)))
    opened = [row for row, rule in waiting if not rule.is_broken(allowed, row) and may_run(allowed, row)]
    if allowance is Allowance.TF32 and supports_tf32(allowed, chosen.precision):
        opened = [chosen]
    best, _ = best_of(allowed, one_a_layout(opened))
    return best


def _is_worth_opting_in(candidate: Candidate, chosen: Candidate) -> bool:
    gains_time = chosen.speed.step_s > WORTH_A_LINE * candidate.speed.step_s
    return gains_time or candidate.memory.need_bytes < chosen.memory.need_bytes / WORTH_OPTING_IN
