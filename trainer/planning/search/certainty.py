"""Certainty of a plan's figures: from earlier runs on the device, else from published measurements of similar runs.

`SPEED` and `PEAK` state the error of nine in ten predictions, rounded up to 5 %, of published runs whose trainer or
machine no constant was fitted to: for the speed rows of benchmarks/measured_unfitted.jsonl and the even ones of
measured_judging.jsonl, for the peak those of measured_public.jsonl, predicted as an unknown trainer. An error is the
factor between prediction and measurement, less one. tests/planning/test_accuracy.py compares them with the rows. A
strategy without a row there has been compared with no measurement on a GPU, and the plan states so. On a CPU the tests
compare the peak with the allocator events of PyTorch's profiler (docs/memory-model.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from shardwise.trainer.planning.calibrate import Correction, Factor
from shardwise.trainer.planning.candidates import configuration_of, prediction_error, run_time
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.tables.gpu_specs import MIG_MARK
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, TrialResult
from shardwise.trainer.spec.report import TimePart
from shardwise.trainer.spec.strategy import Method, Precision
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value


class Compared(Value, frozen=True, kw_only=True):
    """Published measurements of one kind, and the error that nine in ten predictions of them do not exceed."""

    num_rows: int
    error: float


class SpeedKind(StrEnum):
    """What the certainty of a speed follows from: card, nodes, model."""

    ONE_NODE = "dense, one node of A100, H100 or H200"
    NODES = "dense, several such nodes"
    EXPERTS = "mixtures of experts"
    OTHER_CARDS = "dense, other cards"


# Cards without NVLink, and all others, depend on links and clocks that no datasheet states.
WELL_KNOWN_CARDS = ("A100", "H100", "H200")
SPEED = {
    SpeedKind.ONE_NODE: Compared(num_rows=79, error=0.25),
    SpeedKind.NODES: Compared(num_rows=22, error=0.10),
    SpeedKind.EXPERTS: Compared(num_rows=8, error=0.20),
    SpeedKind.OTHER_CARDS: Compared(num_rows=37, error=0.70),
}
# By (weights sharded by FSDP, method).
PEAK = {
    (False, Method.FULL): Compared(num_rows=17, error=0.15),
    (False, Method.LORA): Compared(num_rows=11, error=0.10),
    (False, Method.QLORA): Compared(num_rows=15, error=0.35),
    (True, Method.FULL): Compared(num_rows=17, error=0.05),
    (True, Method.LORA): Compared(num_rows=16, error=0.40),
    (True, Method.QLORA): Compared(num_rows=18, error=0.45),
}
CPU_PEAK = 0.02
ASSUMED_SPEED = 1.0  # a factor of two: of a CPU, of a traced model
TRIAL_SPEED = 0.05  # three steps of the very configuration
FIRM_RUNS = 3  # whose spread is a range


def usual_error(device: Device, *, has_experts: bool) -> float | None:
    """Expected error of a predicted step time, as a share, before any run on this device.

    None if the speed of the device is not known, so that nothing was predicted.
    """
    if not device.has_known_speed:
        return None
    if device.kind is DeviceKind.CPU:
        return ASSUMED_SPEED
    of_card = SPEED[speed_kind(device.name, num_nodes=device.num_nodes, has_experts=False)].error
    return max(of_card, SPEED[SpeedKind.EXPERTS].error) if has_experts else of_card


def speed_kind(card: str, *, num_nodes: int, has_experts: bool) -> SpeedKind:
    """The kind of a run by which its speed is compared."""
    if has_experts:
        return SpeedKind.EXPERTS
    if not is_well_known(card):
        return SpeedKind.OTHER_CARDS
    return SpeedKind.NODES if num_nodes > 1 else SpeedKind.ONE_NODE


def is_well_known(card: str) -> bool:
    """True for cards of servers with NVLink; no published run was made on a MIG slice of one."""
    return card.startswith(WELL_KNOWN_CARDS) and MIG_MARK not in card


def time_error(context: PlanningContext, candidate: Candidate) -> float | None:
    """Expected error of the predicted time of a step, as a share: the time is within a factor of 1 + this share.

    The larger of those of the device and of the configuration; None if the speed of the device is not known.
    """
    if candidate.strategy.name in context.corrections.tried:
        return TRIAL_SPEED
    usual = usual_error(context.device, has_experts=context.shape.num_experts > 1)
    if usual is None:
        return None
    correction, of_configuration = (
        _correction(context, candidate),
        prediction_error(configuration_of(context, candidate)),
    )
    num_runs, spread = correction.step.num_runs, 2 * (correction.step.spread or 0.0)
    usual = max(usual, ASSUMED_SPEED if context.shape.is_described else 0.0)  # of its type no step was timed
    learned = max(spread, TRIAL_SPEED if num_runs >= FIRM_RUNS else usual / (num_runs + 1))
    return learned if correction.is_of_class else max(learned, of_configuration)


FILES_ERROR = 1.0  # of the start-up and of files, as earlier runs had them or a disk was measured: a factor of two


def is_least(context: PlanningContext, part: str) -> bool:
    """True of a part whose bytes alone are predicted, by the rate of a disk: small files and checks add to it."""
    times = context.corrections.times
    rates = {TimePart.SAVING.value: times.saved_bytes_per_s, TimePart.EXPORT.value: times.exported_bytes_per_s}
    return part in rates and rates[part] is None


def part_errors(context: PlanningContext, candidate: Candidate) -> dict[str, float]:
    """Expected error of each predicted part of the time of a run, as a share; empty if no speed is known."""
    error = time_error(context, candidate)
    if error is None:
        return {}
    computed = (TimePart.STEPS, TimePart.EVALUATION)
    return {part: error if part in computed else FILES_ERROR for part in run_time(context, candidate).parts_s}


def run_error(context: PlanningContext, candidate: Candidate) -> float | None:
    """Expected error of the predicted time of a run, as a share: the mean of those of its parts, by their seconds."""
    errors, parts = part_errors(context, candidate), run_time(context, candidate).parts_s
    total_s = sum(parts.values())
    if not errors or not total_s:
        return time_error(context, candidate)
    if len(set(errors.values())) == 1:
        return next(iter(errors.values()))
    return sum(errors[part] * seconds for part, seconds in parts.items()) / total_s


def _correction(context: PlanningContext, candidate: Candidate) -> Correction:
    return context.corrections.of(candidate.strategy, candidate.method)


# Runs of our own trainer on one H100 (benchmarks/results), by the property that no published row has.
OWN_PEAKS: Mapping[str, int] = MappingProxyType(
    {
        "ZeRO": 9,
        "GaLore": 4,
        "offload": 3,
        "fp32": 1,
        "fp16-mixed": 1,
        "activations in host RAM": 1,
        "paged optimizer state": 2,
        "fp8": 6,
    }
)


def not_compared(context: PlanningContext, candidate: Candidate) -> str | None:
    """The first property of a configuration that no published peak has; None if measurements cover its kind."""
    row = candidate.strategy
    if context.shape.is_described:
        return f"models of type {context.shape.model_type}"
    if context.is_cpu:
        return None
    found = (
        (context.shape.num_experts > 1, "mixtures of experts"),
        (row.sharding.uses_deepspeed, "ZeRO"),
        (row.sharding.facts.shards_within_group, "hybrid sharding"),
        (candidate.reduce_every_micro_batch and candidate.accumulation > 1, "reduction of every micro batch"),
        (candidate.bf16_reduction, "reduction in bf16"),
        (candidate.embedding_on_host, "embeddings in host RAM"),
        (candidate.prefetch_two_blocks, "prefetch of two blocks"),
        (candidate.fused_adapters, "fused adapters"),
        (candidate.compiled_head, "compiled loss head"),
        (row.offload is not Offload.NONE, "offload"),
        (row.optimizer.facts.is_paged and not candidate.method.freezes_base, "paged optimizer state"),
        (candidate.activation_offload, "activations in host RAM"),
        (row.sharding.is_replicated and candidate.num_ranks > 1, "DDP"),
        (candidate.method is Method.GALORE, "GaLore"),
        (row.precision in (Precision.FP8, Precision.FP32, Precision.FP16_MIXED), str(row.precision)),
    )
    return next((text for applies, text in found if applies), None)


def peak_error(context: PlanningContext, candidate: Candidate) -> float | None:
    """Expected error of the predicted peak, as a share; None if no measurement of this kind has been compared."""
    peak = _correction(context, candidate).peak
    if peak.num_runs:
        return max(CPU_PEAK, 2 * (peak.spread or abs(peak.measured - 1)))
    if not_compared(context, candidate) is not None:
        return None
    if context.is_cpu:
        return CPU_PEAK
    return PEAK[_kind(candidate)].error


def certainty_text(context: PlanningContext, chosen: Candidate) -> tuple[str, ...]:
    """Certainty of the predictions for `chosen`, from earlier runs or, without any, from published measurements."""
    return tuple(_run_text(context, chosen))


def trial_text(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """Measurements of trials and their predictions, in the order they ran; empty without trials."""
    timed = [
        (trial.strategy, trial.step_s, trial.predicted_step_s)
        for trial in trials
        if trial.step_s is not None and trial.predicted_step_s is not None
    ]
    if not timed:
        return ()
    measured = ", ".join(f"{name} {format_seconds(step_s)}" for name, step_s, _ in timed)
    expected = ", ".join(format_seconds(step_s) for _, _, step_s in timed)
    return (f"trial: {measured} a step; predicted {expected}",)


def error_text(error: float) -> str:
    """`within 15 %`, or `within a factor of 2`."""
    return "within a factor of 2" if error == ASSUMED_SPEED else f"within {error:.0%}".replace("%", " %")


def peak_text(context: PlanningContext, chosen: Candidate) -> str:
    """`within 15 %; 17 published peaks`, or what has not been compared with a measurement."""
    correction, error = _correction(context, chosen), peak_error(context, chosen)
    if error is None:
        kind = not_compared(context, chosen)
        num_peaks = OWN_PEAKS.get(kind or "", 0)
        if num_peaks:
            return f"{kind}: {num_peaks} peak{'s' * (num_peaks > 1)} of one H100"
        return f"{kind}: no measured peak yet"
    if correction.peak.num_runs:
        return f"{error_text(error)}; runs on this device: {correction.peak.num_runs}"
    if context.is_cpu:
        return error_text(error)
    return f"{error_text(error)}; {PEAK[_kind(chosen)].num_rows} published peaks"


def _kind(candidate: Candidate) -> tuple[bool, Method]:
    return candidate.strategy.sharding.uses_fsdp, candidate.method


def _run_text(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    corrections, correction = context.corrections, _correction(context, chosen)
    is_tried = chosen.strategy.name in corrections.tried  # `trial_text` has the measurement
    if correction.step.num_runs and not is_tried:
        like = "like this one" if correction.is_of_class else "in this precision"
        yield f"step time {_applied(correction.step, like)}"
    if correction.peak.num_runs:
        yield f"peak memory {_applied(correction.peak, 'like this one')}"
    if not correction.step.num_runs and not is_tried:
        unknown = "no run like this one" if corrections.num_unused or correction.peak.num_runs else "no run"
        error = time_error(context, chosen)
        expected = [] if error is None else [f"expect tokens/s {error_text(error)}"]
        expected += [] if correction.peak.num_runs else [f"peak memory {peak_text(context, chosen)}"]
        if expected:
            yield f"{unknown} on this device yet: {', '.join(expected)}"
    if corrections.num_unused:
        runs = _runs(corrections.num_unused)
        yield f"{runs} on this device not used: another version, or a model of another size"


def _applied(factor: Factor, like: str) -> str:
    spread = "" if factor.spread is None else f" (spread {factor.spread:.1%})"
    runs = f"{_runs(factor.num_runs)} {like} on this device{spread}"
    if abs(factor.value - 1) < 0.0005:
        return f"not corrected: {runs} measured {factor.measured:.3f} of it"
    return f"corrected by {factor.value:.3g} from {runs}, which measured {factor.measured:.3g} of what was predicted"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
