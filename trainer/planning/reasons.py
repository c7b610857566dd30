"""Reasons for the chosen settings, and the notes of a plan: sentences, each with its number.

Notes are about the cost of row lengths and the certainty of a plan's figures.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import asdict, replace

from shardwise.trainer.planning.candidates import (
    SMALL_CARD_BYTES,
    WISHED_HOURS,
    candidate_of,
    configuration_of,
    prediction_error,
    roomy_need,
    run_hours,
    wishes_adapters,
    with_micro_batch,
)
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import may_run, refuse
from shardwise.trainer.planning.rules.rule_input import capability_text
from shardwise.trainer.planning.schedule import idle_run_warnings, padding_share, usual_rate, widths_at
from shardwise.trainer.planning.search.certainty import certainty_text, trial_text
from shardwise.trainer.planning.search.choice import best_of, one_a_kind
from shardwise.trainer.planning.search.configurations import (
    SAME_SPEED,
    attention,
    least_need,
    micro_batches,
    shard_groups,
)
from shardwise.trainer.planning.search.packages import missing_packages
from shardwise.trainer.planning.search.traced_blocks import traced_notes
from shardwise.trainer.planning.speed.step import fp8_share, speed_notes
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import SHAPES, objective_of, packing_note
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.fp8 import FP8_RECIPES
from shardwise.trainer.spec.host_ram import NEARLY_FULL
from shardwise.trainer.spec.job.sections import Allowance, Objective
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Candidate, TrialResult
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, LossHead, Method, Precision
from shardwise.trainer.spec.units import format_bytes, format_seconds

WORTH_REPORTING = 0.005  # of the tokens
WORTH_A_LINE = 1.10  # times as fast


def data_text(data: DataProfile, micro_batch: int, *, can_pack: bool = True) -> tuple[str, ...]:
    """Lengths of documents, the cost of padding or the gain of packing at `micro_batch`, and the longest row.

    Empty if the lengths have not been counted.
    """
    if data.mean_document_tokens is None or data.mean_cut_tokens is None or not data.batch_widths:
        return ()
    return tuple(_length_text(data, data.mean_document_tokens, data.mean_cut_tokens, micro_batch, can_pack=can_pack))


def _length_text(
    data: DataProfile, mean_tokens: float, mean_cut: float, micro_batch: int, *, can_pack: bool
) -> Iterator[str]:
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
    has_remedy = can_pack and SHAPES[data.format].rows_per_example == 1
    packing = "; data.packing=true has none" if has_remedy else ""
    yield (
        f"{ordered:.0%} of the tokens of {batches} are padding, as rows of like length are learned together "
        f"({shuffled:.0%} in random order){packing}"
    )
    yield f"the longest row, {data.longest_row:,} tokens, sets the peak of memory"


_TIMES_FP8_FIRST = "`shardwise train` times it on this model's blocks first and uses it only if it pays"


def reasons(context: PlanningContext, candidate: Candidate) -> tuple[str, ...]:
    """The reason for each setting of `candidate`."""
    row = candidate.strategy
    return (
        f"{row.sharding}: {_why_sharding(context, candidate)}{_why_group(context, candidate)}"
        f"{_why_reduced(context, candidate)}{_why_on_host(context, candidate)}"
        f"{_why_prefetched(candidate)}{_why_fused(candidate)}",
        f"{row.precision}: {_why_precision(context, candidate)}",
        f"micro batch {candidate.micro_batch}: {_why_micro_batch(context, candidate)}",
        f"checkpointing {candidate.checkpointing}: {_why_checkpointing(context, candidate)}",
        f"attention {candidate.attention}: {attention(context, row.precision)[1]}",
        f"loss {candidate.loss}: {_why_loss(context, candidate)}{_why_compiled_head(candidate)}",
    )


def notes(
    context: PlanningContext, data: DataProfile, trials: Sequence[TrialResult], candidates: Sequence[Candidate]
) -> tuple[str, ...]:
    """Cautions about the plan that chooses `candidates[0]`."""
    chosen = candidates[0]
    return (
        *_method_notes(context),
        *_batch_notes(context, chosen),
        *_extension_notes(context),
        *_data_notes(data, chosen, can_pack=context.shape.packing_obstacle is None),
        *trial_text(trials),
        *certainty_text(context, chosen),
        *_error_notes(context, candidates),
        *_fp8_notes(context, candidates),
        *traced_notes(context, chosen),
        *_compilation_notes(context),
        *_wear_notes(context, chosen),
        *speed_notes(context.device),
        *context.hardware.notes,
    )


def _method_notes(context: PlanningContext) -> Iterator[str]:
    if wishes_adapters(context) and context.method.freezes_base:
        yield (
            f"train.method auto is {context.method} on a card of at most {format_bytes(SMALL_CARD_BYTES)}, unless the "
            "state of full training fits it; train.method=full trains every weight, where host RAM has room"
        )


def _compilation_notes(context: PlanningContext) -> Iterator[str]:
    problem = context.corrections.not_compiled
    if problem is not None and context.job.pin.compile is None:
        yield (
            f"torch.compile is off: blocks of this model failed to compile here ({problem}); plans stay eager until "
            "torch or transformers changes, or a run with pin.compile=true compiles"
        )


def _wear_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    """Bytes that a run writes to NVMe disks: every step writes the master weights and the optimizer state once."""
    if chosen.strategy.offload.uses_nvme:
        step = chosen.memory.checkpoint_bytes / context.hardware.num_nodes
        yield (
            f"each step writes {step / 1e9:,.0f} GB to the NVMe disk of a node, the run "
            f"{step * context.schedule.num_steps / 1e12:.3g} TB; a consumer disk of 1 TB is made for some 600 TB in all"
        )


def warnings(context: PlanningContext, chosen: Candidate) -> tuple[str, ...]:
    """Cautions that every form of the plan shows: each costs the run its purpose, its time or its memory."""
    return (
        *(() if context.data is None else idle_run_warnings(context.job, context.data, context.schedule)),
        *_unused_settings(context),
        *_rate_warnings(context, chosen),
        *_packing_warnings(context),
        *(each.text for each in missing_packages(context, chosen)),
        *_time_warnings(context, chosen),
        *_memory_warnings(context, chosen),
        *_idle_warnings(context, chosen),
        *_update_warnings(context, chosen),
    )


def _unused_settings(context: PlanningContext) -> Iterator[str]:
    """Settings of sections that the method or the objective does not read."""
    train, method = context.job.train, context.method
    objective = None if context.data is None else objective_of(train.objective, context.data.format)
    is_dpo = objective is None or OBJECTIVES[objective].section == "dpo"
    for name, section, is_read, remedy in (
        ("lora", train.lora, method.freezes_base, "train.method: lora uses it"),
        ("galore", train.galore, method is Method.GALORE, "train.method: galore uses it"),
        ("dpo", train.dpo, is_dpo, "preferences use it"),
    ):
        given = (
            []
            if is_read
            else [each for each, value in asdict(section).items() if value != getattr(type(section)(), each)]
        )
        if given:
            names = " and ".join(f"train.{name}.{each}" for each in given)
            what = f"the method is {method}" if name != "dpo" else "these rows are no preferences"
            yield f"{names} has no effect: {what}; {remedy}"


FAR_RATE = 100  # times the usual rate, and more


def _rate_warnings(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    job, data = context.job, context.data
    objective = Objective.PRETRAIN if data is None else objective_of(job.train.objective, data.format)
    usual = usual_rate(job, context.shape, context.method, chosen.strategy.optimizer, objective)
    if job.train.lr is not None and job.train.lr >= FAR_RATE * usual.lr:
        yield (
            f"train.lr is {job.train.lr:g}, {job.train.lr / usual.lr:,.0f} times the usual {usual.lr:g}: the loss will "
            "probably diverge; train.lr: auto is the usual rate"
        )


def _packing_warnings(context: PlanningContext) -> Iterator[str]:
    if context.data is not None and not context.data.is_packed:
        obstacle = context.shape.packing_obstacle
        note = packing_note(context.data.format, packing=context.job.data.packing, obstacle=obstacle)
        yield from [] if note is None else [note]


def _time_warnings(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    hours, limit = run_hours(context, chosen), context.job.limits.hours
    if limit is not None and hours > limit:
        yield f"the run needs {format_seconds(hours * 3600)}, more than limits.hours: {limit:g}"
    if limit is None and hours > WISHED_HOURS:
        yield f"the run needs {format_seconds(hours * 3600)}; limits.hours: {WISHED_HOURS:g} would refuse it"


def _memory_warnings(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    memory = chosen.memory
    most = memory.high_bytes + memory.outside_bytes
    if most > memory.usable_bytes:
        yield (
            f"at the upper end of its prediction a step needs {format_bytes(most)} of the "
            f"{format_bytes(memory.usable_bytes)} usable; the first fallback then continues the run"
        )
    if context.is_cpu or context.device.shares_host_memory:
        return
    need, usable = memory.pinned_bytes + memory.host_bytes, context.host_ram_bytes
    if usable is None:
        yield f"host RAM of the nodes is unknown; the plan needs {format_bytes(need)} a node"
    elif need > NEARLY_FULL * usable:
        yield (
            f"the plan needs {format_bytes(need)} of the {format_bytes(usable)} of host RAM that a run may use here, "
            f"{format_bytes(memory.pinned_bytes)} of it pinned: end other programs first"
        )


def _idle_warnings(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    schedule, seq_len = context.schedule, context.job.train.seq_len
    if schedule.sequences_per_step < chosen.num_ranks:
        s = "s" if schedule.sequences_per_step > 1 else ""
        yield (
            f"a step has {schedule.sequences_per_step} sequence{s} for {chosen.num_ranks} ranks: some idle; "
            f"train.tokens_per_step: {chosen.num_ranks * seq_len} or more keeps all busy"
        )


def _extension_notes(context: PlanningContext) -> Iterator[str]:
    """Cautions about a user's own functions, which no closed form covers."""
    if Hook.BUILD_MODEL in context.hooks:
        yield "build_model of extensions: memory and time are predicted for the config's model"
    if Hook.LOSS in context.hooks:
        yield "loss of extensions: counted as a cross entropy of whole logits; its other memory and time are unknown"
    if Hook.ON_STEP in context.hooks:
        yield "on_step of extensions: its time is not predicted"


