"""Allocated bytes over a step: the running sum of events, by phase."""

import pytest

from shardwise.trainer.runtime.profile.memory_profile import MAX_POINTS, Curve, timeline_of_spans
from shardwise.trainer.runtime.run.clock import Span

SPANS = (Span("forward", 100, 200), Span("backward", 210, 300), Span("optimizer", 310, 400))
EVENTS = [(110, 50), (150, -20), (205, 5), (220, 100), (290, -130), (320, 7), (330, -7)]


def test_a_phase_peaks_at_the_most_that_was_held_in_it():
    assert Curve(EVENTS, 1000, SPANS).peaks() == {"forward": 1050, "backward": 1135, "optimizer": 1012}


def test_a_phase_without_an_event_holds_what_was_there():
    assert Curve([(110, 50)], 1000, SPANS).peaks() == {"forward": 1050, "backward": 1050, "optimizer": 1050}
    assert Curve([], 1000, SPANS).peaks() == {"forward": 1000, "backward": 1000, "optimizer": 1000}


def test_phases_that_come_again_are_taken_together():
    twice = (Span("forward", 0, 10), Span("backward", 10, 20), Span("forward", 20, 30), Span("backward", 30, 40))
    assert Curve([(5, 10), (12, 90), (19, -95), (25, 30)], 0, twice).peaks() == {"forward": 35, "backward": 100}


def test_the_timeline_counts_from_the_first_moment_and_names_the_phases():
    points = Curve(EVENTS, 1000, SPANS).timeline()
    assert [point.phase for point in points] == [*["forward"] * 2, "", *["backward"] * 2, *["optimizer"] * 2]
    assert [point.allocated_bytes for point in points] == [1050, 1030, 1035, 1135, 1005, 1012, 1005]
    assert points[0].at_s == pytest.approx(10e-9)
    assert Curve([], 1000, SPANS).timeline() == ()


def test_a_long_timeline_keeps_its_highest_point():
    events = [(100 + number, 1 if number % 2 else -1) for number in range(10_000)]
    events[5001:5001] = [(5100, 10**6), (5100, -(10**6))]
    points = Curve(events, 0, (Span("forward", 0, 20_000),)).timeline()
    assert len(points) <= MAX_POINTS and max(point.allocated_bytes for point in points) >= 10**6 - 1


def test_a_device_that_counts_no_moments_has_three_points_a_phase():
    spans = (Span("forward", 100, 200, 10, 50, 40), Span("backward", 200, 300, 40, 90, 20))
    assert [(round(point.at_s * 1e9), point.allocated_bytes, point.phase) for point in timeline_of_spans(spans)] == [
        (0, 10, "forward"),
        (50, 50, "forward"),
        (100, 40, "forward"),
        (100, 40, "backward"),
        (150, 90, "backward"),
        (200, 20, "backward"),
    ]
    assert timeline_of_spans(()) == ()
