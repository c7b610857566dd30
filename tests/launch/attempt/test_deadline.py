"""A run stops ahead of a time limit by itself, once, and leaves room for what it has seen a step and a save take."""

import io
import time

import pytest

from launch.attempt.limits import MAX_MARGIN_S, Deadline
from launch.attempt.supervisor import StopKind, StopRequest
from launch.attempt.watchdog import Watchdog
from launch.terminal import Console


@pytest.mark.parametrize(("left_s", "margin_s"), [(60, 6), (3600, MAX_MARGIN_S)])
def test_of_a_short_job_the_margin_is_short(left_s, margin_s):
    deadline = Deadline.in_seconds(left_s)
    assert deadline.margin_s == margin_s and deadline.moment_s == pytest.approx(time.monotonic() + left_s, abs=5)


@pytest.mark.parametrize(("left_s", "stops"), [(1000, False), (40, True), (-5, True)])
def test_the_stop_comes_when_the_margin_is_all_that_is_left(tmp_path, left_s, stops):
    stop, told = StopRequest(), io.StringIO()
    watchdog = Watchdog(tmp_path, num_ranks=1)
    deadline = Deadline(time.monotonic() + left_s, margin_s=45)
    for _ in range(2):
        deadline.stop_in_time(stop, watchdog, Console(told))
    assert (stop.kind is StopKind.REQUEUE) is stops
    assert told.getvalue().count("checkpoint") == (1 if stops else 0)
