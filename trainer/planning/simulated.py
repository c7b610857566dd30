"""Plans that are checked by a dry run: device memory from its live bytes, and the candidate that is chosen then.

A dry run counts live tensors. The rest is predicted as by the closed form: the workspaces of the matrix library, the
margin of each event, memory outside the allocator. Margins are shares of terms of an event (logits, saved activations),
which are the closed form's.
"""

from collections.abc import Container, Mapping, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import at_longest, candidate_of, configuration_of
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.memory import OVERHEADS, StepBytes, host_in_pool, on_device, overheads, step_memory
from shardwise.trainer.planning.memory.events import StepMemory, resident_bytes, step_events
from shardwise.trainer.planning.planner import context_of, schedule_with
from shardwise.trainer.planning.reasons import notes, reasons
from shardwise.trainer.planning.schedule import longest_width
from shardwise.trainer.planning.search.fallbacks import fallbacks
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.messages.worker_requests import Simulation
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, Plan, Rejection
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Method, Precision
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

# Events of a dry run that lie between two of the closed form's count with the one before.
_BETWEEN = {"block_backward_middle": "block_backward_top", "clip": "optimizer_step"}
_WORKSPACE = "workspace"


class Simulated(Value, frozen=True, kw_only=True):
    """A candidate with the memory of its dry run."""

    candidate: Candidate
    memory: MemoryEstimate

    @property
    def text(self) -> str:
        """`none+adamw, micro batch 2, needs 9.1 GiB by its dry run`."""
        candidate = self.candidate
        need = format_bytes(self.memory.need_bytes)
        return f"{candidate.strategy.name}, micro batch {candidate.micro_batch}, needs {need} by its dry run"


def obstacle_to_dry_run(candidate: Candidate, shape: ModelShape, *, is_cpu: bool) -> str | None:
    """Why a candidate has no dry run, or None if it has one."""
    strategy = candidate.strategy
    refusals = (
        (strategy.sharding.uses_deepspeed, f"{strategy.sharding} (DeepSpeed)"),
        (strategy.offload is not Offload.NONE, f"offload {strategy.offload}"),
        (strategy.precision is Precision.FP8, "fp8"),
        (candidate.method is Method.GALORE, "galore"),
        (candidate.method is Method.QLORA and strategy.sharding.uses_fsdp, f"qlora under {strategy.sharding}"),
        (is_cpu and not strategy.sharding.facts.is_one_rank, f"{strategy.sharding} on CPU devices"),
        (candidate.optimizer_in_backward, "optimizer_in_backward"),
        (candidate.checkpointing is Checkpointing.SELECTIVE, "checkpointing selective"),
        (
            candidate.attention is Attention.FLASH and Attention.SDPA not in shape.attentions,
            f"flash-attn for {shape.model_type}",
        ),
        (candidate.checkpointing is Checkpointing.EVERY_N, "checkpointing every_n"),
    )
    return next((f"{what} has no dry run" for is_so, what in refusals if is_so), None)


def longest_row(plan: Plan, candidate: Candidate) -> int:
    """Tokens of the longest row that a step of this data can have."""
    return longest_width(plan.data, seq_len=candidate.seq_len)


def simulated_memory(context: PlanningContext, candidate: Candidate, simulation: Simulation) -> MemoryEstimate:
    """Device memory needed for the bytes of a dry run."""
    step = _step_of(context, candidate)
    resident = resident_bytes(step)
    workspace = resident.get(_WORKSPACE, 0)
    predicted = step_events(step, resident)
    totals = {
        name: size + (workspace if name != "load" else 0)
        for name, size in named_events(simulation.events, predicted).items()
    }
    parts = {name: totals.get(name, 0) for name in predicted}
    held = StepBytes(
        policy=step.policy,
        sharding=candidate.strategy.sharding,
        device=context.device,
        num_ranks=candidate.num_ranks,
        events={**{name: {} for name in totals}, **predicted},
        totals=parts | totals,
        steady=simulation.steady_allocated_bytes + workspace + step.sharding.root,
        host=host_in_pool(step, context.device),
    )
    around = overheads(held, OVERHEADS)
    outside = around.device - around.reserved
    peak = simulation.peak_allocated_bytes + workspace
    reserved = around.reserved
    if not context.is_cpu:
        room = context.device.usable_bytes - outside
        most = workspace + simulation.reserved_bytes(is_expandable=context.hardware.can_expand_segments)
        reserved = max(peak, min(most, room))  # near a full device the allocator frees unused segments
    return replace(
        candidate.memory,
        parts={**simulation.parts, **({_WORKSPACE: workspace} if workspace else {})},
        peak_event=next(iter(named_events({simulation.peak_event: 0}, predicted))),
        events=totals,
        steady_allocated_bytes=simulation.steady_allocated_bytes + workspace,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        device_bytes=on_device(reserved + outside, step.states.managed, context.device),
        low_bytes=around.low,
        high_bytes=max(reserved, around.high),
        need_bytes=around.need,
        usable_bytes=context.device.usable_bytes,
    )


