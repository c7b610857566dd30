"""From a configuration to a candidate and back: a candidate is a configuration with its predicted memory and speed.

The closed forms are combined here with this data and this device: padded rows need memory for the longest and time for
the average, and both figures are corrected by the measurements of earlier runs.

Budgets besides device memory are host RAM, pinned memory, NVMe, hours and money. `excess` returns the first one that a
candidate exceeds, with both numbers and the setting that would lift the limit.

Energy is that of the boards at their power limit for the whole run: board watts x GPUs x hours, at a PUE of 1 (no
cooling, no losses), the host not counted. A run that waits for memory or a network needs less.
"""

import math
from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import corrected_memory, corrected_speed
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.memory import (
    estimate_memory,
    host_need,
    least_bytes,
    managed_bytes,
    needed_bytes,
    state_need,
)
from shardwise.trainer.planning.schedule import longest_width, mean_width, row_policy
from shardwise.trainer.planning.speed.files import export_seconds, saving_seconds
from shardwise.trainer.planning.speed.step import compile_seconds, estimate_speed, evaluation_seconds, step_seconds
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import Host
from shardwise.trainer.spec.host_ram import ram_for, usable_ram
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, SpeedEstimate
from shardwise.trainer.spec.report import TimePart
from shardwise.trainer.spec.units import GIB, format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

_SHARED_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(Configuration) if field.name in Candidate.__struct_fields__
)


def candidate_of(context: PlanningContext, configuration: Configuration) -> Candidate:
    """A configuration with its predicted memory and speed."""
    return Candidate(
        **{name: getattr(configuration, name) for name in _SHARED_FIELDS},
        memory=predicted_memory(context, configuration),
        speed=_of_rows_with_data(context, configuration, predicted_speed(context, configuration)),
    )


def _of_rows_with_data(context: PlanningContext, configuration: Configuration, speed: SpeedEstimate) -> SpeedEstimate:
    """The speed without rows of a step that are empty, because the global batch does not divide evenly."""
    num_rows = configuration.num_ranks * configuration.micro_batch * configuration.accumulation
    share = min(1.0, context.schedule.sequences_per_step / num_rows)
    if share == 1:
        return speed
    mfu = None if speed.mfu is None else share * speed.mfu
    return replace(speed, tokens_per_s_per_gpu=share * speed.tokens_per_s_per_gpu, mfu=mfu)


def predicted_memory(context: PlanningContext, configuration: Configuration) -> MemoryEstimate:
    """Bytes at the worst event of a step whose micro batch has the longest row."""
    memory = estimate_memory(context.shape, at_longest(context, configuration), context.device)
    return corrected_memory(memory, context.corrections.of(configuration.strategy, configuration.method))


def predicted_need(context: PlanningContext, configuration: Configuration) -> int:
    """`need_bytes` of `predicted_memory`, faster if no run corrects it."""
    if _is_corrected(context, configuration):
        return predicted_memory(context, configuration).need_bytes
    return needed_bytes(context.shape, at_longest(context, configuration), context.device)


def need_floor(context: PlanningContext, start: Configuration) -> Callable[[Configuration], int]:
    """A lower bound of `predicted_need` for configurations that differ from `start` in micro batch and loss head only.

    0 if runs correct it.
    """
    if _is_corrected(context, start):
        return lambda _: 0
    least = least_bytes(context.shape, at_longest(context, start), context.device)
    return lambda configuration: least(configuration.micro_batch, configuration.accumulation)


def least_needy(
    context: PlanningContext, configurations: Iterable[Configuration], is_allowed: Callable[[Configuration], bool]
) -> Configuration:
    """The first of the allowed configurations with the least `predicted_need`: all of one strategy, one allowed."""
    left = iter(configurations)
    found = next(filter(is_allowed, left))
    least = predicted_need(context, found)
    floors: dict[object, Callable[[Configuration], int]] = {}
    needs: dict[object, int] = {}  # their floors, the same for every loss head
    for configuration in left:
        retained = _RETAINED(configuration)
        size = retained, configuration.micro_batch
        if retained not in floors:
            floors[retained] = need_floor(context, configuration)
        if size not in needs:
            needs[size] = floors[retained](configuration)
        if needs[size] >= least or not is_allowed(configuration):
            continue
        if (need := predicted_need(context, configuration)) < least:
            least, found = need, configuration
    return found


# What decides the activations that a strategy retains for a micro batch.
_RETAINED = attrgetter("checkpointing", "compile", "fused_kernels", "activation_offload", "shard_group",
                       "reduce_every_micro_batch", "embedding_on_host")  # fmt: skip


