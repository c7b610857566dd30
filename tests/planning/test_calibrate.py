"""What earlier runs teach: never more than they agree on, never from runs that are not alike, and bytes that add up."""

import math
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import machine, plan_of, shape_of, trial_of
from report_factory import calibration_of, record_of

from shardwise.trainer.planning import calibrate
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import Hardware, MeasuredRates
from shardwise.trainer.spec.plan import CalibrationRecord, Candidate, MemoryEstimate, RatesSource
from shardwise.trainer.spec.strategy import Method, Precision, Strategy

H100S = "8xH100-SXM5-80GB"
RATES = MeasuredRates(matmul_flops_per_s=10**14)


def row(sharding: Sharding = Sharding.FSDP, precision: Precision = Precision.BF16_MIXED) -> Strategy:
    strategy = plan_of("8b", H100S).chosen.strategy
    return replace(strategy, name="a row", sharding=sharding, offload=Offload.NONE, precision=precision)


def correction(
    *records: CalibrationRecord, strategy: Strategy | None = None, hardware: Hardware | None = None
) -> calibrate.Correction:
    found = calibrate.corrections_of(
        calibration_of(*records), shape=shape_of("8b"), hardware=hardware or machine(H100S), versions={"shardwise": "0"}
    )
    return found.of(strategy or row(), Method.FULL)


@pytest.mark.parametrize(
    ("ratios", "value"),
    [
        ([], 1.0),
        ([0.81], 0.9),  # one run counts half: the square root
        ([0.81] * 3, 0.81**0.75),
        ([1.21] * 9, 1.21**0.9),
        ([0.5, 2.0], 1.0),  # the median is no correction
        ([0.7, 1.05, 1.3], 1.0),  # a median of 1.05 that is less than its standard error
    ],
)
def test_a_factor_is_the_median_drawn_toward_none(ratios: list[float], value: float) -> None:
    assert calibrate.factor_of(ratios).value == pytest.approx(value)


def test_the_median_of_the_newest_runs_counts_and_runs_that_scatter_correct_less_than_runs_that_agree() -> None:
    """Whatever one of them took on a busy machine."""
    agreeing, scattering = calibrate.factor_of([0.79, 0.8, 0.81] * 3), calibrate.factor_of([0.7, 0.8, 0.64 / 0.7] * 3)
    assert agreeing.measured == pytest.approx(scattering.measured)
    assert agreeing.value == pytest.approx(0.8**0.9)
    assert scattering.value == pytest.approx(math.exp(math.log(0.8) + scattering.spread / 3))
    for ratios in ([0.9, 0.9, 0.9, 5.0], [2.0] * 30 + [0.9] * 20):
        assert calibrate.factor_of(ratios).measured == pytest.approx(0.9)


@pytest.mark.parametrize(
    "facts",
    [
        {"shardwise": "another"},
        {"shardwise": None, "precision": None},  # a line of an earlier version
        {"num_parameters": 1_000_000_000},
        {"num_parameters": 70_000_000_000},
        {"precision": Precision.FP32},
    ],
)
def test_runs_that_cannot_be_compared_correct_nothing(facts: dict[str, Any]) -> None:
    assert correction(record_of(0.5, 0.5, **facts)) == calibrate.NO_CORRECTION


def test_a_step_time_predicted_from_other_ceilings_teaches_memory_only_and_one_of_average_rows_time_only() -> None:
    """Once the machine's own ceilings are measured, what datasheets missed must not be corrected a second time."""
    measured = replace(machine(H100S), rates=RATES)
    before, after = record_of(1.4, 1.1), record_of(1.05, 1.1, rates=RatesSource.MEASURED)
    assert correction(before).step.measured == pytest.approx(1.4)
    on_measured = correction(before, after, hardware=measured)
    assert (on_measured.step.num_runs, on_measured.peak.num_runs) == (1, 2)
    assert on_measured.step.measured == pytest.approx(1.05)
    padded = correction(record_of(1.4, 0.7, is_padded=True))
    assert (padded.step.num_runs, padded.peak.num_runs) == (1, 0)


@pytest.mark.parametrize("sharding", [Sharding.FSDP, Sharding.DDP])  # the class that ran, and one that did not
@pytest.mark.parametrize(("is_measured", "own", "other"), [(False, 1.4, 0.7), (True, 0.7, 1.4)])
def test_a_class_that_has_not_run_follows_steps_predicted_from_the_same_ceilings_only(
    sharding: Sharding, own: float, other: float, *, is_measured: bool
) -> None:
    hardware = machine(H100S)
    if is_measured:
        hardware = replace(hardware, rates=RATES)
    sources = (RatesSource.DATASHEET, RatesSource.MEASURED)
    mine, others = reversed(sources) if is_measured else sources
    records = (record_of(own, rates=mine), *[record_of(other, rates=others)] * 3)
    assert correction(*records, strategy=row(sharding), hardware=hardware).step == calibrate.factor_of([own])
    nothing = correction(*records[1:], strategy=row(sharding), hardware=hardware)
    assert nothing.step == calibrate.factor_of([]), "none was predicted from these ceilings"


