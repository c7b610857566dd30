"""Combinations that no machine could train: each an InputError with both numbers, before anything is searched.

What a single setting may be is the job file's own check; here stand the clashes between job, model and data, and the
pins that this machine or this version cannot serve.
"""

from collections.abc import Sequence

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.combination import first_broken
from shardwise.trainer.planning.rules.incompatible import LAYOUTS, SETTINGS
from shardwise.trainer.planning.rules.rule import Refusal, pinned_combination, refuse
from shardwise.trainer.planning.search.configurations import attention_text, every_n, missing_flash, obstacle_to_flash
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import objective_of, shapes_for
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.errors import InputError, InputProblemsError
from shardwise.trainer.spec.job.sections import Job, Objective
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, LossHead, Method, Precision, Strategy

_ROW_AXES = ("sharding", "offload", "optimizer", "precision")
_OF_SETTINGS = frozenset(rule.name for rule in SETTINGS)
_SETTING_AXES = ("checkpointing", "loss", "compile", "activation_offload", "optimizer_in_backward")


def check_job(job: Job, shape: ModelShape, data: DataProfile) -> None:
    """InputError for sequences and vocabularies that cannot be."""
    problems = [*_length_problems(job, shape), *_vocabulary_problems(shape, data)]
    if problems:
        raise InputProblemsError(problems)


def check_objective(job: Job, data: DataProfile, hooks: Sequence[Hook]) -> None:
    """InputError where the job says something that its objective, or a function of the user's, leaves no room for."""
    pinned, objective = job.pin.loss, job.train.objective
    fitting = shapes_for(objective)
    if data.format not in fitting:
        raise InputError(
            f"train.objective: {objective} learns from {' or '.join(fitting)} rows; data.train holds {data.format}"
        )
    if pinned is LossHead.FUSED_LINEAR and objective_of(job.train.objective, data.format) is Objective.DPO:
        raise InputError(
            "pin.loss: fused_linear and train.objective: dpo exclude each other; Liger makes its gradients before the "
            "weight of a row is known: take pin.loss=chunked"
        )
    method = job.train.method
    if method is not None and not method.freezes_base and needs_every_row_first(job, data):
        raise InputError(
            f"data.streaming, train.objective: dpo and train.method: {method} exclude each other; the model of the "
            "start would have to be asked of rows that are not read yet: train.method=lora needs no such answers"
        )
    if Hook.LOSS in hooks and pinned not in (None, LossHead.EAGER):
        raise InputError(f"pin.loss: {pinned} and the loss of extensions exclude each other; it is given all logits")
    if Hook.LOSS in hooks and objective_of(job.train.objective, data.format) is Objective.DPO:
        raise InputError("train.objective: dpo and the loss of extensions exclude each other; leave out one of them")
    if Hook.BUILD_MODEL in hooks and job.train.method is Method.QLORA:
        raise InputError("train.method: qlora and build_model of extensions exclude each other; qlora reads a folder")


def needs_every_row_first(job: Job, data: DataProfile) -> bool:
    """True if full training would need a scan of rows that a stream has not reached yet."""
    return data.is_stream and objective_of(job.train.objective, data.format) is Objective.DPO


def check_pins(context: PlanningContext) -> None:
    """InputError for a pin that leaves no row, with the rule that is in the way."""
    problems = [*_setting_problems(context), *_micro_batch_problems(context)]
    if problems:
        raise InputProblemsError(problems)
    pins = _pins(context, _ROW_AXES)
    words = ", ".join(f"pin.{axis}: {member}" for axis, member in pins.items())
    rows = [row for row in CATALOGUE if all(getattr(row, axis) == member for axis, member in pins.items())]
    if not rows:
        raise InputError(f"{words}: there is no such strategy; {_what_there_is(pins)}{_why_there_is_none(context)}")
    settings = {axis: _written(member) for axis, member in _pins(context, _SETTING_AXES).items()}
    if not pins and not settings:
        return
    refusals = [refusal for row in rows if (refusal := refuse(context, row))]
    if len(refusals) == len(rows):
        refusal = most_telling(refusals)
        instead = f"; use {refusal.instead}" if refusal.instead else ""
        if refusal.rule in _OF_SETTINGS:
            words = ", ".join(f"pin.{axis}: {member}" for axis, member in (pins | settings).items())
        if not words:
            return  # nothing that was pinned is in the way
        raise InputError(f"{words} cannot be taken: {refusal.reason}{instead}")


def _pins(context: PlanningContext, axes: Sequence[str]) -> dict[str, object]:
    return {axis: member for axis in axes if (member := getattr(context.job.pin, axis)) is not None}


def _written(member: object) -> object:
    """As the job file spells it."""
    return str(member).lower() if isinstance(member, bool) else member


def most_telling(refusals: Sequence[Refusal]) -> Refusal:
    """The refusal that most rows share: what is in the way of a pin, not of one optimizer beside it."""
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
        problems.append(f"pin.attention: {pin.attention} cannot be taken: {attention_text(context.shape)}")
    elif pin.attention is Attention.FLASH:
        obstacle = obstacle_to_flash(context, pin.precision or Precision.BF16_MIXED)
        could_be_allowed = context.job.model.flash_kernel is None and obstacle == missing_flash(context)
        instead = "use sdpa, or name a prebuilt one in model.flash_kernel" if could_be_allowed else "use sdpa"
        problems += [f"pin.attention: flash cannot be taken: {obstacle}; {instead}"] if obstacle else []
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
    """The rule that keeps what is pinned out of the catalogue; nothing where more than one pin is open."""
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
    combination = pinned_combination(context, strategy)
    broken = first_broken(LAYOUTS, combination)
    return "" if broken is None else f": {broken.reason_of(combination)}; use {broken.instead_of(combination)}"


def _what_there_is(pins: dict[str, object]) -> str:
    """Values on the other pinned axes that are compatible with the first pin."""
    first, *others = pins
    rows = [row for row in CATALOGUE if getattr(row, first) == pins[first]]
    served = [f"{axis} {', '.join(dict.fromkeys(str(getattr(row, axis)) for row in rows))}" for axis in others]
    return f"with {first} {pins[first]} there is {'; '.join(served)}" if rows else f"no row has {first} {pins[first]}"
