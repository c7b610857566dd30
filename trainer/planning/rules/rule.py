"""Which rows a job on a machine may take: rules as data, each with its reason, its evidence and what to use instead.

A rule looks at one row in one context; the first broken rule of `RULES` is the row's reason, so the order matters:
what the job file pins, then what cannot work (`incompatible_rows` and, for what the job pins beside the row,
`incompatible_settings`), then what the job does not allow, then what would only be slower. `yields_to` names the pin
that overrides a rule: a person who fixes a mechanism by hand gets it, unless it cannot work.

Both look at settings and hardware only; `job_rules` looks at the job.

Nothing here knows a number of bytes: memory, host RAM, hours and money are budgets (`budget`), checked after it.
"""

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.combination import (
    Combination,
    Incompatibility,
    Reach,
    combination_of,
    facts_of,
    first_broken,
)
from shardwise.trainer.planning.rules.combination import capability_words as words_of_capability
from shardwise.trainer.planning.rules.incompatible_rows import ROWS
from shardwise.trainer.planning.rules.incompatible_settings import SETTINGS
from shardwise.trainer.planning.rules.job_rules import OF_THE_JOB, Kind, Rule
from shardwise.trainer.planning.setting import Setting, fp8_recipe_of
from shardwise.trainer.spec.strategy import Attention, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.value import Value

__all__ = [
    "RULES",
    "Refusal",
    "Rule",
    "capability_words",
    "may_run",
    "obstacle_to",
    "pinned_combination",
    "refuse",
    "rule_named",
]
_SETTING_PINS = ("checkpointing", "attention", "loss", "compile", "activation_offload", "optimizer_in_backward")


class Refusal(Value, frozen=True, kw_only=True):
    """A broken rule, in words."""

    rule: str
    reason: str
    instead: str | None


def refuse(context: PlanningContext, strategy: Strategy) -> Refusal | None:
    """The first rule that `strategy` breaks, or None where it may be taken."""
    rule = _broken_rule(context, strategy)
    if rule is None:
        return None
    if rule.kind is Kind.INCOMPATIBLE:
        facts = facts_of(pinned_combination(context, strategy))
    else:
        facts = _facts(context, strategy)
    instead = rule.instead.format(**facts) if rule.instead else None
    return Refusal(rule=rule.name, reason=rule.reason.format(**facts), instead=instead)


def _broken_rule(context: PlanningContext, strategy: Strategy) -> Rule | None:
    """The first rule that `strategy` breaks, not yet in words."""
    if _PINNED.is_broken(context, strategy):
        return _PINNED
    incompatibility = _incompatibility(context, strategy)
    if incompatibility is not None:
        return _BY_NAME[incompatibility.name]
    return _broken_by_job(context, strategy)


def may_run(context: PlanningContext, strategy: Strategy) -> bool:
    """True if no rule is broken; cheap rules are tested first."""
    return (
        not _PINNED.is_broken(context, strategy)
        and _broken_by_job(context, strategy) is None
        and _incompatibility(context, strategy) is None
    )


def _broken_by_job(context: PlanningContext, strategy: Strategy) -> Rule | None:
    pin = context.job.pin
    for rule in OF_THE_JOB:
        yields = rule.yields_to is not None and getattr(pin, rule.yields_to) == getattr(strategy, rule.yields_to)
        if not yields and rule.is_broken(context, strategy):
            return rule
    return None


def obstacle_to(context: PlanningContext, setting: Setting) -> Incompatibility | None:
    """Why a setting of a row cannot be taken, where the row itself can; None where it can.

    A search asks it of thousands, most of which settle nothing that could be in the way.
    """
    if not _is_remarkable(setting):
        return None
    combination = combination_of(setting, context.shape, context.device, libraries=_libraries(context))
    return first_broken(SETTINGS, combination, reach=Reach.OURS)


