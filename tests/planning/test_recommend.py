"""What would help, in exact sentences; nothing where it gains less than a twentieth, or nobody measured it."""

from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import data_of, plan_of
from report_factory import make_report

from shardwise.trainer.planning.explain import recommend
from shardwise.trainer.planning.explain.recommend import Observed, recommendations, unused_bytes
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.hardware import MeasuredRates
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import AttemptRecord, DeviceTime, Ending, Fault, Report, predicted_figures
from shardwise.trainer.spec.strategy import Checkpointing
from shardwise.trainer.spec.units import GIB

CARDS = "4xA100-SXM4-80GB"


def report_of(plan: Plan, *, peak_factor: float = 1.0, step_factor: float = 1.0, **changes: Any) -> Report:
    """The plan ran, and measured what was predicted, or so many times as much."""
    predicted = predicted_figures(plan.chosen)
    peak_bytes, step_s = predicted.memory.peak_allocated_bytes, predicted.speed.step_s
    memory = replace(predicted.memory, peak_allocated_bytes=int(peak_factor * peak_bytes))
    measured = replace(predicted, memory=memory, speed=replace(predicted.speed, step_s=step_factor * step_s))
    return make_report(plan=plan.chosen, predicted=predicted, measured=measured, **changes)


EAGER = {"compile": False}
SMALL = {"micro_batch": 1, "checkpointing": Checkpointing.FULL, **EAGER}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("8b", CARDS, pin=EAGER)


def said(plan: Plan, report: Report | None = None, **observed: Any) -> list[str]:
    found = recommendations(plan, report or report_of(plan), Observed(**observed))
    return [each.text for each in found]


def test_a_run_of_the_plan_s_own_choice_that_lost_nothing_is_told_nothing(plan: Plan) -> None:
    assert said(plan) == []
    assert said(plan, data_share=0.01, wait_share=0.0, padding_share=0.0, saving_share=0.01, num_saves=9) == []


def test_unused_memory_is_told_with_what_it_would_give_and_everything_that_goes_with_it() -> None:
    pinned = plan_of("8b", CARDS, pin=SMALL)
    (text,) = said(pinned)
    assert all(fact in text for fact in ("15.6 GiB", "1.30x", "(pin.checkpointing=none)"))
    free = plan_of("8b", CARDS, pin={"micro_batch": 1} | EAGER)
    assert free.chosen.strategy == pinned.chosen.strategy
    (found,) = recommendations(pinned, report_of(pinned), Observed())
    assert found.gain == pytest.approx(pinned.chosen.speed.step_s / free.chosen.speed.step_s)
    (text,) = said(plan_of("1b", "1xA100-SXM4-80GB", pin={"micro_batch": 1} | EAGER, seq_len=256))
    assert all(fact in text for fact in ("GiB unused", "micro batch 32", "predicted 5.", "pin.micro_batch=32"))


def test_what_is_recommended_fits_by_the_measured_peak() -> None:
    pinned = plan_of("8b", CARDS, pin=SMALL)
    assert "pin.checkpointing=none" in said(pinned, report_of(pinned, peak_factor=0.7))[0]
    more = said(pinned, report_of(pinned, peak_factor=1.25))
    assert not any("pin.checkpointing=none" in text for text in more), "it would need more than is left"
    assert said(pinned, report_of(pinned, peak_factor=2.0)) == []


def test_unused_is_what_the_measured_peak_leaves(plan: Plan) -> None:
    report, memory = report_of(plan), plan.chosen.memory

    def measured(peak_bytes: int | None) -> Report:
        figures = replace(report.measured.memory, peak_allocated_bytes=peak_bytes)
        return replace(report, measured=replace(report.measured, memory=figures))

    assert unused_bytes(report) == memory.usable_bytes - memory.need_bytes
    assert unused_bytes(measured(memory.peak_allocated_bytes + GIB)) == unused_bytes(report) - GIB
    assert unused_bytes(measured(None)) is None
    assert said(plan, measured(None)) == []