def never_fits(context: PlanningContext, configuration: Configuration) -> bool:
    """True if a step exceeds the device even without activations."""
    return least_step_need(context, configuration) > context.device.usable_bytes


def least_step_need(context: PlanningContext, configuration: Configuration) -> int:
    """A lower bound of `predicted_need`, without activations; 0 if runs correct it."""
    if _is_corrected(context, configuration):
        return 0
    return state_need(context.shape, configuration, context.device)


def _is_corrected(context: PlanningContext, configuration: Configuration) -> bool:
    return bool(context.corrections.of(configuration.strategy, configuration.method).peak.num_runs)


def at_longest(context: PlanningContext, configuration: Configuration) -> Configuration:
    """The configuration whose memory is predicted: with the longest row of this data."""
    widest = longest_width(context.data, seq_len=configuration.seq_len)
    if widest == configuration.seq_len:
        return configuration
    return replace(configuration, policy=replace(configuration.policy, longest_seq=widest))


def predicted_speed(context: PlanningContext, configuration: Configuration) -> SpeedEstimate:
    """Seconds of a step as earlier runs correct it."""
    speed = relative_speed(context, configuration)
    return corrected_speed(speed, context.corrections.of(configuration.strategy, configuration.method))


def relative_speed(context: PlanningContext, configuration: Configuration) -> SpeedEstimate:
    """Seconds of a step of average rows, uncorrected; padding does not count as tokens.

    Configurations of one strategy are compared by it: measurements of a strategy never change which is its best.
    """
    data, width = context.data, _mean_width(context, configuration)
    if data is None or data.mean_cut_tokens is None or width is None:
        return estimate_speed(context.shape, configuration, context.device)
    speed = estimate_speed(context.shape, replace(configuration, seq_len=round(width)), context.device)
    real = min(1.0, data.mean_cut_tokens / width)
    return replace(
        speed,
        tokens_per_s_per_gpu=real * speed.tokens_per_s_per_gpu,
        mfu=None if speed.mfu is None else real * speed.mfu,
    )


def relative_seconds(context: PlanningContext, configuration: Configuration) -> float:
    """`step_s` of `relative_speed` alone, for a search over configurations."""
    width = _mean_width(context, configuration)
    average = configuration if width is None else replace(configuration, seq_len=round(width))
    return step_seconds(context.shape, average, context.device)


def start_up_seconds(context: PlanningContext, configuration: Configuration) -> float:
    """Seconds before the first step ends that depend on the configuration: those of torch.compile."""
    if not configuration.compile:
        return 0.0
    is_padded = context.data is not None and not context.data.is_packed
    return compile_seconds(context.shape, is_padded=is_padded)


def start_up_share(context: PlanningContext, configuration: Configuration) -> float:
    """The `start_up_seconds` of one step of the run."""
    return start_up_seconds(context, configuration) / context.schedule.num_steps


# Relative errors of a predicted time, as far as they depend on the configuration: nine in ten published runs are within
# those that were compared with any (docs/accuracy.md; tests/planning/test_accuracy.py has the rows of each).
# FSDP2 and one GPU: 176 rows; torch.compile: 14. Embeddings in host RAM: no row, but all else of their steps is
# compared, and the lookups, a few percent, are counted as if nothing hid them.
COMPARED_ERROR = 0.10
# DeepSpeed's ZeRO, hybrid sharding, FSDP2 that reduces every micro batch: no row; activations in host RAM: 4 rows of
# one program.
UNCOMPARED_ERROR = 0.15
HOST_STATE_ERROR = 0.30  # weights or optimizer in host RAM: 9 rows of one program, none of DeepSpeed's CPU Adam
PAGING_ERROR = 1.00  # no row; the driver moves paged state as it is touched, a prediction assumes the rate of the link


def prediction_error(configuration: Configuration) -> float:
    """Relative error of a predicted time: the largest of those of what the configuration uses.

    Adapters have too little state for paging to matter.
    """
    row = configuration.strategy
    if row.optimizer.facts.is_paged and not configuration.method.freezes_base:
        return PAGING_ERROR
    if row.offload is not Offload.NONE:
        return HOST_STATE_ERROR
    has_rows = not row.sharding.uses_deepspeed and not row.sharding.facts.shards_within_group
    is_reduced = configuration.reduce_every_micro_batch and configuration.accumulation > 1
    is_compared = has_rows and not configuration.activation_offload and not is_reduced
    return COMPARED_ERROR if is_compared else UNCOMPARED_ERROR


