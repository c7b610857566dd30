"""The tracker on real tensors of the CPU, whose sizes are counted as they are; the model of the caching allocator."""

from collections.abc import Sequence

import pytest
import torch

from shardwise.trainer.simulation.device_memory import Kind, TraceEvent, Tracker, min_capacity_bytes, replay
from shardwise.trainer.simulation.kernels import LigerLoss
from shardwise.trainer.spec.units import MIB

KILO = 1000  # elements of fp32: 4000 bytes


def test_a_storage_counts_until_its_last_tensor_is_gone() -> None:
    """Not what the data loader holds, nor outside; one that is resized in place is freed and filled again."""
    ids = torch.empty(KILO)
    with Tracker("cpu") as tracker:
        whole = torch.empty(KILO)
        part = whole[:10]
        del whole
        assert tracker.live_bytes == 4000
        del part
        tracker.omit([ids])
        shifted = ids[1:]
        assert (tracker.live_bytes, shifted.numel()) == (0, KILO - 1)
        gathered = torch.empty(KILO)
        gathered.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        gathered.untyped_storage().resize_(8000)
        assert tracker.live_bytes == tracker.peak_bytes == 8000
    assert [event.num_bytes for event in tracker.trace] == [4000, 4000, 4000, 4000, 8000]
    torch.empty(KILO).untyped_storage().resize_(0)
    assert (tracker.live_bytes, len(tracker.trace)) == (8000, 5)


def test_the_largest_moment_of_each_event_is_kept() -> None:
    with Tracker("cpu") as tracker:
        tracker.begin("first")
        retained = torch.empty(KILO)
        torch.empty(2 * KILO)
        tracker.begin("second")
        more = torch.empty(KILO)
        tracker.begin("clip")  # which allocates nothing, and holds what was there before
    assert tracker.events == {"first": 12000, "second": 8000, "clip": 8000}
    assert (tracker.peak_event, tracker.peak_bytes, retained.numel() + more.numel()) == ("first", 12000, 2 * KILO)


def test_ligers_loss_sums_the_gradient_of_the_head_in_fp32() -> None:
    hidden, head = (torch.zeros(size, 16, dtype=torch.bfloat16, requires_grad=True) for size in (8, KILO))
    with Tracker("cpu") as tracker:
        LigerLoss()(head, hidden, torch.zeros(8, dtype=torch.long), None)
    in_fp32_and_rounded = (4 + 2) * head.numel()
    assert in_fp32_and_rounded <= tracker.peak_bytes < in_fp32_and_rounded + 10_000


def test_what_is_known_later_counts_at_the_peak_that_was() -> None:
    with Tracker("cpu") as tracker:
        tracker.start_measuring()
        tracker.begin("forward", is_forward=True)
        saved = torch.empty(KILO)
        tracker.begin("backward")
        gradient, temporary = torch.empty(2 * KILO), torch.empty(3 * KILO)
        del temporary
        tracker.mark([gradient], Kind.GRADIENTS)
    sizes = {storage.kind: storage.num_bytes for storage in tracker.at_peak()}
    assert sizes == {Kind.ACTIVATIONS: 4000, Kind.GRADIENTS: 8000, Kind.TEMPORARIES: 12000}
    assert saved.numel() == KILO


def test_on_a_gpu_sizes_are_those_of_the_allocator_in_blocks_of_512_bytes() -> None:
    with Tracker("meta") as exact:
        one = torch.empty(3, device="meta")
        assert exact.live_bytes == 12
    rounding = Tracker("cuda")
    assert (rounding._rounded(12), rounding._rounded(512), one.numel()) == (512, 512, 3)
    assert replay([TraceEvent(is_free=False, number=0, num_bytes=1)]).peak_allocated_bytes == 512


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
def test_what_is_reserved_for_a_trace(events, allocated_mib, reserved_mib):
    done = replay(trace(*events))
    assert (done.peak_allocated_bytes / MIB, done.peak_reserved_bytes / MIB) == (allocated_mib, reserved_mib)


GROWING = trace(("a", 40), ("-a", 0), ("b", 50), ("-b", 0), ("c", 60))


def test_segments_that_are_too_small_stay_reserved_until_they_go_back_to_the_device_at_a_limit() -> None:
    unlimited, limited = replay(GROWING), replay(GROWING, limit_bytes=60 * MIB)
    assert (unlimited.peak_reserved_bytes, limited.peak_reserved_bytes) == (150 * MIB, 60 * MIB)
    assert not limited.ran_out
    assert replay(GROWING, limit_bytes=60 * MIB - 1).ran_out, "below what is live"
    found = min_capacity_bytes(GROWING, unlimited)
    assert 60 * MIB <= found <= 60 * MIB * (1 + 1 / 256)
    assert not replay(GROWING, limit_bytes=found).ran_out


def test_a_segment_in_use_is_not_given_back() -> None:
    """3 MiB of 20 are in use, so that 17 of the 37 are lost."""
    held = trace(("a", 17), ("b", 3), ("-a", 0), ("c", 18))
    assert not replay(held, limit_bytes=(18 + 20) * MIB).ran_out
    pinned = trace(("a", 3), ("b", 8), ("-b", 0), ("c", 18))
    assert replay(pinned, limit_bytes=(18 + 20) * MIB - 1).ran_out


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