def test_other_rows_of_a_precision_follow_in_time_and_not_in_bytes() -> None:
    """Or one measured row would be ranked before or behind all others for no better reason."""
    other = correction(record_of(1.4, 1.1), strategy=row(Sharding.DDP))
    own = correction(record_of(1.4, 1.1))
    assert other.step == own.step
    assert (other.peak.num_runs, own.peak.num_runs) == (0, 1)
    assert (other.is_of_class, own.is_of_class) == (False, True)
    records = (record_of(1.4), record_of(1.4), record_of(0.9, sharding=Sharding.DDP))
    assert correction(*records, strategy=row(Sharding.DDP)).step.measured == pytest.approx(0.9)  # its own come first


@pytest.fixture(scope="module")
def chosen() -> Candidate:
    return plan_of("8b", H100S, pin={"sharding": Sharding.FSDP}).chosen


@pytest.mark.parametrize("peak", [0.3, 0.9, 0.999, 1.001, 1.1, 3.0])
def test_parts_still_sum_to_the_peak_and_the_peak_is_still_the_largest_event(chosen: Candidate, peak: float) -> None:
    before = chosen.memory
    after = calibrate.corrected_memory(before, calibrate.Correction(peak=calibrate.factor_of([peak] * 9)))
    assert sum(after.parts.values()) == after.peak_allocated_bytes == max(after.events.values())
    assert after.events[after.peak_event] == after.peak_allocated_bytes >= after.steady_allocated_bytes
    assert (after.peak_allocated_bytes > before.peak_allocated_bytes) is (peak > 1)
    factor = calibrate.Factor(value=1.04, num_runs=5, measured=1.05, spread=0.002)
    corrected = calibrate.corrected_memory(before, calibrate.Correction(peak=factor)).peak_allocated_bytes
    assert corrected == pytest.approx(1.04 * before.peak_allocated_bytes, abs=2)
    exact = {"weights", "optimizer_state", "gradients"}
    assert {name: after.parts.get(name) for name in exact} == {name: before.parts.get(name) for name in exact}
    assert after.low_bytes <= after.peak_allocated_bytes <= after.high_bytes


@pytest.mark.parametrize(
    ("ratios", "is_lower"), [([0.9], False), ([0.9, 0.9], False), ([0.9, 0.9, 0.9], True), ([0.85, 0.9, 0.95], False)]
)
def test_a_plan_asks_for_less_only_after_runs_that_agree_and_for_more_after_one(chosen, ratios, is_lower):
    before = chosen.memory
    after = calibrate.corrected_memory(before, calibrate.Correction(peak=calibrate.factor_of(ratios)))
    assert (after.need_bytes < before.need_bytes) is is_lower
    after = calibrate.corrected_memory(before, calibrate.Correction(peak=calibrate.factor_of([1.1])))
    assert after.need_bytes - before.need_bytes == after.peak_allocated_bytes - before.peak_allocated_bytes > 0


def test_the_range_narrows_to_what_runs_scatter(chosen: Candidate) -> None:
    def width(memory: MemoryEstimate) -> float:
        return (memory.peak_allocated_bytes - memory.low_bytes) / memory.peak_allocated_bytes

    firm = calibrate.corrected_memory(
        chosen.memory, calibrate.Correction(peak=calibrate.factor_of([1.0, 1.001, 0.999]))
    )
    assert width(firm) == pytest.approx(0.01, abs=0.001)
    assert width(firm) < width(chosen.memory)
    assert calibrate.corrected_memory(chosen.memory, calibrate.NO_CORRECTION) == chosen.memory


def test_reserved_and_device_bytes_have_factors_of_their_own(chosen: Candidate) -> None:
    reserved = {"predicted_reserved_bytes": 60, "measured_reserved_bytes": 66}
    record, before = record_of(**reserved, predicted_device_bytes=70, measured_device_bytes=63), chosen.memory
    after = calibrate.corrected_memory(before, correction(*[record] * 3))
    assert after.peak_reserved_bytes == pytest.approx(1.1**0.75 * before.peak_reserved_bytes, abs=2)
    assert after.device_bytes == pytest.approx(0.9**0.75 * before.device_bytes, abs=2)