def pinned_combination(context: PlanningContext, strategy: Strategy) -> Combination:
    """A row with what the job fixes beside it; what it leaves open is not settled."""
    pin, train, share = context.job.pin, context.job.train, context.sequences_per_rank
    return Combination(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        device=context.device,
        shape=context.shape,
        accumulation=None if pin.micro_batch is None else -(-share // pin.micro_batch),
        checkpointing=pin.checkpointing,
        attention=pin.attention,
        loss=pin.loss,
        compile=bool(pin.compile),
        activation_offload=bool(pin.activation_offload),
        optimizer_in_backward=bool(pin.optimizer_in_backward),
        fp8_recipe=fp8_recipe_of(strategy.precision, pin.fp8_recipe),
        lora=train.lora,
        galore=train.galore,
        libraries=_libraries(context),
        cpu_flags=_cpu_flags(context, strategy),
    )


def _incompatibility(context: PlanningContext, strategy: Strategy) -> Incompatibility | None:
    """The first of the two tables; a row of the catalogue breaks no rule on layouts."""
    combination = Combination(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        device=context.device,
        shape=context.shape,
        cpu_flags=_cpu_flags(context, strategy),
    )
    broken = first_broken(ROWS, combination)
    if broken is not None or not _settles_more(context, strategy):
        return broken
    return first_broken(SETTINGS, pinned_combination(context, strategy), reach=Reach.OURS)


def _settles_more(context: PlanningContext, strategy: Strategy) -> bool:
    """True if the job or the strategy fixes anything that `SETTINGS` reads; this is rare, and strategies are many."""
    pin = context.job.pin
    return (
        strategy.optimizer.facts.updates_in_backward
        or strategy.precision is Precision.FP8
        or (context.method is Method.GALORE and context.job.train.galore.layerwise)
        or any(getattr(pin, name) is not None for name in _SETTING_PINS)
    )


def _cpu_flags(context: PlanningContext, strategy: Strategy) -> frozenset[str] | None:
    """The host's, where the one rule that looks at them could be broken."""
    asks = context.is_cpu and strategy.precision is Precision.FP16_MIXED
    return frozenset(context.hardware.host.cpu_flags) if asks else None


def _is_remarkable(setting: Setting) -> bool:
    """True if any rule of `SETTINGS` could be broken."""
    return (
        setting.compile
        or setting.activation_offload
        or setting.optimizer_in_backward
        or setting.fp8_recipe is not None
        or setting.attention is Attention.FLASH
        or setting.loss is LossHead.FUSED_LINEAR
        or setting.strategy.optimizer.facts.updates_in_backward
        or (setting.method is Method.GALORE and setting.galore.layerwise)
    )


def _libraries(context: PlanningContext) -> frozenset[str]:
    return frozenset(library.replace("_", "-").lower() for library in context.hardware.libraries)


def _facts(context: PlanningContext, strategy: Strategy) -> dict[str, object]:
    axes = {axis: getattr(strategy, axis) for axis in ("sharding", "offload", "optimizer", "precision")}
    return {
        **axes,
        "pins": ", ".join(f"pin.{axis}: {getattr(context.job.pin, axis)}" for axis in _differing(context, strategy)),
        "method": context.method,
        "device": context.device.name,
        "fp8_words": context.fp8_gain.words if context.fp8_gain else "",
    }


def capability_words(context: PlanningContext) -> str:
    """`V100-16GB has 7.0`, the other half of a sentence on compute capability."""
    return words_of_capability(context.device)


def _breaks_pin(context: PlanningContext, strategy: Strategy) -> bool:
    pin = context.job.pin
    return (
        pin.sharding not in (None, strategy.sharding)
        or pin.offload not in (None, strategy.offload)
        or pin.optimizer not in (None, strategy.optimizer)
        or pin.precision not in (None, strategy.precision)
    )


def _differing(context: PlanningContext, strategy: Strategy) -> list[str]:
    pin = context.job.pin
    axes = ("sharding", "offload", "optimizer", "precision")
    pinned = [(axis, member) for axis in axes if (member := getattr(pin, axis)) is not None]
    return [axis for axis, member in pinned if member != getattr(strategy, axis)]


_PINNED = Rule(
    name="pinned",
    kind=Kind.PIN,
    is_broken=_breaks_pin,
    reason="the job file sets {pins}",
    instead="leave the pin out",
    evidence="the job file",
)


def _of_rows(incompatibility: Incompatibility) -> Rule:
    """An incompatibility as a rule of a row in a context."""

    def is_broken(context: PlanningContext, strategy: Strategy) -> bool:
        found = _incompatibility(context, strategy)
        return found is not None and found.name == incompatibility.name

    return Rule(
        name=incompatibility.name,
        kind=Kind.INCOMPATIBLE,
        is_broken=is_broken,
        reason=incompatibility.reason,
        instead=incompatibility.instead,
        evidence=incompatibility.evidence,
    )


RULES: tuple[Rule, ...] = (
    _PINNED,
    *map(_of_rows, ROWS),
    *(_of_rows(rule) for rule in SETTINGS if rule.reach >= Reach.OURS),
    *OF_THE_JOB,
)
_BY_NAME = {rule.name: rule for rule in RULES}


def rule_named(name: str) -> Rule:
    """The rule of a rejection."""
    return _BY_NAME[name]