def test_a_better_strategy_is_named_with_the_pin_to_leave_out_or_its_number() -> None:
    pinned = plan_of("8b", "8xH100-SXM5-80GB", pin={"offload": Offload.OPTIMIZER} | EAGER)
    free = plan_of("8b", "8xH100-SXM5-80GB", pin=EAGER).chosen
    (text,) = said(pinned)
    assert text.startswith(f"{free.strategy.name}, micro batch {free.micro_batch}, ")
    assert all(fact in text for fact in ("exact and predicted ", "GiB of 79.1 GiB", "pin.offload"))
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin=EAGER)
    slow = next(each for each in plan.candidates if each.strategy.offload is Offload.OPTIMIZER)
    (text,) = said(replace(plan, candidates=(slow, *(each for each in plan.candidates if each is not slow))))
    assert text.startswith(f"{plan.chosen.strategy.name}, micro batch") and "--take" in text


def test_after_an_out_of_memory_nothing_is_said_of_room() -> None:
    pinned = plan_of("8b", CARDS, pin=SMALL)
    record = AttemptRecord(
        number=1, strategy="s", num_ranks=4, micro_batch=1, accumulation=1, resumed_from_step=None, step=3,
        ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY, duration_s=1.0, predicted_peak_bytes=1,
    )  # fmt: skip
    assert said(pinned, report_of(pinned, history=(record,))) == []
    killed = replace(record, fault=Fault.KILLED, ending=Ending.FAILED)
    assert len(said(pinned, report_of(pinned, history=(killed,)))) == 1


@pytest.mark.parametrize(
    ("observed", "facts"),
    [
        ({"data_share": 0.2}, ("20%", "XDG_CACHE_HOME", "1.25x")),
        ({"wait_share": 0.1}, ("10%", "slowest rank", "1.11x")),
        ({"num_steps": 50, "num_skipped": 10}, ("10 of 50", "train.lr below 1e-05", "1.25x")),
        ({"idle_share": 0.45, "data_share": 0.02, "wait_share": 0.03}, ("40%", "pin.compile=true", "1.67x")),
        ({"throttle": "temperature", "throttled_slowdown": 1.3}, ("temperature", "1.30x")),
    ],
)
def test_time_that_was_lost_is_told_with_what_it_is_worth(plan, observed, facts):
    at_lr = replace(plan, schedule=replace(plan.schedule, lr=1e-5))
    (text,) = said(at_lr, **observed)
    assert all(fact in text for fact in facts)


@pytest.mark.parametrize(
    "observed",
    [
        {"data_share": 0.04}, {"wait_share": 0.04}, {"num_steps": 50, "num_skipped": 2},
        {"num_steps": 5, "num_skipped": 5}, {"idle_share": 0.04, "data_share": 0.0},
        {"throttle": "temperature", "throttled_slowdown": 1.04}, {"throttle": "power cap"},
        {"saving_share": 0.5, "num_saves": 2}, {"padding_share": 0.5},
    ],
)  # fmt: skip
def test_what_gains_too_little_or_is_not_known_is_not_said(plan: Plan, observed: dict[str, Any]) -> None:
    assert [text for text in said(plan, **observed) if "data" not in text or "data_share" in observed] == []


def test_a_sample_of_the_device_outranks_the_counter_of_the_driver(plan: Plan) -> None:
    sampled = replace(report_of(plan), device_time=DeviceTime(num_steps=2, idle_share=0.42))
    told = said(plan, sampled, idle_share=0.9, data_share=0.02, wait_share=0.3)
    (text,) = [each for each in told if "ran nothing" in each]
    assert all(fact in text for fact in ("40%", "pin.compile=true", "1.67x"))
    assert said(plan, replace(sampled, device_time=DeviceTime(num_steps=2, idle_share=0.04)), idle_share=0.9) == []


def test_graph_breaks_are_counted_with_their_most_common_reason(plan: Plan) -> None:
    report = report_of(plan)
    assert report.verified is not None
    breaks = {"Call to `print`": 7, "Unsupported context manager": 2}
    (text,) = said(plan, replace(report, verified=replace(report.verified, graph_breaks=breaks)))
    assert all(fact in text for fact in ("9 graph breaks", "7: Call to `print`", "TORCH_LOGS=graph_breaks"))