_FIGURES = (
    "peak_allocated_bytes", "steady_allocated_bytes", "peak_reserved_bytes", "device_bytes", "low_bytes", "high_bytes",
    "need_bytes",
)  # fmt: skip


def eager_candidate(context: PlanningContext, candidate: Candidate) -> Candidate:
    """The candidate whose step a dry run executes: nothing is compiled in it."""
    if not candidate.compile:
        return candidate
    return candidate_of(context, replace(configuration_of(context, candidate), compile=False))


def compiled_memory(simulated: MemoryEstimate, eager: MemoryEstimate, compiled: MemoryEstimate) -> MemoryEstimate:
    """Memory of a compiled candidate: of its eager dry run, less the difference of its two closed forms."""
    shifted = {name: getattr(simulated, name) - getattr(eager, name) + getattr(compiled, name) for name in _FIGURES}
    largest = max(simulated.parts, key=simulated.parts.__getitem__)
    saved = simulated.peak_allocated_bytes - shifted["peak_allocated_bytes"]
    events = {
        name: size - eager.events.get(name, 0) + compiled.events.get(name, eager.events.get(name, 0))
        for name, size in simulated.events.items()
    }
    return replace(
        simulated, parts=simulated.parts | {largest: simulated.parts[largest] - saved}, events=events, **shifted
    )


def plan_of_simulated(plan: Plan, taken: Simulated, failed: Sequence[Simulated]) -> Plan:
    """The plan with a candidate whose dry run fits, after others whose dry runs did not.

    For a model that has neither a closed form nor a trace the memory of the chosen candidate is that of the dry run.
    """
    lacks_form = not plan.model_shape.has_form
    chosen = replace(taken.candidate, memory=taken.memory) if lacks_form else taken.candidate
    remarks = [f"not chosen: {each.text}; {format_bytes(each.memory.usable_bytes)} are usable" for each in failed]
    remarks += _described_notes(plan) if lacks_form else []
    if taken.candidate == plan.chosen:
        return replace(plan, candidates=(chosen, *plan.candidates[1:]), notes=(*plan.notes, *remarks))
    context = context_of(plan)
    tried = [each.candidate for each in failed]
    others = tuple(other for other in plan.candidates if other not in tried and other != taken.candidate)
    candidates = (replace(chosen, reasons=reasons(context, chosen)), *others)
    names = {candidate.strategy.name for candidate in candidates}
    return replace(
        plan,
        schedule=schedule_with(chosen, context, plan.data),
        candidates=candidates,
        rejections=(*plan.rejections, *(_rejection(each) for each in failed if _name(each) not in names)),
        fallbacks=_fallbacks_after(plan, context, taken.candidate, candidates),
        notes=(*notes(context, plan.data, plan.trials, candidates), *remarks),
    )


def _step_of(context: PlanningContext, candidate: Candidate) -> StepMemory:
    """The closed form of the candidate's step."""
    configuration = at_longest(context, configuration_of(context, candidate))
    return step_memory(context.shape, configuration, context.device)


def named_events(events: Mapping[str, int], predicted: Container[str]) -> dict[str, int]:
    """The events of a dry run under the names of the closed form; those between two of them count as the first."""
    named: dict[str, int] = {}
    for event, num_bytes in events.items():
        name = event if event in predicted else _BETWEEN.get(event, event)
        named[name] = max(named.get(name, 0), num_bytes)
    return named


def _described_notes(plan: Plan) -> list[str]:
    return [
        f"{plan.model_shape.model_type} has no closed form, and was not traced: the memory of the chosen candidate is "
        "that of its dry run; its time, the fallbacks and the other candidates are estimates for a model of these sizes"
    ]


def _name(simulated: Simulated) -> str:
    return simulated.candidate.strategy.name


def _rejection(failed: Simulated) -> Rejection:
    usable = format_bytes(failed.memory.usable_bytes)
    return Rejection(
        strategy=_name(failed),
        reason=f"needs {format_bytes(failed.memory.need_bytes)} by its dry run; {usable} are usable",
    )


def _fallbacks_after(
    plan: Plan, context: PlanningContext, taken: Candidate, candidates: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """The remaining fallbacks of the plan if one of them was chosen, else those of another candidate."""
    if taken in plan.fallbacks:
        return plan.fallbacks[plan.fallbacks.index(taken) + 1 :]
    return fallbacks(context, candidates)
