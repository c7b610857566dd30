"""The decision: from job, machine, model and data to a plan. Pure: the same values give the same plan.

1. Jobs that no machine could train are refused with both numbers. The job file checks the values of single settings;
   the checks here are about conflicts between job, model and data, and pins that this machine does not support.
2. Every strategy of the catalogue is refused by a rule or searched for its best configuration. Those within every
   budget are ranked (`choice`); the others are rejected with the number or the rule.
3. The method is the job's, or under `auto` the first of full, galore, lora, qlora that runs within the limits, and
   within a day if there is no limit of hours; if none does, the fastest. On cards of at most 16 GiB lora comes before
   full training that has its state in host RAM. Where lora would stream its base from host RAM it is qlora unless lora
   is faster; where cards would gather it over PCIe, if qlora gains more than the errors of both predictions.
4. The first candidate is chosen; fallbacks and the table of methods are added.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Protocol

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import Corrections, after_trials, corrections_of
from shardwise.trainer.planning.candidates import (
    BOTH_ERRORS,
    WISHED_HOURS,
    compared_seconds,
    configuration_of,
    run_hours,
    upper_seconds,
    wishes_adapters,
)
from shardwise.trainer.planning.configuration import group_sizes
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.policy.precision_policy import coverage_of, dims_for
from shardwise.trainer.planning.reasons import notes, reasons, warnings
from shardwise.trainer.planning.rules.incompatible import LAYOUTS, SETTINGS
from shardwise.trainer.planning.rules.rule import Refusal, pinned_rule_input, refuse
from shardwise.trainer.planning.rules.rule_input import first_broken
from shardwise.trainer.planning.schedule import make_schedule
from shardwise.trainer.planning.search.choice import Ranking, method_rows, rank, survey, with_remedies
from shardwise.trainer.planning.search.configurations import attention_text, every_n, missing_flash, obstacle_to_flash
from shardwise.trainer.planning.search.fallbacks import fallbacks, least_short, nothing_fits
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import objective_of, shapes_for
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.errors import InputError, InputProblemsError, NothingFitsError
from shardwise.trainer.spec.hardware import Hardware, LinkKind
from shardwise.trainer.spec.job.kinds import one_of
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.extension import Extension, Hook
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import (
    Calibration,
    Candidate,
    Coverage,
    Fp8Gain,
    Plan,
    Rejection,
    Schedule,
    TrialResult,
)
from shardwise.trainer.spec.strategy import Attention, LossHead, Method, Precision, Strategy

PlanOrder = tuple[int, float]  # the method, the most faithful first, and seconds of a sequence


class Extent(StrEnum):
    """How much of a plan is made."""

    CHOICE = "choice"  # the best candidate of the method that is taken, and nothing about it
    SCREEN = "screen"  # all that a first screen shows: of the rejections those of rules alone
    WHOLE = "whole"


def make_plan(
    job: Job,
    *,
    name: str,
    hardware: Hardware,
    shape: ModelShape,
    model_config: dict[str, Any],
    model_path: str | None,
    tokenizer_path: str | None,
    data: DataProfile,
    calibration: Calibration,
    versions: dict[str, str],
    trials: tuple[TrialResult, ...] = (),
    fp8_gain: Fp8Gain | None = None,
    extension: Extension | None = None,
    extent: Extent = Extent.WHOLE,
    beats: PlanOrder | None = None,
) -> Plan:
    """The plan of `job` on `hardware`, or the part of it that `extent` names.

    A choice that would not come before a plan of the order `beats` may be missing: NothingFitsError.

    InputError if job, model, data and pins are incompatible; NothingFitsError if no strategy fits the machine and the
    limits.
    """
    hooks = () if extension is None else extension.hooks
    check_job(job, shape, data, hooks)
    wanted = _methods(job, data)
    learned = corrections_of(calibration, shape=shape, hardware=hardware, versions=versions)
    corrections = after_trials(learned, trials)
    contexts = {
        method: with_fp8_gain(_context(job, hardware, shape, data, method, corrections, hooks), fp8_gain)
        for method in Method
    }
    check_pins(contexts[wanted[0]])
    taken, rankings = _rank_methods(contexts, wanted, trials, extent, beats)
    is_choice = extent is Extent.CHOICE
    if taken is None and is_choice:
        raise NothingFitsError("nothing fits")
    methods = () if is_choice else method_rows(contexts, rankings, taken)
    if taken is None:
        rankings |= {method: rank(contexts[method], trials) for method in wanted if extent is not Extent.WHOLE}
        method = least_short({method: (contexts[method], rankings[method].smallest.values()) for method in wanted})
        raise nothing_fits(contexts[method], tuple(rankings[method].smallest.values()), methods)
    context, ranking = contexts[taken], rankings[taken]
    return Plan(
        name=name,
        job=job,
        hardware=hardware,
        model_shape=shape,
        model_config=model_config,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        data=data,
        device_kind=hardware.device_kind,
        schedule=schedule_with(ranking.candidates[0], context, data),
        candidates=_explained(context, ranking.candidates),
        rejections=with_remedies(context, ranking) if extent is Extent.WHOLE else _by_rule(ranking),
        methods=methods,
        coverage=() if is_choice else _coverage(context, ranking.candidates[0]),
        fallbacks=() if is_choice else fallbacks(context, ranking.candidates),
        calibration=calibration,
        versions=versions,
        trials=trials,
        fp8_gain=fp8_gain,
        extension=extension,
        warnings=() if is_choice else warnings(context, ranking.candidates[0]),
        notes=() if is_choice else notes(context, data, trials, ranking.candidates),
    )


def _coverage(context: PlanningContext, chosen: Candidate) -> tuple[Coverage, ...]:
    configuration = configuration_of(context, chosen)
    return coverage_of(configuration, dims_for(context.shape, configuration))


def _by_rule(ranking: Ranking) -> tuple[Rejection, ...]:
    return tuple(rejection for rejection in ranking.rejections if rejection.rule is not None)


class PlanOn(Protocol):
    """Makes the plan for a machine."""

    def __call__(self, hardware: Hardware, *, extent: Extent, beats: PlanOrder | None = None) -> Plan: ...


def plan_on_enough_gpus(plan_on: PlanOn, hardware: Hardware, *, extent: Extent = Extent.WHOLE) -> Plan:
    """The plan for all GPUs of a machine, or for fewer of one node: where nothing fits all, or fewer are faster.

    NothingFitsError, that of all GPUs, if no number of them suffices.
    """
    try:
        plan = plan_on(hardware, extent=extent)
    except NothingFitsError:
        fitting = next(_plans_on_fewer(plan_on, hardware, "nothing fits"), None)
        if fitting is None:
            raise
        plan = fitting
    fewer = _plans_on_fewer(
        plan_on, plan.hardware, "a step takes longer", most=_most_halvings(plan), beats=_order_of(plan)
    )
    best = min((plan, *fewer), key=_order_of)
    return best if best.hardware == hardware else plan_on(best.hardware, extent=extent)


def _most_halvings(plan: Plan) -> int:
    """How often half of the ranks could save more transfers than they compute in addition; all where some idle.

    They save at most all transfers, and compute twice the tokens in at least 1.5 times the seconds: weights are read
    once for however many tokens. A sharding that the job pins is used on all.
    """
    parts = plan.chosen.speed.parts
    transfers = parts["communication_s"] + parts["offload_s"]
    if plan.schedule.sequences_per_step < plan.hardware.num_devices:
        return plan.hardware.num_devices
    if plan.job.pin.sharding is not None or not parts["compute_s"]:
        return 0
    return int(math.log(1 + transfers / parts["compute_s"], 1.5))


def _order_of(plan: Plan) -> PlanOrder:
    """Seconds of a sequence, not of a step: a default batch follows the ranks."""
    context, chosen = context_of(plan), plan.chosen
    seconds = upper_seconds(context, configuration_of(context, chosen), chosen.speed.step_s)
    return list(Method).index(chosen.method), seconds / plan.schedule.sequences_per_step


def _plans_on_fewer(
    plan_on: PlanOn, hardware: Hardware, why: str, *, most: int | None = None, beats: PlanOrder | None = None
) -> Iterator[Plan]:
    """Choices for half of the GPUs of a node, a quarter, down to one, at `most` so many; only those that fit."""
    num_all = len(hardware.gpus) if hardware.num_nodes == 1 else 0
    for num_gpus in [num_all >> halvings for halvings in range(1, num_all.bit_length())][:most]:
        used = [gpu.index for gpu in hardware.gpus[:num_gpus]]
        unused = ", ".join(str(gpu.index) for gpu in hardware.gpus[num_gpus:])
        fewer = replace(
            hardware,
            gpus=hardware.gpus[:num_gpus],
            links=tuple(link for link in hardware.links if {link.a, link.b} <= set(used)),
            excluded=(*hardware.excluded, f"GPU {unused}: with more than {num_gpus} {why}"),
        )
        with suppress(NothingFitsError, InputError):
            yield plan_on(fewer, extent=Extent.CHOICE, beats=beats)


def take_candidate(plan: Plan, number: int) -> Plan:
    """The plan with its `number`-th candidate (from 1) first, and the fallbacks that follow from it."""
    if not 1 <= number <= len(plan.candidates):
        raise InputError(f"--take {number}: the plan has {len(plan.candidates)} candidates, counted from 1")
    if number == 1:
        return plan  # its fallbacks may be a trial's, or an earlier run's
    taken = plan.candidates[number - 1]
    others = (candidate for candidate in plan.candidates if candidate is not taken)
    context = context_of(plan)
    candidates = _explained(context, (taken, *others))
    return replace(
        plan,
        schedule=schedule_with(taken, context, plan.data),
        candidates=candidates,
        fallbacks=fallbacks(context, candidates),
        warnings=warnings(context, candidates[0]),
        notes=notes(context, plan.data, plan.trials, candidates),
    )


def schedule_with(chosen: Candidate, context: PlanningContext, data: DataProfile) -> Schedule:
    """The schedule of the run at the learning rate of the chosen candidate."""
    return make_schedule(
        context.job,
        data,
        context.shape,
        method=chosen.method,
        optimizer=chosen.strategy.optimizer,
        num_ranks=context.num_ranks,
    )


def open_contexts(
    job: Job,
    *,
    hardware: Hardware,
    shape: ModelShape,
    data: DataProfile,
    calibration: Calibration,
    versions: dict[str, str],
) -> dict[Method, PlanningContext]:
    """The context of each method that the job allows, for the limits of a machine."""
    check_job(job, shape, data, ())
    corrections = corrections_of(calibration, shape=shape, hardware=hardware, versions=versions)
    return {method: _context(job, hardware, shape, data, method, corrections) for method in _methods(job, data)}


def context_of(plan: Plan) -> PlanningContext:
    """The context of a plan."""
    learned = corrections_of(plan.calibration, shape=plan.model_shape, hardware=plan.hardware, versions=plan.versions)
    corrections = after_trials(learned, plan.trials)
    hooks = () if plan.extension is None else plan.extension.hooks
    context = _context(plan.job, plan.hardware, plan.model_shape, plan.data, plan.chosen.method, corrections, hooks)
    return with_fp8_gain(replace(context, schedule=plan.schedule), plan.fp8_gain)


def with_fp8_gain(context: PlanningContext, gain: Fp8Gain | None) -> PlanningContext:
    """The context with the measured speed of FP8."""
    if gain is None:
        return context
    savings = {each.recipe: each.saved_s_per_flop for each in gain.all}  # by FP8 recipe
    timed = tuple((name, saved) for name, saved in savings.items() if saved is not None)
    return replace(context, fp8_gain=gain, device=replace(context.device, measured_fp8_savings=timed))


def _rank_methods(
    contexts: Mapping[Method, PlanningContext],
    wanted: Sequence[Method],
    trials: Sequence[TrialResult],
    extent: Extent,
    beats: PlanOrder | None,
) -> tuple[Method | None, dict[Method, Ranking]]:
    """The first wanted method that runs in time, else the fastest, and a ranking of every method, of some a survey.

    For a choice alone only methods up to the one that is taken have a ranking, and all without trials a survey.
    """

    def ranked(method: Method, known_seconds: float = math.inf) -> Ranking:
        if extent is Extent.CHOICE and not trials:
            return survey(contexts[method], known_seconds=known_seconds)
        return rank(contexts[method], trials, is_whole=extent is Extent.WHOLE)

    taken: Method | None = None
    rankings: dict[Method, Ranking] = {}
    hours: dict[Method, float] = {}
    for position, (method, context) in enumerate(contexts.items()):
        is_requested = taken is None and method in wanted
        if extent is Extent.CHOICE and not is_requested:
            continue
        known_seconds = math.inf
        if beats is not None and not hours:  # a method that is not in time is taken if others are not either
            if position > beats[0]:
                break
            if position == beats[0]:
                known_seconds = BOTH_ERRORS * beats[1] * context.schedule.sequences_per_step
        rankings[method] = ranked(method, known_seconds) if is_requested else survey(context)
        if is_requested and rankings[method].candidates:
            hours[method] = run_hours(context, rankings[method].candidates[0])
            is_in_time = context.job.limits.hours is not None or hours[method] <= WISHED_HOURS
            taken = method if is_in_time and not _is_for_host(context, rankings[method].candidates[0]) else None
    if taken is None and hours:
        taken = min(hours, key=lambda method: hours[method])
    if taken is Method.LORA and Method.QLORA in wanted and _streams(contexts[taken], rankings[taken]):
        rankings[Method.QLORA] = ranked(Method.QLORA)
        taken = _without_streaming(contexts, rankings)
    return taken, rankings


def _is_for_host(context: PlanningContext, chosen: Candidate) -> bool:
    """True of full training with its state in host RAM, and of its approximation, where a first user wants adapters."""
    is_hosted = chosen.strategy.offload is not Offload.NONE or context.method is Method.GALORE
    return wishes_adapters(context) and not context.method.freezes_base and is_hosted


def _streams(context: PlanningContext, ranking: Ranking) -> bool:
    """True if the first candidate's weights cross PCIe in every pass: from the host, or gathered from other cards."""
    chosen = ranking.candidates[0]
    gathers = chosen.strategy.sharding.shards_weights and chosen.num_ranks > 1
    is_over_pcie = not context.is_cpu and context.device.link_kind is not LinkKind.NVLINK
    return chosen.strategy.offload.moves_parameters or (gathers and is_over_pcie)