APPROXIMATE = 0.10  # of the time, that an update which is not exact must gain: it may need more steps


def upper_seconds(context: PlanningContext, configuration: Configuration, step_s: float) -> float:
    """The upper end of the range of a predicted step with its share of the start-up.

    So of two configurations the one whose prediction is less certain must be predicted faster by the difference, and
    one that the job allows though it changes the update by `APPROXIMATE` more.
    """
    seconds = step_s + start_up_share(context, configuration)
    return seconds * (1 + prediction_error(configuration) + (0 if configuration.is_exact else APPROXIMATE))


# Times as fast: a gain above the errors of both predictions.
BOTH_ERRORS = (1 + UNCOMPARED_ERROR) ** 2


def host_price(context: PlanningContext, configuration: Configuration) -> float:
    """`BOTH_ERRORS` of weights or state in host RAM and, on several cards, which share it, of all else there."""
    row = configuration.strategy
    is_paged = row.optimizer.facts.is_paged and not configuration.method.freezes_base
    is_shared = configuration.num_ranks > 1 and (configuration.activation_offload or is_paged)
    uses_host = row.offload is not Offload.NONE or is_shared
    return BOTH_ERRORS if uses_host and not context.is_cpu else 1.0


def compared_seconds(context: PlanningContext, configuration: Configuration, step_s: float) -> float:
    """The `upper_seconds` by which configurations are ordered, with the price of host RAM."""
    return upper_seconds(context, configuration, step_s) * host_price(context, configuration)


FULL_CARD = (
    0.97  # of its usable bytes: published runs above are 17 to 46 % slower than predicted, the allocator retries
)
FULL_CARD_PRICE = 0.05  # of the time, that a configuration which fills the card so must gain


def full_card_factor(configuration: Configuration) -> float:
    """The price of a card that a configuration fills, as a factor of its time.

    One that is full though its embeddings are in host RAM is as uncertain as weights there: the same price.
    """
    return (1 + FULL_CARD_PRICE) * (BOTH_ERRORS if configuration.embedding_on_host else 1)


def roomy_need(context: PlanningContext, configuration: Configuration) -> float:
    """The most that a configuration may need without filling a GPU; its paged state is there as well."""
    if context.is_cpu:
        return math.inf
    return FULL_CARD * context.device.usable_bytes - managed_bytes(context.shape, configuration, context.device)


def priced(context: PlanningContext, configuration: Configuration, seconds: float, need_bytes: int) -> float:
    """The `compared_seconds` of a configuration with this need, with the price of a full card."""
    is_roomy = need_bytes <= roomy_need(context, configuration)
    return seconds if is_roomy else seconds * full_card_factor(configuration)


def _mean_width(context: PlanningContext, configuration: Configuration) -> float | None:
    """Mean width of padded rows; None if all rows have `seq_len` tokens."""
    data, seq_len = context.data, configuration.seq_len
    width = mean_width(data, configuration.micro_batch, seq_len=seq_len)
    return None if data is None or data.mean_cut_tokens is None or width >= seq_len else width


def configuration_of(context: PlanningContext, candidate: Candidate) -> Configuration:
    """The configuration that a candidate was estimated from."""
    return Configuration(
        **{name: getattr(candidate, name) for name in _SHARED_FIELDS},
        ranks_per_node=context.hardware.num_devices_per_node,
        policy=row_policy(context.data, seq_len=candidate.seq_len),
        lora=context.job.train.lora,
        galore=context.job.train.galore,
        router_aux_loss=context.job.train.router_aux_loss,
    )


