"""Which steps are not taken, as a function of what the steps before had; and whose rows a step learns from."""

import math
from statistics import mean, stdev

import pytest

from shardwise.trainer.runtime.run.state import (
    LEAST_STEPS,
    SIGMAS,
    STEPS_UNTIL_ROLL_BACK,
    WINDOW_STEPS,
    PassedOver,
    SpikeRecord,
    after_roll_back,
    after_step,
    find_fault,
    step_of_rows,
)

LOSSES = tuple(2.0 + 0.25 * math.sin(step) for step in range(LEAST_STEPS))
NORMS = tuple(0.5 + 0.125 * math.cos(step) for step in range(LEAST_STEPS))
CALM = SpikeRecord(losses=LOSSES, grad_norms=NORMS)


@pytest.mark.parametrize("record", [SpikeRecord(), CALM])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_taken(record, value):
    assert find_fault(record, loss=value, grad_norm=0.5, skips_spikes=True) == "the loss is not finite"
    assert find_fault(record, loss=2.0, grad_norm=value, skips_spikes=True) == "the gradient norm is not finite"
    assert find_fault(record, loss=value, grad_norm=None, skips_spikes=True) == "the loss is not finite"


def test_a_spike_is_more_than_six_standard_deviations_above_the_mean():
    edge = mean(LOSSES) + SIGMAS * stdev(LOSSES)
    assert find_fault(CALM, loss=edge - 1e-9, grad_norm=0.5, skips_spikes=True) is None
    fault = find_fault(CALM, loss=edge + 1e-9, grad_norm=0.5, skips_spikes=True)
    assert fault is not None and fault.startswith(f"the loss, {edge:.4g}, is 6 sigma above the mean of the last 64")
    edge = mean(NORMS) + SIGMAS * stdev(NORMS)
    assert find_fault(CALM, loss=2.0, grad_norm=edge - 1e-9, skips_spikes=True) is None
    assert "the gradient norm" in (find_fault(CALM, loss=2.0, grad_norm=edge + 1e-9, skips_spikes=True) or "")


def test_a_spike_is_a_fault_only_on_request():
    assert find_fault(CALM, loss=1e9, grad_norm=1e9, skips_spikes=True) is not None
    assert find_fault(CALM, loss=1e9, grad_norm=1e9, skips_spikes=False) is None
    assert find_fault(CALM, loss=math.nan, grad_norm=0.5, skips_spikes=False) == "the loss is not finite"


def test_before_half_a_window_only_what_is_not_finite_is_a_fault():
    young = SpikeRecord(losses=LOSSES[1:], grad_norms=NORMS[1:])
    assert find_fault(young, loss=1e9, grad_norm=1e9, skips_spikes=True) is None
    assert find_fault(CALM, loss=-1e9, grad_norm=0.0, skips_spikes=True) is None, "what falls is no spike"


@pytest.mark.parametrize("level", [2.0, 1e-6, 0.0])
def test_where_nothing_varies_a_little_more_is_no_spike(level):
    record = SpikeRecord(losses=(level,) * WINDOW_STEPS)
    assert find_fault(record, loss=level * 1.11, grad_norm=None, skips_spikes=True) is None
    assert find_fault(record, loss=level * 1.13 + 1e-3, grad_norm=None, skips_spikes=True) is not None


def test_the_window_is_the_last_steps_that_were_taken():
    record = SpikeRecord()
    for step in range(1, 3 * WINDOW_STEPS + 1):
        fault = "a spike" if step % 10 == 0 else None
        record = after_step(
            record, step=step, loss=float(step), grad_norm=step / 2, fault=fault, was_skipped=fault is not None
        )
    taken = [float(step) for step in range(1, 3 * WINDOW_STEPS + 1) if step % 10][-WINDOW_STEPS:]
    assert record.losses == tuple(taken)
    assert record.grad_norms == tuple(step / 2 for step in taken)
    assert record.skipped_steps == tuple(range(10, 3 * WINDOW_STEPS + 1, 10))


def test_steps_in_a_row_are_counted_until_one_is_taken():
    record = CALM
    for step in range(7, 7 + STEPS_UNTIL_ROLL_BACK):
        fault = find_fault(record, loss=9.0, grad_norm=0.5, skips_spikes=True)
        assert fault is not None, "a spike that stays is one to the end"
        record = after_step(record, step=step, loss=9.0, grad_norm=0.5, fault=fault, was_skipped=step != 8)
    assert (record.in_a_row, record.losses, record.grad_norms) == (STEPS_UNTIL_ROLL_BACK, LOSSES, NORMS)
    assert record.skipped_steps == (7, 9, 10, 11), "step 8 was a fault that was found too late to skip it"
    record = after_step(record, step=12, loss=2.0, grad_norm=0.5, fault=None, was_skipped=False)
    assert (record.in_a_row, record.losses[-1]) == (0, 2.0)


def test_a_step_learns_from_its_own_rows_unless_rows_were_passed_over():
    assert [step_of_rows(step, ()) for step in (1, 2, 9)] == [1, 2, 9]
    once = (PassedOver(after_step=4, num_steps=3),)
    assert [step_of_rows(step, once) for step in range(1, 8)] == [1, 2, 3, 4, 8, 9, 10]
    twice = (*once, PassedOver(after_step=6, num_steps=2))
    assert [step_of_rows(step, twice) for step in range(1, 9)] == [1, 2, 3, 4, 8, 9, 12, 13]


def test_after_going_back_the_next_rows_are_those_after_the_fault():
    first = after_roll_back(CALM, saved_step=4, step=7)
    assert step_of_rows(5, first.passed_over) == 8
    assert first.losses == LOSSES and first.in_a_row == 0
    led_here = step_of_rows(11, first.passed_over)
    second = after_roll_back(first, saved_step=9, step=11)
    assert step_of_rows(10, second.passed_over) == led_here + 1
    assert step_of_rows(9, second.passed_over) == step_of_rows(9, first.passed_over)