def _update_warnings(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    if context.job.train.clip and configuration_of(context, chosen).updates_in_backward:
        yield "train.clip is not applied: updates inside the backward pass never have all gradients at once"


def _why_sharding(context: PlanningContext, candidate: Candidate) -> str:
    """The use of a sharding; of one on a single device, which is there for its offload, what a step needs without."""
    row = candidate.strategy
    if candidate.num_ranks > 1 or row.offload is Offload.NONE:
        return row.sharding.facts.reason
    text = f"one device: nothing to spread, but its engine does the offload ({row.offload})"
    plain = one_a_kind(CATALOGUE, lambda row: row.sharding.facts.is_one_rank and may_run(context, row))
    resident = [row for row in plain if candidate.method.freezes_base or not row.optimizer.facts.is_paged]
    if not resident:
        return text
    if (best := best_of(context, resident)[0]) is not None:
        filled = f" and fills {_share_filled(best):.0%} of the card" if _fills(context, best) else ""
        longer = best.speed.step_s / candidate.speed.step_s
        return f"{text}; a step without it is predicted {longer:.2f} times as long{filled}"
    least = min((least_need(context, row) for row in resident), key=lambda each: each.memory.need_bytes)
    need, usable = format_bytes(least.memory.need_bytes), format_bytes(context.device.usable_bytes)
    also = ", even with the embedding table in host RAM" if least.embedding_on_host else ""
    return f"{text}; without it a step needs at least {need}, {usable} are usable{also}"


def _why_group(context: PlanningContext, candidate: Candidate) -> str:
    """The group of hybrid sharding and the reason against the next smaller one; empty for other shardings."""
    group = candidate.shard_group
    if group is None:
        return ""
    text = f"; {candidate.num_ranks // group} copies, each over {group} ranks"
    if context.job.pin.shard_group is not None:
        return f"{text}: the job file pins it"
    sizes = (size for size in shard_groups(context, candidate.strategy) if size is not None and size < group)
    smaller = next(sizes, None)
    if smaller is None:
        return text
    other = candidate_of(context, replace(configuration_of(context, candidate), shard_group=smaller))
    need = "are no faster" if other.memory.fits else f"would need {format_bytes(other.memory.need_bytes)}"
    return f"{text}: groups of {smaller} {need}"


def _why_reduced(context: PlanningContext, candidate: Candidate) -> str:
    """Why gradients are reduced with every micro batch; empty where they are not."""
    if not candidate.reduce_every_micro_batch or candidate.accumulation == 1:
        return ""
    text = "; gradients are reduced with every micro batch"
    if context.job.pin.reduce_every_micro_batch is not None:
        return f"{text}: the job file pins it"
    if candidate.bf16_reduction:
        return f"{text}: their sum over the ranks is bf16, that over micro batches fp32"
    waiting = candidate_of(context, replace(configuration_of(context, candidate), reduce_every_micro_batch=False))
    return f"{text}: whole ones until the last would need {format_bytes(waiting.memory.need_bytes)}"


def _why_on_host(context: PlanningContext, candidate: Candidate) -> str:
    """What the table of input embeddings in host RAM saves, and why it is there; empty where it is on the device."""
    if not candidate.embedding_on_host:
        return ""
    other = candidate_of(context, replace(configuration_of(context, candidate), embedding_on_host=False))
    saved = other.memory.need_bytes - candidate.memory.need_bytes
    text = f"; the embedding table stays in host RAM: {format_bytes(saved)} less on the card"
    if context.job.pin.embedding_on_host is not None:
        return f"{text}, as the job file pins it"
    if other.memory.fits:
        return f"{text}, which would be {_share_filled(other):.0%} full"
    return f"{text}, where a step would need {format_bytes(other.memory.need_bytes)}"


def _why_prefetched(candidate: Candidate) -> str:
    """That two blocks are gathered ahead, which nothing but the job file decides; empty where one is."""
    return "; two blocks are gathered ahead: the job file pins it" if candidate.prefetch_two_blocks else ""


def _why_fused(candidate: Candidate) -> str:
    """That adapters are fused with their layers, which nothing but the job file decides; empty if they are PEFT's."""
    return "; adapters are fused with their layers: the job file pins it" if candidate.fused_adapters else ""


def _why_compiled_head(candidate: Candidate) -> str:
    """That the slices of the head are compiled, which nothing but the job file decides; empty if they are not."""
    return "; its slices are compiled: the job file pins it" if candidate.compiled_head else ""


def _why_precision(context: PlanningContext, candidate: Candidate) -> str:
    precision = candidate.strategy.precision
    if candidate.fp8_recipe is not None:
        return _why_fp8(context, candidate.fp8_recipe, is_compiled=candidate.compile)
    if context.job.pin.precision is not None:
        return "the job file pins it"
    if context.is_cpu:
        return "the CPU has amx_bf16" if context.fast_bf16 else "this CPU has no fast 16-bit matrix products"
    if precision in (Precision.FP32, Precision.FP16_MIXED):
        return f"bf16 needs compute capability 8.0; {capability_text(context.device)}"
    return f"bf16 from compute capability 8.0; {capability_text(context.device)}"


def _why_fp8(context: PlanningContext, recipe: Fp8Recipe, *, is_compiled: bool) -> str:
    gain, is_pinned = context.fp8_gain, context.job.pin.precision is not None
    runs = f"{fp8_share(context.shape, recipe):.0%} of the blocks' products by {recipe}"
    if not is_compiled:
        runs += ", eager" if FP8_RECIPES[recipe].is_compiled else ", eager: the time of its Python is counted"
    timed = gain.text if gain is not None else None
    if is_pinned:
        return "; ".join(filter(None, ("the job file pins it", timed, runs)))
    return f"{timed or f'its speed is assumed; {_TIMES_FP8_FIRST}'}; {runs}"


def fp8_obstacle(context: PlanningContext, candidates: Sequence[Candidate]) -> tuple[str, str | None] | None:
    """Why FP8, though allowed, is not used, and what to do; None if it is used or not allowed."""
    job, chosen = context.job, candidates[0]
    if Allowance.FP8 not in job.allow or job.pin.precision is not None or chosen.strategy.precision is Precision.FP8:
        return None
    refusal = refuse(context, replace(chosen.strategy, precision=Precision.FP8))
    if refusal is not None:
        return refusal.reason, refusal.instead
    fastest = min((row.speed.step_s for row in candidates if row.strategy.precision is Precision.FP8), default=None)
    if fastest is None:
        return "no configuration in fp8 is as fast and fits", None
    ratio = chosen.speed.step_s / fastest
    return f"predicted {ratio:.2f}x of what is exact, which is taken up to {WORTH_A_LINE:.2f}x", None


def _fp8_notes(context: PlanningContext, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Notes on FP8 candidates that are not chosen."""
    chosen = candidates[0].strategy
    if chosen.precision is Precision.FP8 or all(row.strategy.precision is not Precision.FP8 for row in candidates):
        return
    gain = context.fp8_gain
    yield f"fp8: {gain.text if gain is not None else f'the speed of its rows is assumed; {_TIMES_FP8_FIRST}'}"


def _why_micro_batch(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.micro_batch is not None:
        return "the job file pins it"
    sizes = micro_batches(context, at_once=configuration_of(context, candidate).updates_in_backward)
    larger = next((size for size in sizes if size > candidate.micro_batch), None)
    if larger is None:
        return "a rank's whole share of a step at once"
    other = candidate_of(context, with_micro_batch(context, configuration_of(context, candidate), larger))
    if not other.memory.fits:
        return f"{larger} would need {format_bytes(other.memory.need_bytes)}"
    gain = candidate.speed.step_s / other.speed.step_s - 1
    faster = f"{larger} would be {gain:.1%} faster" if gain > 0 else f"{larger} would be no faster"
    return f"{faster} but fill {_share_filled(other):.0%} of the card" if _fills(context, other) else faster


def _fills(context: PlanningContext, candidate: Candidate) -> bool:
    return candidate.memory.need_bytes > roomy_need(context, configuration_of(context, candidate))


def _share_filled(candidate: Candidate) -> float:
    return candidate.memory.need_bytes / candidate.memory.usable_bytes


def _why_checkpointing(context: PlanningContext, candidate: Candidate) -> str:
    if context.job.pin.checkpointing is not None:
        return f"the job file pins it{_every_n_text(context, candidate)}"
    is_retained = candidate.checkpointing is Checkpointing.NONE
    configuration = configuration_of(context, candidate)
    other = candidate_of(
        context, replace(configuration, checkpointing=Checkpointing.FULL if is_retained else Checkpointing.NONE)
    )
    if is_retained and candidate.activation_offload:
        return "what blocks save waits in host RAM"
    if is_retained:
        share = other.speed.step_s / candidate.speed.step_s - 1
        return f"activations fit; recomputing them would cost {share:.0%} of the speed"
    if other.memory.fits and _fills(context, other):
        return f"without it a step would fill {_share_filled(other):.0%} of the card"
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
    if LossHead.CHUNKED not in context.shape.loss_heads:
        return f"{context.shape.model_type} computes its own logits, more than a product of its head, and all at once"
    return "whole logits fit and save a second product of the head"


def _batch_notes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    train, schedule = context.job.train, context.schedule
    if train.tokens_per_step not in (None, schedule.tokens_per_step):
        yield (
            f"train.tokens_per_step {train.tokens_per_step} is no multiple of seq_len {train.seq_len}: a step has "
            f"{schedule.sequences_per_step} sequences, {schedule.tokens_per_step} tokens"
        )
    num_rows = chosen.num_ranks * chosen.micro_batch * chosen.accumulation
    if chosen.num_ranks <= schedule.sequences_per_step < num_rows:
        empty = num_rows - schedule.sequences_per_step
        yield f"{empty} of {num_rows} rows of each step are padding: the global batch does not divide evenly"


def _data_notes(data: DataProfile, chosen: Candidate, *, can_pack: bool) -> Iterator[str]:
    yield from data.notes
    yield from data_text(data, chosen.micro_batch, can_pack=can_pack)
    if data.source == "estimated":
        yield "the data was not read yet: steps and hours follow from an estimate of its tokens by file size"


def _error_notes(context: PlanningContext, candidates: Sequence[Candidate]) -> Iterator[str]:
    """The candidate that is predicted faster than the chosen one, but with a larger error."""
    chosen = candidates[0]
    number, fastest = min(enumerate(candidates, start=1), key=lambda numbered: numbered[1].speed.step_s)
    ratio = chosen.speed.step_s / fastest.speed.step_s
    its, ours = (prediction_error(configuration_of(context, each)) for each in (fastest, chosen))
    if ratio > 1 + SAME_SPEED and its > ours:
        yield (
            f"{fastest.strategy.name} (--take {number}) is predicted {ratio:.2f}x as fast, but within {its:.0%} where "
            f"{chosen.strategy.name} is within {ours:.0%}: the gain is less than the difference"
        )
