"""Rules against strategies that could run, but that the job does not allow or that would only be slower, in order.

First what the job does not allow or does not give, then what would only be slower. What cannot work at all stands in
`incompatible_rows` and `incompatible_settings`.
"""

from collections.abc import Callable
from enum import StrEnum

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.incompatible_rows import BF16
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.strategy import Offload, Precision, Strategy
from shardwise.trainer.spec.value import Value


class Kind(StrEnum):
    """Why a rule is there."""

    PIN = "pin"  # the job file says so
    INCOMPATIBLE = "incompatible"
    NEED = "need"  # something that can be installed or given
    LEAVE = "leave"  # an entry of `allow` would lift it
    SLOWER = "slower"


class Rule(Value, frozen=True, kw_only=True):
    """A reason not to take a row; `reason` is filled with the facts of the context and the row."""

    name: str
    kind: Kind
    is_broken: Callable[[PlanningContext, Strategy], bool]
    reason: str
    evidence: str
    instead: str | None = None
    yields_to: str | None = None  # the pin that overrides it

    @property
    def asks_leave(self) -> bool:
        """True if an entry of `allow` would lift the rule."""
        return self.kind is Kind.LEAVE


def _lacks(allowance: Allowance) -> Callable[[PlanningContext], bool]:
    return lambda context: allowance not in context.job.allow


_needs_cpu_leave = _lacks(Allowance.OFFLOAD_CPU)
_needs_nvme_leave = _lacks(Allowance.OFFLOAD_NVME)
_needs_8bit_leave = _lacks(Allowance.OPTIMIZER_8BIT)
_needs_approx_leave = _lacks(Allowance.OPTIMIZER_APPROX)
_needs_bf16_leave = _lacks(Allowance.BF16_WEIGHTS)
_needs_fp8_leave = _lacks(Allowance.FP8)