def with_micro_batch(context: PlanningContext, configuration: Configuration, micro_batch: int) -> Configuration:
    """Another micro batch at the same global batch: accumulation changes accordingly."""
    rows_per_round = configuration.num_ranks * micro_batch
    accumulation = -(-context.schedule.sequences_per_step // rows_per_round)
    return replace(configuration, micro_batch=micro_batch, accumulation=accumulation)


class RunTime(Value, frozen=True, kw_only=True):
    """Predicted seconds of a run by part; None where nothing predicts one, which is then not in the sum."""

    start_up: float | None  # by earlier runs on this device alone
    steps: float  # with torch.compile
    evaluation: float
    saving: float | None
    export: float | None

    @property
    def total_s(self) -> float:
        """The predicted time of the run: the sum of its parts."""
        return sum(self.parts_s.values())

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts that are predicted, by the names of a report, in their order."""
        known = {part.value: getattr(self, part.name.lower(), None) for part in TimePart}
        return {name: seconds for name, seconds in known.items() if seconds is not None}

    @property
    def not_predicted(self) -> tuple[str, ...]:
        """The parts that nothing predicts."""
        return tuple(part.value for part in TimePart if getattr(self, part.name.lower(), 0.0) is None)


def run_time(context: PlanningContext, candidate: Candidate) -> RunTime:
    """Predicted time of the whole run by part: steps, a forward over the held-out rows at every evaluation, and files.

    DPO that trains the whole model scores every pair once more, before the first step: that model is its reference.
    """
    schedule, speed = context.schedule, candidate.speed
    configuration = configuration_of(context, candidate)
    steps_s = schedule.num_steps * speed.step_s + start_up_seconds(context, configuration)
    scoring_s, num_scored = 0.0, _tokens_scored(context, configuration)
    if num_scored:
        is_corrected = context.corrections.of(candidate.strategy, candidate.method).step.value != 1
        predicted = relative_seconds(context, configuration) if is_corrected else speed.step_s
        scoring_s = evaluation_seconds(context.shape, configuration, context.device, num_scored)
        scoring_s *= speed.step_s / predicted  # as runs correct the step
    return RunTime(
        start_up=context.corrections.times.start_up_s,
        steps=steps_s,
        evaluation=scoring_s,
        saving=saving_seconds(context, candidate, configuration, training_s=steps_s + scoring_s),
        export=export_seconds(context, configuration),
    )


def run_hours(context: PlanningContext, candidate: Candidate) -> float:
    """Predicted hours of the whole run, the sum of its parts."""
    return run_time(context, candidate).total_s / 3600


def run_seconds(context: PlanningContext, candidate: Candidate) -> float | None:
    """Predicted seconds of the whole run; None if the speed of the device is not known."""
    return run_time(context, candidate).total_s if context.device.has_known_speed else None


def _tokens_scored(context: PlanningContext, configuration: Configuration) -> int:
    """Tokens of all forwards of a run without a backward, except those of DPO's reference within a step."""
    schedule, num_eval_tokens = context.schedule, context.num_eval_tokens
    every = schedule.eval_every_steps or schedule.num_steps  # the last step is always followed by one
    num_evaluations = -(-schedule.num_steps // every)
    num_scored = num_evaluations * num_eval_tokens * (2 if configuration.runs_reference else 1)
    is_paired = configuration.policy.rows_per_example == 2
    if is_paired and not configuration.runs_reference and context.data is not None:
        num_scored += context.data.num_tokens + num_eval_tokens
    return num_scored


# Of a run without limits.hours: `auto` prefers methods that take no longer, and a plan warns if it does.
WISHED_HOURS = 24.0
SMALL_CARD_BYTES = 16 * GIB  # `auto` trains all weights on such cards only if their state stays there


def wishes_adapters(context: PlanningContext) -> bool:
    """True if `auto` prefers adapters to full training with its state in host RAM: on small cards."""
    is_open = context.job.train.method is None and context.job.model.config is None
    return is_open and not context.is_cpu and context.device.usable_bytes <= SMALL_CARD_BYTES


def run_cost(context: PlanningContext, hours: float) -> float | None:
    """Cost of the run, in the currency of price_per_gpu_hour; None if no price is known."""
    price = context.job.price_per_gpu_hour
    return None if price is None else hours * context.num_ranks * price


ENERGY_RULE = "board watts x GPUs x hours, PUE 1, host not counted"


class RunTotals(Value, frozen=True, kw_only=True):
    """Of one run; None where a factor is unknown, or there is no GPU."""

    hours: float
    gpu_hours: float | None
    kwh: float | None
    cost: float | None
    tokens_per_s: float  # of the data, by all devices together


def run_totals(context: PlanningContext, candidate: Candidate) -> RunTotals:
    """Totals of the run of `candidate`."""
    hours = run_hours(context, candidate)
    gpu_hours = None if context.is_cpu else hours * context.num_ranks
    watts = context.device.board_watts
    return RunTotals(
        hours=hours,
        gpu_hours=gpu_hours,
        kwh=None if gpu_hours is None or watts is None else gpu_hours * watts / 1000,
        cost=run_cost(context, hours),
        tokens_per_s=candidate.speed.tokens_per_s_per_gpu * context.num_ranks,
    )


class Excess(Value, frozen=True, kw_only=True):
    """A budget that a candidate exceeds."""

    reason: str
    remedy: str
    is_host: bool = False  # host RAM, pinned or not


def excess(context: PlanningContext, candidate: Candidate) -> Excess | None:
    """The first budget that `candidate` exceeds, or None."""
    return (
        device_excess(context, candidate.memory)
        or _host_excess(context, candidate.memory.pinned_bytes, candidate.memory.host_bytes)
        or _nvme_excess(context, candidate.memory)
        or _time_excess(context, run_hours(context, candidate))
    )


def device_excess(context: PlanningContext, memory: MemoryEstimate) -> Excess | None:
    """More than the device grants."""
    if memory.fits:
        return None
    return Excess(
        reason=f"needs {format_bytes(memory.need_bytes)} {_each(context)}; {context.device_text}",
        remedy=f"a device with {whole_gib(memory.need_bytes)} usable",
    )


def whole_gib(num_bytes: int) -> str:
    """Rounded up, so that the named size suffices."""
    return f"{math.ceil(num_bytes / GIB)} GiB"


def _each(context: PlanningContext) -> str:
    return "a rank" if context.is_cpu else "a GPU"


def exceeds_host(context: PlanningContext, configuration: Configuration) -> bool:
    """True if a node does not grant the host RAM, or the pinned RAM, that the configuration needs."""
    host = host_need(context.shape, at_longest(context, configuration), context.device)
    return _host_excess(context, host.pinned, host.pageable) is not None


def _host_excess(context: PlanningContext, pinned_bytes: int, pageable_bytes: int) -> Excess | None:
    """More host RAM than a node grants, or more of it pinned."""
    host = context.hardware.host
    need, granted = pinned_bytes + pageable_bytes, context.host_ram_bytes
    if context.is_cpu or granted is None:
        return None  # a CPU's memory is its host RAM; if the RAM is unknown a rule has refused offload
    if need > granted:
        return Excess(
            reason=f"needs {format_bytes(need)} of host RAM a node; {format_bytes(granted)} are granted"
            f"{_reserve_text(host, granted)}",
            remedy=_more_host_ram(context, need, pinned_bytes),
            is_host=True,
        )
    pinnable = context.pinnable_ram_bytes
    if pinnable is not None and pinned_bytes > pinnable:
        return Excess(
            reason=f"needs {format_bytes(pinned_bytes)} of pinned host RAM; the limit is {format_bytes(pinnable)}",
            remedy="more memory= in .wslconfig" if host.is_wsl else _larger(host, need, pinned_bytes),
            is_host=True,
        )
    return None


def _more_host_ram(context: PlanningContext, need: int, pinned_bytes: int) -> str:
    """A higher limit where the job's is in the way, on larger machines where this one has not so much free."""
    host = context.hardware.host
    larger = _larger(host, need, pinned_bytes)
    if not host.is_ram_assumed and context.host_ram_bytes != context.job.limits.host_ram:
        return larger
    is_free = host.is_ram_assumed or need <= (host.ram_available_bytes or host.ram_bytes or need)
    return f"limits.host_ram: {whole_gib(need)}" + ("" if is_free else f" and {larger}")


def _larger(host: Host, need_bytes: int, pinned_bytes: int) -> str:
    return f"nodes with {ram_for(need_bytes, pinned_bytes, is_desktop=host.is_desktop)} GiB of RAM"


def _reserve_text(host: Host, granted: int) -> str:
    """` of 32 GiB, the rest is for the system and other processes`; nothing if no reserve is made."""
    if host.ram_bytes is None or granted == host.ram_bytes or granted != usable_ram(host):
        return ""
    return f" of {format_bytes(host.ram_bytes)}, the rest is for the system and other processes"


def _nvme_excess(context: PlanningContext, memory: MemoryEstimate) -> Excess | None:
    if not memory.nvme_bytes:
        return None
    granted = context.nvme_bytes
    if granted is not None and memory.nvme_bytes <= granted:
        return None
    known = "its free space is unknown" if granted is None else f"{format_bytes(granted)} are granted"
    return Excess(
        reason=f"needs {format_bytes(memory.nvme_bytes)} under limits.nvme.path; {known}",
        remedy=f"limits.nvme.size: {whole_gib(memory.nvme_bytes)}, where the disk has it",
    )


def _time_excess(context: PlanningContext, hours: float) -> Excess | None:
    limits, cost = context.job.limits, run_cost(context, hours)
    if limits.hours is not None and hours > limits.hours:
        return Excess(
            reason=f"needs {format_seconds(hours * 3600)}; limits.hours is {limits.hours:g}",
            remedy=f"limits.hours: {math.ceil(hours)}",
        )
    if cost is None or limits.cost is None or cost <= limits.cost:
        return None
    return Excess(reason=f"costs {cost:.2f}; limits.cost is {limits.cost:g}", remedy=f"limits.cost: {math.ceil(cost)}")
