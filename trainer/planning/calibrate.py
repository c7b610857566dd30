"""Calibration by earlier runs on this device: a factor for each predicted figure, and its certainty.

A figure's factor comes from the ratios measured / predicted of comparable runs: the same class of precision, sharding,
offload and frozen base, and a model of at most four times or at least a quarter the size. The median of their
logarithms (one run on a busy machine does not move it) is shrunk toward no correction by the larger of two amounts: its
share 1 / (n + 1), so that one run counts half and nine count nine tenths, and the standard error of the median. Ratios
that scatter around one correct nothing.

Step times of a class without runs are corrected by the runs of other classes in its precision: a machine that is slower
than predicted under one strategy usually is under others, and a correction of one class alone would change the ranking
only because that class was measured. Bytes are arithmetic: they are corrected only for the class that ran.

Only runs that the same version predicted count, and for the step time only those predicted from the same kind of
ceilings: `probe --measure` corrects the ceilings of a device, these factors correct the remaining error.

A factor is the same for every configuration of a strategy, so it never changes which of them is the best; it changes
which ones fit, the predicted time of a run, and the chosen strategy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import Hardware, MeasuredRates
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import (
    Calibration,
    CalibrationRecord,
    MemoryEstimate,
    RatesSource,
    SpeedEstimate,
    TrialResult,
)
from shardwise.trainer.spec.strategy import Method, Precision, Strategy
from shardwise.trainer.spec.value import Value

COMPARABLE_SIZE = 4.0  # ratio of parameters
MAX_RECORDS = 20  # the newest count
FIRM_RUNS, FIRM_SPREAD = 3, 0.01  # so many runs that agree this well may lower the need of a plan
LEAST_RANGE = 0.01  # of the peak; a range is never narrower
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
# Parts whose bytes follow from the model alone: a run that measured another peak measured other activations or buffers.
_EXACT_PARTS = frozenset({
    "weights", "master_weights", "quant_state", "adapters", "optimizer_state", "gradients", "fp8_weights", "workspace",
})  # fmt: skip


class Factor(Value, frozen=True, kw_only=True):
    """Factor of a predicted figure, and the runs it comes from."""

    value: float = 1.0
    num_runs: int = 0
    measured: float = 1.0  # the median ratio itself
    spread: float | None = None  # of the ratios, one sigma as a share; None for fewer than two

    @property
    def is_firm(self) -> bool:
        """True where enough runs agree closely."""
        return self.num_runs >= FIRM_RUNS and self.spread is not None and self.spread <= FIRM_SPREAD

    def times(self, factor: float) -> "Factor":
        """The factor after another one."""
        return replace(self, value=self.value * factor)


NO_FACTOR = Factor()


class Correction(Value, frozen=True, kw_only=True):
    """The factors of one class of strategies."""

    step: Factor = NO_FACTOR
    peak: Factor = NO_FACTOR
    reserved: Factor = NO_FACTOR
    device: Factor = NO_FACTOR
    is_of_class: bool = False  # the step time's factor is from runs of this very class


NO_CORRECTION = Correction()


class LearnedTimes(Value, frozen=True, kw_only=True):
    """Medians of earlier runs of models of a comparable size on this device; None: no run has measured it."""

    start_up_s: float | None = None
    saved_bytes_per_s: float | None = None  # of checkpoints, written and read back together
    exported_bytes_per_s: float | None = None  # of the export, likewise
    num_runs: int = 0


NO_TIMES = LearnedTimes()


class Corrections(Value, frozen=True, kw_only=True):
    """Corrections from the runs on a device, for every strategy of one model."""

    by_class: dict[str, Correction] = {}
    by_precision: dict[str, Correction] = {}  # for strategies whose class has not run
    num_unused: int = 0  # runs on this device that cannot be compared
    tried: dict[str, float] = {}  # strategies that a trial of this job timed: a further factor of their step time
    untried: float = 1.0  # the same for the other strategies
    not_compiled: str | None = None  # why blocks of this model failed to compile with these versions
    has_moved_activations: bool = False  # a run had all activations in host RAM: its time includes the copies
    times: LearnedTimes = NO_TIMES  # what no formula has: the start-up, and the rate of the files

    def of(self, strategy: Strategy, method: Method) -> Correction:
        """The factors for one strategy."""
        learned = self._learned(strategy, method)
        factor = self.tried.get(strategy.name, self.untried)
        return learned if factor == 1 else replace(learned, step=learned.step.times(factor))

    def _learned(self, strategy: Strategy, method: Method) -> Correction:
        if not self.by_class and not self.by_precision:
            return NO_CORRECTION
        key = _class_of(strategy.precision, strategy.sharding, strategy.offload, is_frozen=method.freezes_base)
        return self.by_class.get(key) or self.by_precision.get(strategy.precision, NO_CORRECTION)


NO_CORRECTIONS = Corrections()


def corrections_of(
    calibration: Calibration, *, shape: ModelShape, hardware: Hardware, versions: Mapping[str, str]
) -> Corrections:
    """The factors that the records of a device give for a model, and whether it compiled in the latest of them."""
    version = versions.get("shardwise")
    if not calibration.records:
        return NO_CORRECTIONS
    usable = [record for record in calibration.records if _is_usable(record, shape, version)]
    rates = rates_source(hardware)
    of_speed = [record for record in usable if record.rates is rates]
    by_precision = _grouped(of_speed, lambda record: str(record.precision))
    corrections = {precision: Correction(step=_step(records)) for precision, records in by_precision.items()}
    by_class = {}
    for key, records in _grouped(usable, _class_of_record).items():
        timed = [record for record in records if record.rates is rates]
        elsewhere = corrections.get(str(records[0].precision), NO_CORRECTION).step
        full = [record for record in records if not record.is_padded]
        by_class[key] = Correction(
            step=_step(timed) if timed else elsewhere,
            peak=factor_of(_ratios(full, "peak")),
            reserved=factor_of(_ratios(full, "reserved")),
            device=factor_of(_ratios(full, "device")),
            is_of_class=bool(timed),
        )
    return Corrections(
        by_class=by_class,
        by_precision=corrections,
        num_unused=len(calibration.records) - len(usable),
        not_compiled=_not_compiled(calibration, shape, transformers=versions.get("transformers")),
        has_moved_activations=any(record.moves_activations for record in usable),
        times=_learned_times([record for record in calibration.records if _is_comparable(record, shape)]),
    )


def _learned_times(records: Sequence[CalibrationRecord]) -> LearnedTimes:
    def middle(name: str) -> float | None:
        found = [value for record in records if (value := getattr(record, name)) is not None]
        return _median(found[-MAX_RECORDS:]) if found else None

    return LearnedTimes(
        start_up_s=middle("start_up_s"),
        saved_bytes_per_s=middle("saved_bytes_per_s"),
        exported_bytes_per_s=middle("exported_bytes_per_s"),
        num_runs=sum(
            any(each is not None for each in (record.start_up_s, record.saved_bytes_per_s, record.exported_bytes_per_s))
            for record in records
        ),
    )


def _not_compiled(calibration: Calibration, shape: ModelShape, *, transformers: str | None) -> str | None:
    compiled = (
        record
        for record in reversed(calibration.records)
        if record.is_compiled is not None
        and (record.model_type, record.transformers) == (shape.model_type, transformers)
    )
    latest = next(compiled, None)
    return None if latest is None else latest.not_compiled


def after_trials(corrections: Corrections, trials: Sequence[TrialResult]) -> Corrections:
    """The factors after trials: strategies that ran have their measured time, others are corrected as after runs."""
    tried = {
        trial.strategy: trial.step_s / trial.predicted_step_s
        for trial in trials
        if trial.step_s is not None and trial.predicted_step_s is not None
    }
    return replace(corrections, tried=tried, untried=factor_of(tried.values()).value)


def rates_source(hardware: Hardware) -> RatesSource:
    """Where the ceilings of predictions for this hardware come from."""
    return RatesSource.DATASHEET if hardware.rates == MeasuredRates() else RatesSource.MEASURED


def factor_of(ratios: Iterable[float]) -> Factor:
    """The factor that ratios measured / predicted, oldest first, support."""
    logs = [math.log(ratio) for ratio in ratios][-MAX_RECORDS:]
    if not logs:
        return NO_FACTOR
    middle, number = _median(logs), len(logs)
    spread = _spread(logs, middle)
    shrunk = abs(middle) * number / (number + 1)
    if spread is not None:
        shrunk = min(shrunk, max(0.0, abs(middle) - spread / math.sqrt(number)))
    return Factor(
        value=math.exp(math.copysign(shrunk, middle)), num_runs=number, measured=math.exp(middle), spread=spread
    )


def corrected_speed(speed: SpeedEstimate, correction: Correction) -> SpeedEstimate:
    """The estimate with its step time, and what follows from it, multiplied."""
    factor = correction.step.value
    if factor == 1:
        return speed
    return replace(
        speed,
        parts={name: seconds * factor for name, seconds in speed.parts.items()},
        step_s=speed.step_s * factor,
        tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu / factor,
        mfu=None if speed.mfu is None else speed.mfu / factor,
    )


def corrected_memory(memory: MemoryEstimate, correction: Correction) -> MemoryEstimate:
    """The estimate with its peak, and the figures that follow from it, corrected; parts still sum to the peak.

    The need rises with the peak, and falls with it only if the runs are firm. The range around the peak narrows to
    their spread.
    """
    peak = correction.peak
    if not peak.num_runs:
        return memory
    delta = _movable_bytes(memory, round((peak.value - 1) * memory.peak_allocated_bytes))
    top = memory.peak_allocated_bytes + delta
    reserved = max(top, round((memory.peak_reserved_bytes + delta) * correction.reserved.value))
    low, high = _range(memory, peak, top=top, reserved=reserved, delta=delta)
    return replace(
        memory,
        parts=_moved_parts(memory.parts, delta),
        events=_moved_events(memory, delta),
        peak_allocated_bytes=top,
        peak_reserved_bytes=reserved,
        device_bytes=min(
            max(top, round((memory.device_bytes + delta) * correction.device.value)),
            max(top + memory.outside_bytes, memory.usable_bytes),
        ),
        low_bytes=low,
        high_bytes=high,
        need_bytes=memory.need_bytes + (delta if delta > 0 or peak.is_firm else 0),
    )


def _range(memory: MemoryEstimate, peak: Factor, *, top: int, reserved: int, delta: int) -> tuple[int, int]:
    low, high = memory.low_bytes + delta, max(reserved, memory.high_bytes + delta)
    if peak.num_runs < FIRM_RUNS or peak.spread is None:
        return low, high
    width = max(LEAST_RANGE, 2 * peak.spread)
    return max(low, round((1 - width) * top)), max(reserved, min(high, round((1 + width) * top)))


def _movable_bytes(memory: MemoryEstimate, delta: int) -> int:
    """As much of `delta` as the inexact parts allow: they may fall to a tenth."""
    movable = sum(num_bytes for name, num_bytes in memory.parts.items() if name not in _EXACT_PARTS)
    if memory.peak_allocated_bytes <= memory.steady_allocated_bytes or not movable:
        return 0
    floor = max(-9 * movable // 10, memory.steady_allocated_bytes - memory.peak_allocated_bytes)
    return max(delta, floor)


def _moved_parts(parts: dict[str, int], delta: int) -> dict[str, int]:
    """Parts that sum to `delta` more, each inexact one by its share; the largest absorbs the rounding."""
    if not delta:
        return parts
    inexact = {name: num_bytes for name, num_bytes in parts.items() if name not in _EXACT_PARTS}
    total = sum(inexact.values())
    moved = {name: num_bytes + delta * num_bytes // total for name, num_bytes in inexact.items()}
    largest = max(moved, key=moved.__getitem__)
    moved[largest] += total + delta - sum(moved.values())
    return parts | moved


def _moved_events(memory: MemoryEstimate, delta: int) -> dict[str, int]:
    """Every event moved by its own share of what it has above the steady memory: the peak stays the largest."""
    steady, peak = memory.steady_allocated_bytes, memory.peak_allocated_bytes
    if not delta:
        return memory.events
    return {
        name: total if total <= steady else total + round(delta * (total - steady) / (peak - steady))
        for name, total in memory.events.items()
    }


def _is_usable(record: CalibrationRecord, shape: ModelShape, version: str | None) -> bool:
    return record.precision is not None and record.shardwise == version and _is_comparable(record, shape)


def _is_comparable(record: CalibrationRecord, shape: ModelShape) -> bool:
    """True of a run of a model whose size is comparable."""
    if record.num_parameters is None:
        return False
    ratio = shape.num_parameters / record.num_parameters
    return 1 / COMPARABLE_SIZE <= ratio <= COMPARABLE_SIZE


def _step(records: Sequence[CalibrationRecord]) -> Factor:
    return factor_of(record.measured_step_s / record.predicted_step_s for record in records)


def _ratios(records: Sequence[CalibrationRecord], name: str) -> list[float]:
    pairs = [(getattr(each, f"measured_{name}_bytes"), getattr(each, f"predicted_{name}_bytes")) for each in records]
    return [measured / predicted for measured, predicted in pairs if measured and predicted]


def _median(values: Sequence[float]) -> float:
    from statistics import median  # two milliseconds of every start, for machines that have trained

    return median(values)


def _spread(logs: Sequence[float], middle: float) -> float | None:
    """One sigma, from the median of absolute deviations; of two values from their distance."""
    if len(logs) < 2:
        return None
    if len(logs) == 2:
        return abs(logs[1] - logs[0]) / math.sqrt(2)
    return _MAD_TO_SIGMA * _median([abs(log - middle) for log in logs])


def _grouped(
    records: Iterable[CalibrationRecord], key: Callable[[CalibrationRecord], str]
) -> dict[str, list[CalibrationRecord]]:
    return {name: list(group) for name, group in groupby(sorted(records, key=key), key)}


def _class_of_record(record: CalibrationRecord) -> str:
    assert record.precision is not None
    return _class_of(
        record.precision,
        record.sharding or Sharding.NONE,
        record.offload or Offload.NONE,
        is_frozen=record.method is not None and record.method.freezes_base,
    )


def _class_of(precision: Precision, sharding: Sharding, offload: Offload, *, is_frozen: bool) -> str:
    """Name of a class of strategies whose errors are expected to be alike."""
    engine = str(sharding if sharding.is_replicated else sharding.facts.engine)
    place = "device" if offload is Offload.NONE else "nvme" if offload.uses_nvme else "host"
    return f"{precision}/{engine}/{place}/{'frozen' if is_frozen else 'trained'}"