OF_THE_JOB: tuple[Rule, ...] = (
    # What the job does not allow.
    Rule(
        name="nvme_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.offload.uses_nvme and _needs_nvme_leave(s),
        reason="{offload} is slow and wears the disk; the job does not allow it",
        instead="allow: [offload_nvme]",
        yields_to="offload",
        evidence="every step reads and writes the whole state, 12 bytes a parameter; disks have a write limit",
    ),
    Rule(
        name="nvme_needs_a_path",
        kind=Kind.NEED,
        is_broken=lambda s, row: row.offload.uses_nvme and s.job.limits.nvme.path is None,
        reason="{offload} needs a folder on a local disk",
        instead="limits.nvme.path",
        evidence="DeepSpeed 0.19.8, zero/offload_config.py: nvme_path",
    ),
    Rule(
        name="cpu_offload_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.offload is not Offload.NONE and not row.offload.uses_nvme and _needs_cpu_leave(s),
        reason="{offload} keeps state in host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        yields_to="offload",
        evidence="a job may share its host with others",
    ),
    Rule(
        name="host_ram_unknown",
        kind=Kind.NEED,
        is_broken=lambda s, row: row.offload is not Offload.NONE and not s.is_cpu and s.host_ram_bytes is None,
        reason="host RAM is unknown",
        instead="give limits.host_ram",
        evidence="a machine of the catalogue has no host",
    ),
    Rule(
        name="paged_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.optimizer.facts.is_paged and _needs_cpu_leave(s),
        reason="{optimizer} pages its state to host RAM, which the job does not allow",
        instead="allow: [offload_cpu]",
        yields_to="optimizer",
        evidence="QLoRA, arXiv:2305.14314, section 3: paged optimizers in unified memory",
    ),
    Rule(
        name="8bit_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.optimizer.facts.is_8bit and _needs_8bit_leave(s),
        reason="{optimizer} keeps 8-bit state, which changes the update; the job does not allow it",
        instead="allow: [optimizer_8bit]",
        yields_to="optimizer",
        evidence="arXiv:2110.02861: state is quantised in blocks, a value is off by up to half a step",
    ),
    Rule(
        name="approximation_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.optimizer.facts.changes_update and _needs_approx_leave(s),
        reason="{optimizer} is not AdamW; the job does not allow another update",
        instead="allow: [optimizer_approx]",
        yields_to="optimizer",
        evidence="each has an update rule and a learning rate of its own (docs/techniques.md, 13)",
    ),
    Rule(
        name="sgd_is_never_chosen",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.optimizer.facts.is_chosen_by_pin_only,
        reason="{optimizer} trains transformers poorly and needs its own learning rate",
        instead="pin.optimizer: sgd",
        yields_to="optimizer",
        evidence="arXiv:1912.03194 and arXiv:2402.19449: its gap to Adam on attention models and on rare tokens",
    ),
    Rule(
        name="bf16_weights_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.precision is Precision.BF16 and _needs_bf16_leave(s),
        reason="{precision} keeps no fp32 master weights and loses small updates; the job does not allow it",
        instead="allow: [bf16_weights]",
        yields_to="precision",
        evidence="bf16 has 8 significant bits: an update below 1/512 of a weight rounds away (arXiv:2010.06192)",
    ),
    Rule(
        name="fp8_not_allowed",
        kind=Kind.LEAVE,
        is_broken=lambda s, row: row.precision is Precision.FP8 and _needs_fp8_leave(s),
        reason="{precision} rounds the inputs of matrix products; the job does not allow it",
        instead="allow: [fp8]",
        yields_to="precision",
        evidence="arXiv:2209.05433: E4M3 has 4 significant bits, E5M2 has 3",
    ),
    # What would only be slower.
    Rule(
        name="fp8_does_not_pay",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP8 and s.fp8_gain is not None and not s.fp8_gain.pays,
        reason="{precision} {fp8_words}",
        instead="bf16-mixed, or pin it",
        yields_to="precision",
        evidence="timed on this GPU: forward and backward of the model's own linear layers, casts included",
    ),
    Rule(
        name="offload_to_itself",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.offload is not Offload.NONE,
        reason="the device is the CPU, so everything is in host RAM already",
        instead="no offload",
        yields_to="offload",
        evidence="state of a CPU rank is in host RAM",
    ),
    Rule(
        name="paged_to_itself",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.optimizer.facts.is_paged,
        reason="{optimizer} pages nothing: the device is the CPU",
        instead="the same optimizer unpaged",
        yields_to="optimizer",
        evidence="bitsandbytes 0.50 takes managed memory from CUDA; on a CPU its paged state is plain",
    ),
    Rule(
        name="bf16_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.precision in BF16 and not s.fast_bf16,
        reason="{precision} would be slower than fp32: {device} has no amx_bf16",
        instead="fp32, or pin it",
        yields_to="precision",
        evidence="oneDNN computes bf16 products natively with avx512_bf16 or AMX, AMX at far more than fp32's rate",
    ),
    Rule(
        name="fp16_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: s.is_cpu and row.precision is Precision.FP16_MIXED,
        reason="{precision} would be slower than fp32: {device} is a CPU",
        instead="fp32, or pin it",
        yields_to="precision",
        evidence="products of fp16 are computed in fp32 there, and the loss is scaled on top",
    ),
    Rule(
        name="bf16_needs_no_scaler",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP16_MIXED and s.fast_bf16,
        reason="{precision} needs loss scaling, and bf16-mixed is as fast here",
        instead="bf16-mixed, or pin it",
        yields_to="precision",
        evidence="bf16 has fp32's range (arXiv:1905.12322), and both have one datasheet rate (gpu_specs.py)",
    ),
    Rule(
        name="fp32_is_slow_here",
        kind=Kind.SLOWER,
        is_broken=lambda s, row: row.precision is Precision.FP32 and s.fast_bf16,
        reason="{precision} is slower here than bf16-mixed, which keeps the same fp32 master weights",
        instead="bf16-mixed, or pin it",
        yields_to="precision",
        evidence="datasheets: tensor cores multiply bf16 at 2 to 16 times the rate of fp32 (gpu_specs.py)",
    ),
)