def _without_streaming(contexts: Mapping[Method, PlanningContext], rankings: Mapping[Method, Ranking]) -> Method:
    """QLoRA, whose base has 4 bits, unless LoRA that streams its base from host RAM is faster.

    Others use it on such cards, and little or no host RAM is pinned. LoRA that gathers its base pins none, and is
    given up only for a gain above the errors of both predictions.
    """

    def seconds(method: Method) -> float:
        context, candidate = contexts[method], rankings[method].candidates[0]
        return compared_seconds(context, configuration_of(context, candidate), candidate.speed.step_s)

    if not rankings[Method.QLORA].candidates:
        return Method.LORA
    is_hosted = rankings[Method.LORA].candidates[0].strategy.offload.moves_parameters
    margin = 1.0 if is_hosted else BOTH_ERRORS
    return Method.QLORA if margin * seconds(Method.QLORA) <= seconds(Method.LORA) else Method.LORA


def _methods(job: Job, data: DataProfile) -> tuple[Method, ...]:
    """The allowed methods, the most faithful first."""
    if job.train.method is not None:
        return (job.train.method,)
    needs_frozen = needs_every_row_first(job, data) or bool(job.pin.embedding_on_host)
    return tuple(method for method in Method if method.freezes_base or not needs_frozen)


def _context(
    job: Job,
    hardware: Hardware,
    shape: ModelShape,
    data: DataProfile,
    method: Method,
    corrections: Corrections,
    hooks: tuple[Hook, ...] = (),
) -> PlanningContext:
    return PlanningContext(
        job=job,
        hardware=hardware,
        device=device_of(hardware),
        shape=shape,
        schedule=make_schedule(job, data, shape, method=method, num_ranks=hardware.num_devices),
        method=method,
        num_eval_tokens=data.num_eval_tokens,
        data=data,
        corrections=corrections,
        hooks=hooks,
    )