def plan_after(*records: CalibrationRecord, **facts: Any):
    return plan_of("8b", H100S, calibration=calibration_of(*records), **facts)


def test_a_plan_is_as_much_slower_as_its_runs_were_and_says_so() -> None:
    before = plan_of("8b", H100S, pin={"sharding": Sharding.FSDP})
    after = plan_after(*[record_of(1.2)] * 9, pin={"sharding": Sharding.FSDP})
    speed, was = after.chosen.speed, before.chosen.speed
    factor = 1.2**0.9
    assert speed.step_s == pytest.approx(factor * was.step_s)
    assert sum(speed.parts.values()) == pytest.approx(speed.step_s)
    assert speed.tokens_per_s_per_gpu == pytest.approx(was.tokens_per_s_per_gpu / factor)
    assert speed.mfu == pytest.approx(was.mfu / factor)
    (note,) = [note for note in after.notes if "1.18" in note]
    assert all(fact in note for fact in ("9 runs", "0.0%", "1.2 of"))


def test_runs_of_one_row_do_not_turn_the_ranking_around() -> None:
    before, after = plan_of("8b", H100S), plan_after(*[record_of(2.0)] * 3)
    # Only the step is corrected, not the start-up of torch.compile, so that candidates far behind may change places.
    assert [c.strategy.name for c in after.candidates[:10]] == [c.strategy.name for c in before.candidates[:10]]


def test_a_setting_that_runs_show_not_to_fit_is_no_longer_taken() -> None:
    records, spec, pin = [record_of(1.0, 1.5)] * 3, "4xA100-SXM4-80GB", {"sharding": Sharding.FSDP}
    plain = plan_of("8b", spec, pin=pin).chosen
    careful = plan_of("8b", spec, pin=pin, calibration=calibration_of(*records)).chosen
    assert plain.memory.fits and careful.memory.fits
    assert not calibrate.corrected_memory(plain.memory, correction(*records)).fits


@pytest.mark.parametrize(
    ("model", "spec", "pin", "speed", "peak"),
    [
        ("8b", H100S, {"sharding": Sharding.ZERO2}, "within 25 %", "ZeRO: 9 peaks of one H100"),
        ("8b", H100S, {"sharding": Sharding.FSDP}, "within 25 %", "within 5 %; 17 published peaks"),
        ("1b", "1xRTX-4090", {"offload": Offload.NONE, "activation_offload": False}, "within 70 %",
         "within 15 %; 17 published peaks"),
        ("1b", "1xA100-SXM4-80GB-MIG-3g.40gb", {}, "within 70 %", "within 15 %; 17 published peaks"),
        ("1b", "1xH100-SXM5-80GB", {"offload": Offload.OPTIMIZER}, "within 30 %",
          "ZeRO: 9 peaks of one H100"),
        ("tiny", "1xCPU", {}, "within a factor of 2", "within 2 %"),
    ],
)  # fmt: skip
def test_without_a_run_a_plan_states_what_was_compared(model, spec, pin, speed, peak):
    (note,) = [note for note in plan_of(model, spec, pin=pin).notes if note.startswith("no run on this device")]
    assert note.endswith(f": expect tokens/s {speed}, peak memory {peak}")


def test_runs_that_are_not_used_are_counted() -> None:
    notes = plan_after(record_of(shardwise=None, precision=None), record_of(num_parameters=10**6)).notes
    assert [note for note in notes if note.startswith("no run like this one") and "within 25 %" in note]
    assert [note for note in notes if note.startswith("2 runs ") and "another version" in note]


def test_after_a_trial_a_row_takes_the_time_it_took_and_the_others_follow() -> None:
    before = plan_of("8b", H100S)
    first, second, third, *_ = before.candidates
    taken = ((first, 9.0), (second, 8.0))
    trials = tuple(trial_of(each, step_s, predicted_step_s=each.speed.step_s) for each, step_s in taken)
    after = plan_of("8b", H100S, trials=trials)
    times = {candidate.strategy.name: candidate.speed.step_s for candidate in after.candidates}
    assert after.chosen.strategy == second.strategy
    assert [times[first.strategy.name], times[second.strategy.name]] == pytest.approx([9.0, 8.0])
    factor = calibrate.factor_of([step_s / each.speed.step_s for each, step_s in taken])
    assert times[third.strategy.name] == pytest.approx(factor.value * third.speed.step_s)
    settings = [{(c.strategy.name, c.micro_batch) for c in plan.candidates} for plan in (before, after)]
    assert settings[0] == settings[1]
    assert any(note.startswith("trial: ") and "9 s" in note and "8 s" in note for note in after.notes)
    assert not any("no run on this device" in note for note in after.notes)
