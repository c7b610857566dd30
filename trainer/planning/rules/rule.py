"""Rows of the catalogue that a job on a machine may use: rules as data, each with reason, evidence and alternative.

A rule looks at one row in one context; the first broken rule of `RULES` is the row's reason, so the order matters: what
the job file pins, what cannot work (`incompatible`), what the job does not allow, what would only be slower.
A pin of the setting that a rule reads overrides it: a pinned mechanism is used unless it cannot work.

No rule reads a number of bytes: memory, host RAM, hours and money are budgets, checked later (`candidates.excess`).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from operator import attrgetter

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.fp8 import no_compiler, recipe_of, recipes_of
from shardwise.trainer.planning.rules.incompatible import BF16, ROWS, SETTINGS
from shardwise.trainer.planning.rules.rule_input import (
    PLACEHOLDERS,
    Incompatibility,
    LazyValues,
    Reach,
    RuleInput,
    first_broken,
    reaching,
    rule_input_of,
)
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.fp8 import FP8_RECIPES, gains_somewhere
from shardwise.trainer.spec.job.sections import Allowance, Pin
from shardwise.trainer.spec.packages import extra_lines
from shardwise.trainer.spec.strategy import Attention, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.value import Value


class Kind(StrEnum):
    """Why a rule is there."""

    PIN = "pin"  # the job file sets something else
    INCOMPATIBLE = "incompatible"
    NEED = "need"  # something that can be installed or given
    OPT_IN = "opt_in"  # an entry of `allow` would lift it
    SLOWER = "slower"


class Rule(Value, frozen=True, kw_only=True):
    """A reason not to use a strategy; `reason` is filled with the facts of the context and the strategy."""

    name: str
    kind: Kind
    is_broken: Callable[[PlanningContext, Strategy], bool]
    reason: str
    evidence: str
    instead: str | None = None
    axis: str | None = None  # the setting of a strategy that it reads; None: several
    is_absolute: bool = False  # of an axis, though no pin overrides it

    @property
    def yields_to(self) -> str | None:
        """The pin that overrides it."""
        return None if self.is_absolute else self.axis

    @property
    def needs_opt_in(self) -> bool:
        """True if an entry of `allow` would lift the rule."""
        return self.kind is Kind.OPT_IN


# Types of models whose residual stream leaves the range of fp16.
_OVERFLOWS_IN_FP16 = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma3n_text"})


def _lacks(context: PlanningContext, allowance: Allowance) -> bool:
    return allowance not in context.job.allow


OF_THE_JOB: tuple[Rule, ...] = (
    # What the job does not allow.
    Rule(
        name="nvme_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.offload.uses_nvme and _lacks(s, Allowance.OFFLOAD_NVME),
        reason="{offload} is slow and wears the disk; the job does not allow it",
        instead="allow: [offload_nvme]",
        axis="offload",
        evidence="every step reads and writes the whole state, 12 bytes a parameter; disks have a write limit",
    ),
    Rule(
        name="nvme_needs_a_path",
        kind=Kind.NEED,
        is_broken=lambda s, row: row.offload.uses_nvme and s.job.limits.nvme.path is None,
        reason="{offload} needs a folder on a local disk",
        instead="limits.nvme.path",
        axis="offload",
        is_absolute=True,
        evidence="DeepSpeed 0.19.8, zero/offload_config.py: nvme_path",
    ),
    Rule(
        name="cpu_offload_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: (
            row.offload is not Offload.NONE and not row.offload.uses_nvme and _lacks(s, Allowance.OFFLOAD_CPU)
        ),
        reason="{offload} keeps state in host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        axis="offload",
        evidence="a job may share its host with others",
    ),
    Rule(
        name="host_ram_unknown",
        kind=Kind.NEED,
        is_broken=lambda s, row: row.offload is not Offload.NONE and not s.is_cpu and s.host_ram_bytes is None,
        reason="host RAM is unknown",
        instead="give limits.host_ram",
        axis="offload",
        is_absolute=True,
        evidence="Slurm does not report the RAM of every node",
    ),
    Rule(
        name="paged_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.optimizer.facts.is_paged and _lacks(s, Allowance.OFFLOAD_CPU),
        reason="{optimizer} pages its state to host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        axis="optimizer",
        evidence="QLoRA, arXiv:2305.14314, section 3: paged optimizers in unified memory",
    ),
    Rule(
        name="8bit_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.optimizer.facts.is_8bit and _lacks(s, Allowance.OPTIMIZER_8BIT),
        reason="{optimizer} keeps 8-bit state, which changes the update; the job does not allow it",
        instead="allow: [optimizer_8bit]",
        axis="optimizer",
        evidence="arXiv:2110.02861: state is quantised in blocks, a value is off by up to half a step",
    ),
    Rule(
        name="approximation_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.optimizer.facts.changes_update and _lacks(s, Allowance.OPTIMIZER_APPROX),
        reason="{optimizer} is not AdamW; the job does not allow another update",
        instead="allow: [optimizer_approx]",
        axis="optimizer",
        evidence="each has an update rule and a learning rate of its own (docs/techniques.md, 13)",
    ),
    Rule(
        name="sgd_is_never_chosen",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.optimizer.facts.is_chosen_by_pin_only,
        reason="{optimizer} trains transformers poorly and needs its own learning rate",
        instead="pin.optimizer: sgd",
        axis="optimizer",
        evidence="arXiv:1912.03194 and arXiv:2402.19449: its gap to Adam on attention models and on rare tokens",
    ),
    Rule(
        name="bf16_weights_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.precision is Precision.BF16 and _lacks(s, Allowance.BF16_WEIGHTS),
        reason="{precision} keeps no fp32 master weights and loses small updates; the job does not allow it",
        instead="allow: [bf16_weights]",
        axis="precision",
        evidence="bf16 has 8 significant bits: an update below 1/512 of a weight rounds away (arXiv:2010.06192)",
    ),
    Rule(
        name="fp8_not_allowed",
        kind=Kind.OPT_IN,
        is_broken=lambda s, row: row.precision is Precision.FP8 and _lacks(s, Allowance.FP8),
        reason="{precision} rounds the inputs of matrix products; the job does not allow it",
        instead="allow: [fp8]",
        axis="precision",
        evidence="arXiv:2209.05433: E4M3 has 4 significant bits, E5M2 has 3",
    ),
    # What would only be slower.
    Rule(
        name="adapters_have_little_state",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: (
            s.method.freezes_base and row.offload is not Offload.NONE and not row.offload.moves_parameters
        ),
        reason="{offload} would move the optimizer state of adapters, which is small",
        instead="no offload, or one of weights too",
        axis="offload",
        evidence="adapters of rank 16 on 8B parameters are 42M: 0.5 GiB of state (arXiv:2106.09685, section 4.2)",
    ),
    Rule(
        name="fp8_products_are_too_small",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: (
            row.precision is Precision.FP8 and not any(gains_somewhere(s.shape, recipe) for recipe in recipes_of(s))
        ),
        reason="{precision} gains nothing: the matrices of {model_type} are too small for its casts",
        instead="bf16-mixed, or pin it",
        axis="precision",
        evidence="torchao 0.18, float8_linear_utils.py: sizes below which an H100 is slower in FP8",
    ),
    Rule(
        name="fp8_without_compile",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: (
            row.precision is Precision.FP8
            and no_compiler(s) is not None
            and all(FP8_RECIPES[recipe].is_compiled for recipe in recipes_of(s))
        ),
        reason="{precision} by torchao gains under torch.compile alone, and {no_compiler}",
        instead="pin.compile: true, or {install[fp8]}",
        axis="precision",
        evidence="torchao 0.18, float8 README: without torch.compile its casts are not fused",
    ),
    Rule(
        name="fp8_does_not_pay",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP8 and s.fp8_gain is not None and not s.fp8_gain.pays,
        reason="{precision} {fp8_text}",
        instead="bf16-mixed, or pin it",
        axis="precision",
        evidence="timed on this GPU: forward and backward of the model's own blocks, as they would run",
    ),
    Rule(
        name="offload_to_itself",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.offload is not Offload.NONE,
        reason="the device is the CPU, so everything is in host RAM already",
        instead="no offload",
        axis="offload",
        evidence="state of a CPU rank is in host RAM",
    ),
    Rule(
        name="paged_to_itself",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.optimizer.facts.is_paged,
        reason="{optimizer} pages nothing: the device is the CPU",
        instead="the same optimizer unpaged",
        axis="optimizer",
        evidence="bitsandbytes 0.50 allocates managed memory by CUDA; on a CPU its paged state is plain",
    ),
    Rule(
        name="fused_form_is_faster",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: (
            row.optimizer.facts.fused_form is not None and s.method is not Method.GALORE and not s.is_cpu
        ),
        reason="{optimizer} runs a kernel for each operation of its update, and keeps a temporary of each weight",
        instead="adamw_fused, or pin it",
        axis="optimizer",
        evidence="torch.optim.AdamW: fused is one kernel; `passes` and `scratch` of both are in spec.optimizers",
    ),
    Rule(
        name="bf16_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.precision in BF16 and not s.fast_bf16,
        reason="{precision} would be slower than fp32: {device} has no amx_bf16",
        instead="fp32, or pin it",
        axis="precision",
        evidence="oneDNN computes bf16 products natively with avx512_bf16 or AMX, AMX at far more than fp32's rate",
    ),
    Rule(
        name="fp16_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.precision is Precision.FP16_MIXED,
        reason="{precision} would be slower than fp32: {device} is a CPU",
        instead="fp32, or pin it",
        axis="precision",
        evidence="products of fp16 are computed in fp32 there, and the loss is scaled on top",
    ),
    Rule(
        name="fp16_overflows",
        kind=Kind.INCOMPATIBLE,
        is_broken=lambda s, row: row.precision is Precision.FP16_MIXED and s.shape.model_type in _OVERFLOWS_IN_FP16,
        reason="{precision} overflows in models of this type: their activations exceed 65,504",
        instead="fp32, or a GPU with bf16 (compute capability 8.0)",
        axis="precision",
        evidence="transformers issue 36822 (Gemma 3: losses are not finite); Gemma 2 was trained in bf16 alone",
    ),
    Rule(
        name="bf16_needs_no_scaler",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP16_MIXED and s.fast_bf16,
        reason="{precision} needs loss scaling, and bf16-mixed is as fast here",
        instead="bf16-mixed, or pin it",
        axis="precision",
        evidence="bf16 has fp32's range (arXiv:1905.12322), and both have one datasheet rate (gpu_specs.py)",
    ),
    Rule(
        name="fp32_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP32 and s.fast_bf16,
        reason="{precision} is slower here than bf16-mixed, which keeps the same fp32 master weights",
        instead="bf16-mixed, or pin it",
        axis="precision",
        evidence="datasheets: tensor cores multiply bf16 at 2 to 16 times the rate of fp32 (gpu_specs.py)",
    ),
)


__all__ = [
    "OF_THE_JOB",
    "RULES",
    "Refusal",
    "Rule",
    "broken_by_job",
    "may_run",
    "obstacle_to",
    "pinned_rule_input",
    "refuse",
    "rule_named",
]
_NO_RULE = len(OF_THE_JOB)
_NO_PINS = Pin()
_OWN_SETTINGS = reaching(SETTINGS, Reach.OURS)
_AXES = ("sharding", "offload", "optimizer", "precision")
_AXES_OF = attrgetter(*_AXES)
# From the one that refuses most rows to the one that refuses fewest.
_AXES_OF_JOB = tuple(axis for axis in reversed(_AXES) if any(rule.axis == axis for rule in OF_THE_JOB))
_SETTING_PINS = (
    "checkpointing", "attention", "loss", "compile", "activation_offload", "optimizer_in_backward", "shard_group",
    "fused_kernels", "reduce_every_micro_batch", "embedding_on_host", "prefetch_two_blocks",
    "fused_adapters", "compiled_head",
)  # fmt: skip


class Refusal(Value, frozen=True, kw_only=True):
    """A broken rule, as text."""

    rule: str
    reason: str
    instead: str | None


def refuse(context: PlanningContext, strategy: Strategy) -> Refusal | None:
    """The first rule that `strategy` breaks, or None if it may be used."""
    if _PINNED.is_broken(context, strategy):
        rule: Rule | None = _PINNED
    elif (incompatibility := _incompatibility(context, strategy)) is not None:
        return _refusal(incompatibility, LazyValues(PLACEHOLDERS, pinned_rule_input(context, strategy)))
    else:
        rule = broken_by_job(context, strategy)
    return None if rule is None else _refusal(rule, LazyValues(_PLACEHOLDERS_OF_JOB, context, strategy))


def _refusal(broken: Rule | Incompatibility, values: LazyValues) -> Refusal:
    instead = None if broken.instead is None else broken.instead.format_map(values)
    return Refusal(rule=broken.name, reason=broken.reason.format_map(values), instead=instead)


def may_run(context: PlanningContext, strategy: Strategy) -> bool:
    """True if no rule is broken; cheap rules are tested first."""
    for axis in _AXES_OF_JOB:
        if _first_of_axis(context, strategy, axis) != _NO_RULE:
            return False
    return not _PINNED.is_broken(context, strategy) and _incompatibility(context, strategy) is None


def broken_by_job(context: PlanningContext, strategy: Strategy) -> Rule | None:
    """The first rule that the job breaks with `strategy`, of those that no pin overrides; None: it breaks none."""
    first = min(_first_of_axis(context, strategy, axis) for axis in _AXES_OF_JOB)
    return None if first == _NO_RULE else OF_THE_JOB[first]


def _first_of_axis(context: PlanningContext, strategy: Strategy, axis: str) -> int:
    """The index of the first rule of `OF_THE_JOB` that the strategy breaks by this setting, or `_NO_RULE`."""
    member = getattr(strategy, axis)
    known = context.broken_rules.get((axis, member))
    if known is None:
        is_pinned = getattr(context.job.pin, axis) == member
        broken = (
            index
            for index, rule in enumerate(OF_THE_JOB)
            if rule.axis == axis and rule.is_broken(context, strategy) and not (is_pinned and not rule.is_absolute)
        )
        known = context.broken_rules[axis, member] = next(broken, _NO_RULE)
    return known


def obstacle_to(context: PlanningContext, configuration: Configuration) -> Incompatibility | None:
    """Why a configuration of a permitted strategy cannot run; None if it can.

    A search calls it thousands of times, mostly for configurations that cannot break a rule.
    """
    if not _is_remarkable(configuration):
        return None
    rule_input = rule_input_of(configuration, context.shape, context.device, libraries=context.libraries)
    return first_broken(_OWN_SETTINGS, rule_input)


def pinned_rule_input(context: PlanningContext, strategy: Strategy) -> RuleInput:
    """A strategy with the settings that the job fixes."""
    pin, train, share = context.job.pin, context.job.train, context.sequences_per_rank
    fp8_recipe = recipe_of(context, strategy)
    return RuleInput(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        device=context.device,
        shape=context.shape,
        accumulation=None if pin.micro_batch is None else -(-share // pin.micro_batch),
        checkpointing=pin.checkpointing,
        attention=pin.attention,
        loss=pin.loss,
        compile=bool(pin.compile)
        or (pin.compile is None and fp8_recipe is not None and FP8_RECIPES[fp8_recipe].is_compiled),
        fused_kernels=bool(pin.fused_kernels),
        activation_offload=bool(pin.activation_offload),
        optimizer_in_backward=bool(pin.optimizer_in_backward),
        fp8_recipe=fp8_recipe,
        shard_group=pin.shard_group,
        reduce_every_micro_batch=bool(pin.reduce_every_micro_batch),
        embedding_on_host=bool(pin.embedding_on_host),
        prefetch_two_blocks=bool(pin.prefetch_two_blocks),
        fused_adapters=bool(pin.fused_adapters),
        compiled_head=bool(pin.compiled_head),
        lora=train.lora,
        galore=train.galore,
        router_aux_loss=train.router_aux_loss,
        libraries=context.libraries,
        cpu_flags=_cpu_flags(context, strategy),
    )


def _incompatibility(context: PlanningContext, strategy: Strategy) -> Incompatibility | None:
    """The first of `ROWS` and `SETTINGS` that is broken; a row of the catalogue breaks none of `LAYOUTS`."""
    rule_input = RuleInput(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        device=context.device,
        shape=context.shape,
        cpu_flags=_cpu_flags(context, strategy),
    )
    broken = first_broken(ROWS, rule_input)
    if broken is not None or not _settles_more(context, strategy):
        return broken
    return first_broken(_OWN_SETTINGS, pinned_rule_input(context, strategy))


def _settles_more(context: PlanningContext, strategy: Strategy) -> bool:
    """True if the job or the strategy fixes anything that `SETTINGS` reads; this is rare, and strategies are many."""
    pin = context.job.pin
    return (
        strategy.optimizer.facts.updates_in_backward
        or strategy.precision is Precision.FP8
        or (context.method is Method.GALORE and context.job.train.galore.layerwise)
        or (pin != _NO_PINS and any(getattr(pin, name) is not None for name in _SETTING_PINS))
    )


def _cpu_flags(context: PlanningContext, strategy: Strategy) -> frozenset[str] | None:
    """The host's flags, if the one rule that reads them could be broken."""
    requests = context.is_cpu and strategy.precision is Precision.FP16_MIXED
    return frozenset(context.hardware.host.cpu_flags) if requests else None


