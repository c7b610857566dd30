"""The model of the caching allocator, on traces short enough to be worked out by hand."""

from collections.abc import Sequence

import pytest

from shardwise.trainer.simulation.device_memory import TraceEvent, min_capacity_bytes, replay
from shardwise.trainer.spec.units import MIB


def trace(*events: tuple[str, float]) -> list[TraceEvent]:
    """Events as names: `("a", 3)` allocates 3 MiB as `a`, `("-a", 0)` frees it."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name.lstrip("-") for name, _ in events))}
    return [
        TraceEvent(is_free=name.startswith("-"), number=numbers[name.lstrip("-")], num_bytes=int(size * MIB))
        for name, size in events
    ]


@pytest.mark.parametrize(
    ("events", "allocated_mib", "reserved_mib"),
    [
        ([("a", 1)], 1, 2),  # a small segment is 2 MiB
        ([("a", 1), ("b", 1)], 2, 2),
        ([("a", 1), ("b", 1), ("c", 0.5)], 2.5, 4),
        ([("a", 3)], 3, 20),  # a medium one 20
        ([("a", 3), ("b", 17)], 20, 20),  # what is left of it is used
        ([("a", 3), ("b", 18)], 21, 38),  # or not, where it is too little: a large one has the requested size, even
        ([("a", 15)], 16, 16),  # 1 MiB left over is no block, and counts as allocated
        ([("a", 14.5)], 14.5, 16),  # 1.5 MiB are
        ([("a", 14.5), ("-a", 0), ("b", 13)], 14.5, 16),
        ([("a", 30), ("b", 20), ("-a", 0), ("-b", 0), ("c", 20), ("d", 30)], 50, 50),  # the best fit, not the first
        ([("a", 3), ("b", 4), ("-a", 0), ("-b", 0), ("c", 19)], 20, 20),  # neighbours join when they are free
        ([("a", 3), ("b", 4), ("c", 2), ("-a", 0), ("-c", 0), ("d", 15)], 20, 36),  # but not across one in use
        ([("a", 0.5), ("b", 3), ("-b", 0), ("c", 0.5)], 3.5, 22),  # pools do not lend to each other
    ],
)
def test_what_is_reserved_for_a_trace(
    events: Sequence[tuple[str, float]], allocated_mib: float, reserved_mib: float
) -> None:
    done = replay(trace(*events))
    assert (done.peak_allocated_bytes / MIB, done.peak_reserved_bytes / MIB) == (allocated_mib, reserved_mib)


def test_a_request_is_rounded_up_to_512_bytes() -> None:
    one = TraceEvent(is_free=False, number=0, num_bytes=1)
    assert replay([one]).peak_allocated_bytes == 512


GROWING = trace(("a", 40), ("-a", 0), ("b", 50), ("-b", 0), ("c", 60))


def test_segments_that_are_too_small_stay_reserved() -> None:
    assert replay(GROWING).peak_reserved_bytes == 150 * MIB


def test_at_a_limit_free_segments_go_back_to_the_device() -> None:
    done = replay(GROWING, limit_bytes=60 * MIB)
    assert (done.ran_out, done.peak_reserved_bytes) == (False, 60 * MIB)


def test_below_what_is_live_nothing_helps() -> None:
    assert replay(GROWING, limit_bytes=60 * MIB - 1).ran_out


def test_a_segment_in_use_is_not_given_back() -> None:
    """3 MiB of 20 are in use, so that 17 of the 37 are lost."""
    held = trace(("a", 17), ("b", 3), ("-a", 0), ("c", 18))
    assert not replay(held, limit_bytes=(18 + 20) * MIB).ran_out
    pinned = trace(("a", 3), ("b", 8), ("-b", 0), ("c", 18))
    assert replay(pinned, limit_bytes=(18 + 20) * MIB - 1).ran_out


def test_the_smallest_capacity_is_found_to_within_its_tolerance() -> None:
    found = min_capacity_bytes(GROWING, replay(GROWING))
    assert 60 * MIB <= found <= 60 * MIB * (1 + 1 / 256)
    assert not replay(GROWING, limit_bytes=found).ran_out


@pytest.mark.parametrize(
    ("events", "reserved_mib"),
    [
        ([("a", 1)], 2),
        ([("a", 3)], 20),
        ([("a", 15)], 20),
        ([("a", 40), ("-a", 0), ("b", 50)], 60),  # the end grows by 20, where a new segment took 50
        ([("a", 40), ("b", 20), ("-a", 0), ("c", 50)], 120),  # what is free before it cannot grow
        ([("a", 40), ("b", 20), ("-a", 0), ("c", 30), ("d", 10)], 60),
    ],
)
def test_an_expandable_segment_grows_at_its_end(events: Sequence[tuple[str, float]], reserved_mib: float) -> None:
    assert replay(trace(*events), is_expandable=True).peak_reserved_bytes / MIB == reserved_mib
