"""Recommendations to make a run faster, from its plan, its report and its steps. Pure.

Each recommendation is a sentence with its gain, as "times as fast". Gains of settings are predictions over the
prediction of what ran, by the planner's own search without the pins on mechanisms. Gains from lost time are all of that
time, an upper bound. Gains below 5 % are omitted, and so is everything that was not measured.

Unused memory is what the measured peak left free. A recommended configuration fits by the measurement and by the
prediction, which the next plan uses. After an out of memory no other configuration is recommended: the prediction was
wrong, and its best configuration may be the one that failed.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import rates_source
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.certainty import usual_error
from shardwise.trainer.planning.search.choice import survey
from shardwise.trainer.planning.search.configurations import best_candidate
from shardwise.trainer.planning.search.packages import missing_packages
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.messages.rank_files import saving_choice
from shardwise.trainer.spec.plan import Candidate, Plan, RatesSource
from shardwise.trainer.spec.report import Report, busy_cores
from shardwise.trainer.spec.units import format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

LEAST_GAIN = 1.05
MAX_RECOMMENDATIONS = 5
MAX_SAVING_SHARE = 0.01  # of the time, that a longer interval aims at
LEAST_SAVES = 3  # of fewer, the last one weighs too much
_FREED = (
    "sharding", "shard_group", "offload", "activation_offload", "checkpointing", "checkpointing_n", "loss",
    "micro_batch", "reduce_every_micro_batch", "embedding_on_host", "prefetch_two_blocks",
    "fused_adapters", "compiled_head",
)  # fmt: skip
_SETTINGS = ("micro_batch", "checkpointing", "loss", "activation_offload")


class Observed(Value, frozen=True, kw_only=True):
    """Summary of the steps of a run; shares are of the time of a step, None if not measured."""

    data_share: float | None = None
    wait_share: float | None = None
    saving_share: float | None = None  # of steps and saves together
    num_saves: int = 0
    padding_share: float | None = None  # of the positions that went through the model
    num_steps: int = 0  # that were run, skipped ones too
    num_skipped: int = 0  # for a loss or gradients that were not finite or a spike; not for an fp16 overflow
    idle_share: float | None = None  # of the time: the GPU ran no kernel
    throttle: str | None = None  # reason for reduced clocks
    throttled_slowdown: float | None = None  # a step with reduced clocks over a step at other times


class Recommendation(Value, frozen=True, kw_only=True):
    """One sentence, and how many times as fast the run would be; None if it gains no speed."""

    text: str
    gain: float | None


def recommendations(plan: Plan, report: Report, observed: Observed) -> tuple[Recommendation, ...]:
    """At most five: first what makes the others meaningless, then the one that gains most."""
    context = context_of(plan)
    found = [each for find in _FINDERS for each in find(context, plan, report, observed)]
    worth = [each for each in found if each.gain is None or each.gain >= LEAST_GAIN]
    ordered = sorted(worth, key=lambda each: -(each.gain or 0.0))
    return (*_first(report), *ordered)[:MAX_RECOMMENDATIONS]


def _first(report: Report) -> Iterator[Recommendation]:
    """Advice that comes before speed: the model has learned nothing, or other programs distorted the measurements."""
    last = report.evaluations[-1] if report.evaluations else None
    if last is not None and last.unigram_entropy_nats is not None and last.loss > last.unigram_entropy_nats:
        text = (
            f"the held-out loss {last.loss:.4f} is above {last.unigram_entropy_nats:.4f}, what guessing by frequency "
            "gives: the model has not learned yet; more steps, another train.lr, or a look at the data"
        )
        yield Recommendation(text=text, gain=None)
    if (busy := busy_cores(report)) is not None:
        yield Recommendation(text=f"{busy}; measure again on an idle machine", gain=None)


def unused_bytes(report: Report) -> int | None:
    """Bytes of usable device memory above the measured peak; None if no peak was measured."""
    memory, measured = report.plan.memory, report.measured.memory.peak_allocated_bytes
    return None if measured is None else memory.usable_bytes - _measured_need(report, measured)


def _measured_need(report: Report, measured: int) -> int:
    """The predicted need, corrected by the error of the peak."""
    memory = report.plan.memory
    return memory.need_bytes + measured - memory.peak_allocated_bytes


def _configurations(context: PlanningContext, plan: Plan, report: Report, _: Observed) -> Iterator[Recommendation]:
    """A better configuration of the same strategy, or a better strategy."""
    unused, ran = unused_bytes(report), report.plan
    if unused is None or unused <= 0 or any(each.fault and each.fault.is_memory for each in report.history):
        return
    pins = plan.job.pin
    freed = replace(plan.job, pin=replace(pins, **dict.fromkeys(_FREED)))
    usable = min(ran.memory.usable_bytes, ran.memory.need_bytes + unused)  # less by what the peak was above
    free = replace(context, job=freed, device=replace(context.device, usable_bytes=usable))
    room = best_candidate(free, ran.strategy)
    best = next(iter(survey(free).candidates), None)
    gain = 0.0 if room is None else _gain(ran, room)
    if room is not None:
        named, given = _changes(ran, room)
        text = f"{format_bytes(unused)} unused: {named} is predicted {gain:.2f}x ({given})"
        yield Recommendation(text=text, gain=gain if named else 0.0)
    if best is None or best.strategy.layout == ran.strategy.layout or _gain(ran, best) < LEAST_GAIN * gain:
        return
    effect = "exact and " if best.is_exact else ""
    held = [name for name in _FREED if getattr(pins, name) is not None]
    how = f"remove {' and '.join(f'pin.{name}' for name in held)}" if held else "it is what a plan without --take has"
    text = (
        f"{best.strategy.name}, micro batch {best.micro_batch}, is {effect}predicted {_gain(ran, best):.2f}x, and "
        f"needs {format_bytes(best.memory.need_bytes)} of {format_bytes(ran.memory.usable_bytes)} ({how})"
    )
    yield Recommendation(text=text, gain=_gain(ran, best))


def _gain(ran: Candidate, other: Candidate) -> float:
    return ran.speed.step_s / other.speed.step_s


def _changes(ran: Candidate, other: Candidate) -> tuple[str, str]:
    """`micro batch 8, checkpointing none`, and the same as key=value."""
    differing = [name for name in _SETTINGS if getattr(ran, name) != getattr(other, name)]
    named = [f"{name.replace('_', ' ')} {_word(getattr(other, name))}" for name in differing]
    given = [f"pin.{name}={_word(getattr(other, name))}" for name in differing]
    return ", ".join(named), " ".join(given)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lost_time(_: PlanningContext, plan: Plan, __: Report, observed: Observed) -> Iterator[Recommendation]:
    """Reading of data, waiting for the slowest rank, padding (pairs cannot be packed) and skipped steps."""
    faster = "rows on a faster disk (XDG_CACHE_HOME)"
    if plan.data.is_stream:
        faster = "rows that were prepared before (data.streaming=false)"
    can_pack = not plan.data.is_packed and SHAPES[plan.data.format].rows_per_example == 1
    can_pack = can_pack and plan.model_shape.packing_obstacle is None
    skipped = observed.num_skipped / observed.num_steps if 0 < observed.num_skipped < observed.num_steps else None
    waits = "of a step is waiting for the slowest rank: even ranks would give up to"
    lower = f"{observed.num_skipped} of {observed.num_steps} steps were skipped: a train.lr below {plan.schedule.lr:g}"
    for share, text in (
        (observed.data_share, f"{{:.0%}} of a step is reading data: {faster} would give up to {{:.2f}}x"),
        (observed.wait_share, f"{{:.0%}} {waits} {{:.2f}}x"),
        (
            observed.padding_share if can_pack else None,
            "{:.0%} of the positions are padding: data.packing=true is predicted {:.2f}x",
        ),
        (skipped, f"{lower} that skips none would give {{1:.2f}}x"),
    ):
        if share is not None:
            yield Recommendation(text=text.format(share, _without(share)), gain=_without(share))


def _saving(_: PlanningContext, plan: Plan, report: Report, observed: Observed) -> Iterator[Recommendation]:
    if observed.saving_share is None or observed.num_saves < LEAST_SAVES:
        return
    share, schedule = observed.saving_share, plan.schedule
    aimed = min(share, MAX_SAVING_SHARE)
    gain = (1 - aimed) / (1 - share) if share < 1 else 1.0
    factor = share * (1 - aimed) / (aimed * (1 - share)) if 0 < share < 1 else 1.0
    changes = []
    if schedule.checkpoint_every_steps is not None:
        changes.append(f'"checkpoint.every={max(1, round(schedule.checkpoint_every_steps * factor))} steps"')
    elif schedule.checkpoint_every_s is not None:
        changes.append(f'"checkpoint.every={max(1, round(schedule.checkpoint_every_s * factor / 60))} min"')
    in_background = replace(plan.job, checkpoint=replace(plan.job.checkpoint, is_async=True))
    is_background = saving_choice(plan.job, plan.hardware, report.plan).is_background
    if not is_background and saving_choice(in_background, plan.hardware, report.plan).is_background:
        changes.append("checkpoint.async=true")
    if changes:
        text = f"saving takes {share:.0%} of the time: {' or '.join(changes)} would give {gain:.2f}x"
        yield Recommendation(text=text, gain=gain)


def _host(_: PlanningContext, plan: Plan, report: Report, observed: Observed) -> Iterator[Recommendation]:
    """Time in which the GPU waits for the host to start its kernels, without the wait for data.

    The sample of a profiler is preferred to NVML's counter, which misses gaps between kernels. A sampled step has no
    wait for other ranks: they wait before it, or in a collective.
    """
    sampled = report.device_time
    if sampled is None and observed.idle_share is None:
        return
    waited = observed.data_share or 0.0
    waited += 0.0 if sampled is not None else observed.wait_share or 0.0
    idle = max(0.0, (observed.idle_share or 0.0) - waited if sampled is None else sampled.idle_share - waited)
    gain = _without(idle)
    change = "a larger micro batch" if report.plan.compile else "a larger micro batch or pin.compile=true"
    text = f"the GPU ran nothing {idle:.0%} of the time, waiting for the host: {change} would give up to {gain:.2f}x"
    yield Recommendation(text=text, gain=gain)


def _packages(context: PlanningContext, _: Plan, report: Report, __: Observed) -> Iterator[Recommendation]:
    """Packages with kernels that were missing."""
    for package in missing_packages(context, report.plan):
        yield Recommendation(text=package.text, gain=package.gain)


def _graph_breaks(_: PlanningContext, __: Plan, report: Report, ___: Observed) -> Iterator[Recommendation]:
    breaks = {} if report.verified is None else report.verified.graph_breaks
    if not breaks:
        return
    reason, count = next(iter(breaks.items()))
    total = sum(breaks.values())
    text = (
        f"torch.compile has {total} graph break{'s' if total > 1 else ''} in the blocks ({count}: {reason}): what lies "
        "between the graphs runs eagerly; TORCH_LOGS=graph_breaks shows where, pin.compile=false runs without"
    )
    yield Recommendation(text=text, gain=None)


def _throttling(_: PlanningContext, __: Plan, ___: Report, observed: Observed) -> Iterator[Recommendation]:
    if observed.throttle is None or observed.throttled_slowdown is None:
        return
    gain = observed.throttled_slowdown
    text = f"clocks were held down ({observed.throttle}): a step took {gain:.2f}x the time meanwhile"
    yield Recommendation(text=text, gain=gain)


def _prediction(context: PlanningContext, plan: Plan, report: Report, _: Observed) -> Iterator[Recommendation]:
    """Measurement of the machine's ceilings, if datasheets or assumptions were far off."""
    expected, found = report.predicted.speed.step_s, report.measured.speed.step_s
    if not expected or not found or rates_source(plan.hardware) is RatesSource.MEASURED:
        return
    if busy_cores(report) is not None:
        return
    off = max(expected, found) / min(expected, found)
    usual = usual_error(context.device, has_experts=context.shape.num_experts > 1)
    if usual is None or off > 1 + usual:
        text = (
            f"a step took {format_seconds(found)}, predicted were {format_seconds(expected)}: shardwise probe "
            "--measure -o hardware.json finds what this machine can do, shardwise plan --hardware hardware.json what "
            "follows from it"
        )
        yield Recommendation(text=text, gain=None)


def _without(share: float) -> float:
    """Times as fast without this share of the time."""
    return 1 / (1 - share) if share < 1 else 1.0


_FINDERS = (_configurations, _lost_time, _saving, _host, _packages, _graph_breaks, _throttling, _prediction)