def _explained(context: PlanningContext, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates, the first with the reasons for its settings."""
    first, *others = (replace(candidate, reasons=()) if candidate.reasons else candidate for candidate in candidates)
    return (replace(first, reasons=reasons(context, first)), *others)


_ROW_AXES = ("sharding", "offload", "optimizer", "precision")
_OF_SETTINGS = frozenset(rule.name for rule in SETTINGS)
_SETTING_AXES = (
    "checkpointing",
    "loss",
    "compile",
    "fused_kernels",
    "activation_offload",
    "optimizer_in_backward",
    "shard_group",
    "reduce_every_micro_batch",
    "embedding_on_host",
    "prefetch_two_blocks",
    "fused_adapters",
    "compiled_head",
)


def check_job(job: Job, shape: ModelShape, data: DataProfile, hooks: Sequence[Hook]) -> None:
    """InputError for what no machine can train: job, model and data that exclude each other."""
    problems = [*_length_problems(job, shape), *_vocabulary_problems(shape, data)]
    if problems:
        raise InputProblemsError(problems)
    _check_loss(job, shape, data, hooks)
    _check_router_loss(job, shape, data, hooks)


def _check_router_loss(job: Job, shape: ModelShape, data: DataProfile, hooks: Sequence[Hook]) -> None:
    """InputError where the loss that balances experts is requested and cannot be added."""
    if job.train.router_aux_loss is None:
        return
    if not shape.has_router_loss:
        how = (
            "has no experts"
            if shape.num_experts == 1
            else "has no such loss in transformers, as models do that balance their experts by a bias (DeepSeek-V3)"
        )
        raise InputError(f"train.router_aux_loss: {shape.model_type} {how}; remove it")
    objective = objective_of(job.train.objective, data.format)
    if not OBJECTIVES[objective].weighs_tokens_alike:
        raise InputError(
            f"train.router_aux_loss and train.objective: {objective} exclude each other; it is added to token losses"
        )
    if Hook.LOSS in hooks:
        raise InputError("train.router_aux_loss and the loss of extensions exclude each other; remove one of them")


def _check_loss(job: Job, shape: ModelShape, data: DataProfile, hooks: Sequence[Hook]) -> None:
    """InputError for settings that exclude the objective, the model's logits or a function of the extensions file."""
    pinned, fitting = job.pin.loss, shapes_for(job.train.objective)
    if data.format not in fitting:
        raise InputError(
            f"train.objective: {job.train.objective} learns from {' or '.join(fitting)} rows; data.train holds "
            f"{data.format}"
        )
    objective = objective_of(job.train.objective, data.format)
    weighs_tokens_alike = OBJECTIVES[objective].weighs_tokens_alike
    if pinned is not None and pinned not in shape.loss_heads:
        raise InputError(
            f"pin.loss: {pinned} and {shape.model_type} exclude each other, whose logits are more than a product of "
            "its head;\nuse pin.loss=eager"
        )
    if pinned is LossHead.FUSED_LINEAR and not weighs_tokens_alike:
        raise InputError(
            f"pin.loss: fused_linear and train.objective: {objective} exclude each other; Liger makes its gradients "
            "before the weight of a row is known: use pin.loss=chunked"
        )
    method = job.train.method
    if method is not None and not method.freezes_base and needs_every_row_first(job, data):
        raise InputError(
            f"data.streaming, train.objective: {objective} and train.method: {method} exclude each other; the initial "
            "model would have to score rows that are not read yet: train.method=lora needs no such scores"
        )
    if Hook.LOSS in hooks and pinned not in (None, LossHead.EAGER):
        raise InputError(f"pin.loss: {pinned} and the loss of extensions exclude each other; it receives all logits")
    if Hook.LOSS in hooks and job.pin.compiled_head:
        raise InputError("pin.compiled_head and the loss of extensions exclude each other; it receives all logits")
    if Hook.LOSS in hooks and not weighs_tokens_alike:
        raise InputError(
            f"train.objective: {objective} and the loss of extensions exclude each other; remove one of them"
        )
    if Hook.BUILD_MODEL in hooks and job.train.method is Method.QLORA:
        raise InputError("train.method: qlora and build_model of extensions exclude each other; qlora reads a folder")


def needs_every_row_first(job: Job, data: DataProfile) -> bool:
    """True if full training would need a scan of rows that a stream has not reached yet."""
    return data.is_stream and OBJECTIVES[objective_of(job.train.objective, data.format)].scores_initial_model


def check_pins(context: PlanningContext) -> None:
    """InputError for pins that no strategy satisfies, with the rule that prevents it."""
    problems = [*_setting_problems(context), *_micro_batch_problems(context)]
    if problems:
        raise InputProblemsError(problems)
    pins = _pins(context, _ROW_AXES)
    pinned_text = ", ".join(f"pin.{axis}: {member}" for axis, member in pins.items())
    rows = [row for row in CATALOGUE if all(getattr(row, axis) == member for axis, member in pins.items())]
    if not rows:
        raise InputError(
            f"{pinned_text}: there is no such strategy; {_what_there_is(pins)}{_why_there_is_none(context)}"
        )
    settings = {axis: _written(member) for axis, member in _pins(context, _SETTING_AXES).items()}
    if not pins and not settings:
        return
    refusals = [refusal for row in rows if (refusal := refuse(context, row))]
    if len(refusals) == len(rows):
        of_settings = [refusal for refusal in refusals if refusal.rule in _OF_SETTINGS]
        refusal = most_common(of_settings or refusals)
        instead = f"; use {refusal.instead}" if refusal.instead else ""
        if refusal.rule in _OF_SETTINGS:
            pinned_text = ", ".join(f"pin.{axis}: {member}" for axis, member in (pins | settings).items())
        if not pinned_text:
            return  # no pin is the cause
        raise InputError(f"{pinned_text} cannot be used: {refusal.reason}{instead}")


def _pins(context: PlanningContext, axes: Sequence[str]) -> dict[str, object]:
    return {axis: member for axis in axes if (member := getattr(context.job.pin, axis)) is not None}


def _written(member: object) -> object:
    """As the job file spells it."""
    return str(member).lower() if isinstance(member, bool) else member


def most_common(refusals: Sequence[Refusal]) -> Refusal:
    """The refusal that most strategies share: it is about the pin, not about one optimizer."""
    reasons = [refusal.reason for refusal in refusals]
    return max(refusals, key=lambda refusal: reasons.count(refusal.reason))


def _length_problems(job: Job, shape: ModelShape) -> list[str]:
    train = job.train
    problems = []
    if shape.max_positions is not None and train.seq_len > shape.max_positions:
        problems.append(
            f"train.seq_len is {train.seq_len}; the model has {shape.max_positions} positions "
            f"(max_position_embeddings): train.seq_len: {shape.max_positions} or less"
        )
    return problems


def _vocabulary_problems(shape: ModelShape, data: DataProfile) -> list[str]:
    if data.vocab_size <= shape.vocab_size:
        return []
    return [
        f"the tokenizer has {data.vocab_size} tokens and the model {shape.vocab_size}: "
        "model.tokenizer must be the model's own, or vocab_size of the config at least as large"
    ]


def _setting_problems(context: PlanningContext) -> list[str]:
    pin = context.job.pin
    problems, blocks = [], context.shape.num_layers
    every = every_n(context, pin.checkpointing) if pin.checkpointing is not None else None
    if every is not None and every > blocks:
        problems.append(f"pin.checkpointing_n is {every}; the model has {blocks} blocks: {blocks} or less")
    if pin.attention is not None and pin.attention not in context.shape.attentions:
        problems.append(f"pin.attention: {pin.attention} cannot be used: {attention_text(context.shape)}")
    elif pin.attention is Attention.FLASH:
        obstacle = obstacle_to_flash(context, pin.precision or Precision.BF16_MIXED)
        could_be_allowed = context.job.model.flash_kernel is None and obstacle == missing_flash(context)
        instead = "use sdpa, or name a prebuilt one in model.flash_kernel" if could_be_allowed else "use sdpa"
        problems += [f"pin.attention: flash cannot be used: {obstacle}; {instead}"] if obstacle else []
    sizes = group_sizes(context.num_ranks, context.hardware.num_devices_per_node)
    if pin.shard_group is not None and pin.shard_group not in sizes:
        possible = f"write {one_of(tuple(map(str, sorted(sizes))))}" if sizes else "remove it"
        problems.append(
            f"pin.shard_group: {pin.shard_group} ranks are no group of hsdp, one of two or more in a node or of whole "
            f"nodes, on {context.num_ranks} ranks; {possible}"
        )
    return problems


def _micro_batch_problems(context: PlanningContext) -> list[str]:
    pinned, sequences = context.job.pin.micro_batch, context.schedule.sequences_per_step
    if pinned is None or pinned <= context.sequences_per_rank:
        return []
    return [
        f"pin.micro_batch is {pinned}; a step has {sequences} sequences (train.tokens_per_step / train.seq_len) for "
        f"{context.num_ranks} ranks: {context.sequences_per_rank} or less"
    ]


def _why_there_is_none(context: PlanningContext) -> str:
    """The rule for which the catalogue lacks the pinned strategy; empty if the sharding is not pinned."""
    pin = context.job.pin
    if pin.sharding is None:
        return ""
    is_adam = pin.optimizer is None and pin.offload not in (None, Offload.NONE) and pin.sharding.uses_deepspeed
    strategy = Strategy(
        name="",
        sharding=pin.sharding,
        offload=pin.offload or Offload.NONE,
        optimizer=pin.optimizer or (Optimizer.DEEPSPEED_CPU_ADAM if is_adam else Optimizer.ADAMW_FUSED),
        precision=pin.precision or Precision.BF16_MIXED,
        is_exact=False,
    )
    rule_input = pinned_rule_input(context, strategy)
    broken = first_broken(LAYOUTS, rule_input)
    return "" if broken is None else f": {broken.reason_of(rule_input)}; use {broken.instead_of(rule_input)}"


def _what_there_is(pins: dict[str, object]) -> str:
    """Values on the other pinned axes that are compatible with the first pin."""
    first, *others = pins
    rows = [row for row in CATALOGUE if getattr(row, first) == pins[first]]
    served = [f"{axis} {', '.join(dict.fromkeys(str(getattr(row, axis)) for row in rows))}" for axis in others]
    return f"with {first} {pins[first]} there is {'; '.join(served)}" if rows else f"no row has {first} {pins[first]}"