def test_padding_is_told_where_rows_can_be_packed_and_a_stream_is_told_to_be_prepared(plan: Plan) -> None:
    padded = plan_of("1b", CARDS, data=data_of(is_packed=False))
    (text,) = said(padded, padding_share=0.34)
    assert all(fact in text for fact in ("34%", "data.packing=true", "1.52x"))
    for facts in ({"format": DataFormat.PREFERENCE}, {"is_packed": True}):
        assert text not in said(replace(padded, data=replace(padded.data, **facts)), padding_share=0.34)
    (text,) = said(replace(plan, data=replace(plan.data, is_stream=True)), data_share=0.5)
    assert all(fact in text for fact in ("50%", "data.streaming=false", "2.00x"))


def test_an_interval_that_costs_much_is_told_a_longer_one(plan: Plan) -> None:
    waits = replace(plan, job=replace(plan.job, checkpoint=replace(plan.job.checkpoint, is_async=False)))
    by_steps = replace(waits, schedule=replace(waits.schedule, checkpoint_every_steps=100, checkpoint_every_s=None))
    (text,) = said(by_steps, saving_share=0.2, num_saves=3)
    assert all(fact in text for fact in ("20%", '"checkpoint.every=2475 steps"', "checkpoint.async=true", "1.24x"))
    by_time = replace(plan, schedule=replace(plan.schedule, checkpoint_every_steps=None, checkpoint_every_s=1200))
    (text,) = said(by_time, saving_share=0.1, num_saves=3)
    assert all(fact in text for fact in ("10%", '"checkpoint.every=220 min"', "1.10x"))
    assert "checkpoint.async" not in text


def test_an_unusual_error_is_told_until_the_machine_was_measured(plan: Plan) -> None:
    step_s = plan.chosen.speed.step_s
    off = report_of(plan, step_factor=2.0)
    (text,) = said(plan, off)
    commands = ("shardwise probe --measure -o hardware.json ", "shardwise plan --hardware hardware.json ")
    assert all(fact in text for fact in (f"{2 * step_s:.3g} s", f"{step_s:.3g} s", *commands))
    assert said(plan, report_of(plan, step_factor=0.5)) != [] and said(plan, report_of(plan, step_factor=1.14)) == []
    measured = replace(plan, hardware=replace(plan.hardware, rates=MeasuredRates(matmul_flops_per_s=10**14)))
    assert not any("probe" in text for text in said(measured, off))
    on_cpu = plan_of("tiny", "1xCPU")  # where a factor of two is usual
    assert [len(said(on_cpu, report_of(on_cpu, step_factor=factor))) for factor in (1.9, 2.1)] == [0, 1]


def test_the_best_come_first_and_at_most_five_are_said(plan: Plan) -> None:
    lost: dict[str, Any] = {"data_share": 0.1, "wait_share": 0.2, "idle_share": 0.9, "throttle": "temperature"}
    observed = Observed(**lost, num_steps=100, num_skipped=30, throttled_slowdown=1.07)
    found = recommendations(plan, report_of(plan, step_factor=3.0), observed)
    gains = [each.gain or 0.0 for each in found]
    assert (
        len(found) == recommend.MAX_RECOMMENDATIONS
        and gains == sorted(gains, reverse=True)
        and min(gains) >= recommend.LEAST_GAIN
    )
    assert not any("probe --measure" in each.text for each in found), "what gains no speed comes last"


def test_busy_cores_and_a_loss_above_guessing_come_first_and_are_not_contradicted(plan: Plan) -> None:
    report = report_of(plan, step_factor=3.0)
    measured = replace(report.measured, speed=replace(report.measured.speed, queued_share=0.76))
    last = replace(report.evaluations[-1], loss=6.5, unigram_entropy_nats=6.25)
    worse, busy = said(plan, replace(report, measured=measured, evaluations=(last,)))
    assert "6.5000" in worse and "6.2500" in worse and "76%" in busy
    learned = replace(last, loss=6.0)
    (text,) = said(plan, replace(report, evaluations=(learned,)))
    assert "probe --measure" in text
