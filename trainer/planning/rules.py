"""Which rows a job on a machine may take: rules as data, each with its reason and what to use instead.

A rule looks at one row in one situation; the first broken rule of `RULES` is the row's reason, so the order matters:
what the job file pins, then what is unsound or impossible on the machine, then what this version cannot train yet,
then what the job does not allow, then what would only be slower. `yields_to` names the pin that overrides a rule:
a person who fixes a mechanism by hand gets it, unless it cannot work.

Nothing here knows a number of bytes: memory, host RAM, hours and money are budgets (`budget`), checked after it.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from trainer.planning.not_yet import version_that_trains
from trainer.planning.situation import Situation
from trainer.spec.job import Allowance
from trainer.spec.strategy import Method, Offload, Optimizer, Precision, Sharding, Strategy
from trainer.spec.value import Value

_BITS_8 = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.LION_8BIT, Optimizer.LAMB_8BIT)
_APPROXIMATE = (
    Optimizer.LION,
    Optimizer.LION_8BIT,
    Optimizer.LAMB_8BIT,
    Optimizer.ADAFACTOR,
    Optimizer.MUON,
    Optimizer.LOMO,
    Optimizer.ADALOMO,
)
PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)
_GALORE_INNER = (Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAFACTOR)
_BF16 = (Precision.BF16_MIXED, Precision.BF16, Precision.FP8)


class Rule(Value, frozen=True, kw_only=True):
    """A reason not to take a row; `reason` is filled with the facts of the situation and the row."""

    name: str
    is_broken: Callable[[Situation, Strategy], bool]
    reason: str
    instead: str | None = None
    yields_to: str | None = None  # the pin that overrides it
    is_version: bool = False  # a limit of this version: set aside for the table of methods

    @property
    def asks_leave(self) -> bool:
        """Whether an entry of `allow` would lift it."""
        return self.name.endswith("_not_allowed")


class Refusal(Value, frozen=True, kw_only=True):
    """A broken rule, in words."""

    rule: str
    reason: str
    instead: str | None
    is_version: bool = False


def refuse(situation: Situation, strategy: Strategy, *, ignoring_version: bool = False) -> Refusal | None:
    """The first rule that `strategy` breaks, or None where it may be taken."""
    rule = broken_rule(situation, strategy, ignoring_version=ignoring_version)
    if rule is None:
        return None
    facts = _facts(situation, strategy)
    instead = rule.instead.format(**facts) if rule.instead else None
    return Refusal(rule=rule.name, reason=rule.reason.format(**facts), instead=instead, is_version=rule.is_version)


def broken_rule(situation: Situation, strategy: Strategy, *, ignoring_version: bool = False) -> Rule | None:
    """The first rule that `strategy` breaks, not yet in words."""
    pin = situation.job.pin
    for rule in RULES:
        if ignoring_version and rule.is_version:
            continue
        if rule.yields_to is not None and getattr(pin, rule.yields_to) == getattr(strategy, rule.yields_to):
            continue
        if rule.is_broken(situation, strategy):
            return rule
    return None


def _facts(situation: Situation, strategy: Strategy) -> dict[str, object]:
    axes = {axis: getattr(strategy, axis) for axis in ("sharding", "offload", "optimizer", "precision")}
    late = [(axis, member) for axis, member in _axes(situation, strategy) if version_that_trains(axis, member)]
    return {
        **axes,
        "pins": ", ".join(
            f"pin.{axis}: {getattr(situation.job.pin, axis)}" for axis in _differing(situation, strategy)
        ),
        "method": situation.method,
        "device": situation.device.name,
        "capability": capability_words(situation),
        "num_ranks": situation.num_ranks,
        "num_nodes": situation.hardware.num_nodes,
        "late": _words(late[0][1]) if late else "",
        "version": version_that_trains(*late[0]) if late else "",
    }


def capability_words(situation: Situation) -> str:
    """`V100-16GB has 7.0`, the other half of a sentence on compute capability."""
    capability = situation.device.compute_capability
    if situation.is_cpu:
        return f"{situation.device.name} is a CPU"
    return f"{situation.device.name} has " + (f"{capability[0]}.{capability[1]}" if capability else "an unknown one")


def _axes(situation: Situation, strategy: Strategy) -> Iterable[tuple[str, StrEnum | tuple[StrEnum, StrEnum]]]:
    yield "method", situation.method
    yield "sharding", strategy.sharding
    yield "offload", strategy.offload
    yield "precision", strategy.precision
    yield "optimizer", strategy.optimizer
    yield "sharding+precision", (strategy.sharding, strategy.precision)


def _words(member: StrEnum | tuple[StrEnum, StrEnum]) -> str:
    return " with ".join(member) if isinstance(member, tuple) else member


def _differing(situation: Situation, strategy: Strategy) -> list[str]:
    pin = situation.job.pin
    axes = ("sharding", "offload", "optimizer", "precision")
    pinned = [(axis, member) for axis in axes if (member := getattr(pin, axis)) is not None]
    return [axis for axis, member in pinned if member != getattr(strategy, axis)]


def _lacks(allowance: Allowance) -> Callable[[Situation], bool]:
    return lambda situation: allowance not in situation.job.allow


_needs_cpu_leave = _lacks(Allowance.OFFLOAD_CPU)
_needs_nvme_leave = _lacks(Allowance.OFFLOAD_NVME)
_needs_8bit_leave = _lacks(Allowance.OPTIMIZER_8BIT)
_needs_approx_leave = _lacks(Allowance.OPTIMIZER_APPROX)
_needs_bf16_leave = _lacks(Allowance.BF16_WEIGHTS)
_needs_fp8_leave = _lacks(Allowance.FP8)


def _capability_below(situation: Situation, least: tuple[int, int]) -> bool:
    return not situation.is_cpu and (situation.device.compute_capability or (0, 0)) < least


RULES: tuple[Rule, ...] = (
    Rule(
        name="pinned",
        is_broken=lambda s, row: bool(_differing(s, row)),
        reason="the job file says {pins}",
        instead="leave the pin out",
    ),
    # What cannot work.
    Rule(
        name="several_ranks_share_nothing",
        is_broken=lambda s, row: row.sharding is Sharding.NONE and s.num_ranks > 1,
        reason="{sharding} would train {num_ranks} different models on {num_ranks} ranks",
        instead="ddp, or --gpus 0 for one device",
    ),
    Rule(
        name="one_rank_has_no_peer",
        is_broken=lambda s, row: row.sharding is not Sharding.NONE and row.offload is Offload.NONE and s.num_ranks == 1,
        reason="{sharding} spreads state over ranks, and there is one",
        instead="none",
    ),
    Rule(
        name="hsdp_needs_nodes",
        is_broken=lambda s, row: row.sharding is Sharding.HSDP and s.hardware.num_nodes < 2,
        reason="hsdp shards inside a node and replicates across nodes; {num_nodes} node is fsdp",
        instead="fsdp",
    ),
    Rule(
        name="bf16_needs_ampere",
        is_broken=lambda s, row: row.precision in _BF16 and _capability_below(s, (8, 0)),
        reason="{precision} needs compute capability 8.0; {capability}",
        instead="fp16-mixed from compute capability 7.0, else fp32",
    ),
    Rule(
        name="fp16_needs_tensor_cores",
        is_broken=lambda s, row: row.precision is Precision.FP16_MIXED and not s.fast_fp16,
        reason="{precision} needs compute capability 7.0; {capability}",
        instead="fp32",
    ),
    Rule(
        name="fp8_needs_ada",
        is_broken=lambda s, row: row.precision is Precision.FP8 and (s.is_cpu or _capability_below(s, (8, 9))),
        reason="fp8 needs compute capability 8.9; {capability}",
        instead="bf16-mixed",
    ),
    Rule(
        name="fsdp_offload_needs_cuda",
        is_broken=lambda s, row: row.sharding is Sharding.FSDP and row.offload is not Offload.NONE and s.is_cpu,
        reason="FSDP2's offload to host RAM needs an accelerator; {device} is none",
        instead="fsdp",
    ),
    Rule(
        name="galore_inner_optimizer",
        is_broken=lambda s, row: s.method is Method.GALORE and row.optimizer not in _GALORE_INNER,
        reason="GaLore wraps adamw, adamw_8bit or adafactor, not {optimizer}",
        instead="adamw",
    ),
    Rule(
        name="galore_needs_whole_gradients",
        is_broken=lambda s, row: s.method is Method.GALORE and row.sharding not in (Sharding.NONE, Sharding.DDP),
        reason="GaLore projects whole gradient matrices; {sharding} leaves each rank a flat piece",
        instead="ddp, or lora",
    ),
    Rule(
        name="qlora_needs_whole_weights",
        is_broken=lambda s, row: s.method is Method.QLORA and row.sharding is Sharding.ZERO3,
        reason="ZeRO-3 partitions flat weights and cannot cut bitsandbytes' 4-bit blocks",
        instead="fsdp or zero2",
    ),
    Rule(
        name="frozen_base_has_no_update",
        is_broken=lambda s, row: (
            s.method.freezes_base and row.optimizer in (Optimizer.LOMO, Optimizer.ADALOMO, Optimizer.MUON)
        ),
        reason="{optimizer} is made for whole weights; {method} trains small adapters",
        instead="adamw_fused",
    ),
    # What comes with a later version.
    Rule(
        name="not_yet",
        is_broken=lambda s, row: any(version_that_trains(axis, member) for axis, member in _axes(s, row)),
        reason="{late} trains from shardwise {version} on",
        is_version=True,
    ),
    Rule(
        name="fp8_needs_transformer_engine",
        is_broken=lambda s, row: row.precision is Precision.FP8 and not s.has_library("transformer-engine"),
        reason="fp8 needs transformer-engine, which is not installed",
        instead="pip install shardwise[fp8]",
    ),
    # What the job does not allow.
    Rule(
        name="nvme_not_allowed",
        is_broken=lambda s, row: row.offload.uses_nvme and _needs_nvme_leave(s),
        reason="{offload} is slow and wears the disk; the job does not allow it",
        instead="allow: [offload_nvme]",
        yields_to="offload",
    ),
    Rule(
        name="nvme_needs_a_path",
        is_broken=lambda s, row: row.offload.uses_nvme and s.job.limits.nvme.path is None,
        reason="{offload} needs a folder on a local disk",
        instead="limits.nvme.path",
    ),
    Rule(
        name="cpu_offload_not_allowed",
        is_broken=lambda s, row: row.offload is not Offload.NONE and not row.offload.uses_nvme and _needs_cpu_leave(s),
        reason="{offload} keeps state in host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        yields_to="offload",
    ),
    Rule(
        name="host_ram_unknown",
        is_broken=lambda s, row: row.offload is not Offload.NONE and not s.is_cpu and s.host_ram_bytes is None,
        reason="host RAM is unknown",
        instead="give limits.host_ram",
    ),
    Rule(
        name="paged_not_allowed",
        is_broken=lambda s, row: row.optimizer in PAGED and _needs_cpu_leave(s),
        reason="{optimizer} pages its state to host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        yields_to="optimizer",
    ),
    Rule(
        name="8bit_not_allowed",
        is_broken=lambda s, row: row.optimizer in _BITS_8 and _needs_8bit_leave(s),
        reason="{optimizer} keeps 8-bit state, which changes the update; the job does not allow it",
        instead="allow: [optimizer_8bit]",
        yields_to="optimizer",
    ),
    Rule(
        name="approximation_not_allowed",
        is_broken=lambda s, row: row.optimizer in _APPROXIMATE and _needs_approx_leave(s),
        reason="{optimizer} is not AdamW; the job does not allow another update",
        instead="allow: [optimizer_approx]",
        yields_to="optimizer",
    ),
    Rule(
        name="sgd_is_never_chosen",
        is_broken=lambda s, row: row.optimizer is Optimizer.SGD,
        reason="{optimizer} trains transformers poorly and needs its own learning rate",
        instead="pin.optimizer: sgd",
        yields_to="optimizer",
    ),
    Rule(
        name="bf16_weights_not_allowed",
        is_broken=lambda s, row: row.precision is Precision.BF16 and _needs_bf16_leave(s),
        reason="{precision} keeps no fp32 master weights and loses small updates; the job does not allow it",
        instead="allow: [bf16_weights]",
        yields_to="precision",
    ),
    Rule(
        name="fp8_not_allowed",
        is_broken=lambda s, row: row.precision is Precision.FP8 and _needs_fp8_leave(s),
        reason="{precision} rounds the inputs of matrix products; the job does not allow it",
        instead="allow: [fp8]",
        yields_to="precision",
    ),
    # What would only be slower.
    Rule(
        name="offload_to_itself",
        is_broken=lambda s, row: s.is_cpu and (row.offload is not Offload.NONE or row.optimizer in PAGED),
        reason="host RAM is where everything lives already: the device is the CPU",
        instead="no offload",
        yields_to="offload",
    ),
    Rule(
        name="bf16_is_slow_here",
        is_broken=lambda s, row: s.is_cpu and row.precision in _BF16 and not s.fast_bf16,
        reason="{precision} would be slower than fp32: {device} has no amx_bf16",
        instead="fp32, or pin it",
        yields_to="precision",
    ),
    Rule(
        name="bf16_needs_no_scaler",
        is_broken=lambda s, row: row.precision is Precision.FP16_MIXED and s.fast_bf16,
        reason="{precision} needs loss scaling, and bf16-mixed is as fast here",
        instead="bf16-mixed, or pin it",
        yields_to="precision",
    ),
    Rule(
        name="fp32_is_slow_here",
        is_broken=lambda s, row: row.precision is Precision.FP32 and s.fast_bf16,
        reason="{precision} is slower here than bf16-mixed, which keeps the same fp32 master weights",
        instead="bf16-mixed, or pin it",
        yields_to="precision",
    ),
)