def _is_remarkable(configuration: Configuration) -> bool:
    """True if any rule of `SETTINGS` could be broken."""
    return (
        configuration.compile
        or configuration.fused_kernels
        or configuration.activation_offload
        or configuration.fp8_recipe is not None
        or configuration.attention is Attention.FLASH
        or configuration.loss is LossHead.FUSED_LINEAR
        or configuration.updates_in_backward
        or configuration.embedding_on_host
    )


_PLACEHOLDERS_OF_JOB: Mapping[str, Callable[[PlanningContext, Strategy], object]] = {
    "offload": lambda _, row: row.offload,
    "optimizer": lambda _, row: row.optimizer,
    "precision": lambda _, row: row.precision,
    "pins": lambda s, row: ", ".join(f"pin.{axis}: {getattr(s.job.pin, axis)}" for axis in _differing(s, row)),
    "device": lambda s, _: s.device.name,
    "fp8_text": lambda s, _: s.fp8_gain.text if s.fp8_gain else "",
    "model_type": lambda s, _: s.shape.model_type,
    "no_compiler": lambda s, _: no_compiler(s),
    "install": lambda *_: extra_lines(),
}


def _breaks_pin(context: PlanningContext, strategy: Strategy) -> bool:
    return bool(_differing(context, strategy))


def _differing(context: PlanningContext, strategy: Strategy) -> list[str]:
    pin = context.job.pin
    if pin == _NO_PINS:
        return []
    both = zip(_AXES, _AXES_OF(pin), _AXES_OF(strategy), strict=True)
    return [axis for axis, wanted, taken in both if wanted not in (None, taken)]


_PINNED = Rule(
    name="pinned",
    kind=Kind.PIN,
    is_broken=_breaks_pin,
    reason="the job file sets {pins}",
    instead="remove the pin",
    evidence="the job file",
)


def _of_rows(incompatibility: Incompatibility) -> Rule:
    """An incompatibility as a rule about a strategy in a context."""

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
    *map(_of_rows, _OWN_SETTINGS),
    *OF_THE_JOB,
)
_BY_NAME = {rule.name: rule for rule in RULES}


def rule_named(name: str) -> Rule:
    """The rule of a rejection."""
    return _BY_NAME[name]
