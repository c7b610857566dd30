"""The tracker on real tensors of the CPU, whose sizes are counted as they are."""

import torch

from shardwise.trainer.simulation.device_memory import Kind, Tracker
from shardwise.trainer.simulation.kernels import LigerLoss

KILO = 1000  # elements of fp32: 4000 bytes


def test_a_storage_counts_until_its_last_tensor_is_gone() -> None:
    with Tracker("cpu") as tracker:
        whole = torch.empty(KILO)
        part = whole[:10]
        del whole
        assert tracker.live_bytes == 4000
        del part
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 4000


def test_the_largest_moment_of_each_event_is_kept() -> None:
    with Tracker("cpu") as tracker:
        tracker.begin("first")
        retained = torch.empty(KILO)
        torch.empty(2 * KILO)
        tracker.begin("second")
        more = torch.empty(KILO)
    assert tracker.events == {"first": 12000, "second": 8000}
    assert (tracker.peak_event, tracker.peak_bytes, retained.numel() + more.numel()) == ("first", 12000, 2 * KILO)


def test_an_event_that_allocates_nothing_holds_what_was_there_before() -> None:
    with Tracker("cpu") as tracker:
        retained = torch.empty(KILO)
        tracker.begin("clip")
    assert tracker.events["clip"] == 4000 == retained.nbytes


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


def test_a_storage_that_is_resized_in_place_is_freed_and_filled_again() -> None:
    with Tracker("cpu") as tracker:
        gathered = torch.empty(KILO)
        gathered.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        gathered.untyped_storage().resize_(8000)
        assert tracker.live_bytes == 8000
    assert [event.num_bytes for event in tracker.trace] == [4000, 4000, 8000]


def test_what_the_data_loader_holds_is_left_out() -> None:
    ids = torch.empty(KILO)
    with Tracker("cpu") as tracker:
        tracker.omit([ids])
        shifted = ids[1:]
        assert (tracker.live_bytes, shifted.numel()) == (0, KILO - 1)


def test_on_a_gpu_sizes_are_those_of_the_allocator_in_blocks_of_512_bytes() -> None:
    with Tracker("meta") as exact:
        one = torch.empty(3, device="meta")
        assert exact.live_bytes == 12
    rounding = Tracker("cuda")
    assert (rounding._rounded(12), rounding._rounded(512), one.numel()) == (512, 512, 3)


def test_outside_of_it_nothing_is_counted() -> None:
    with Tracker("cpu") as tracker:
        pass
    torch.empty(KILO).untyped_storage().resize_(0)
    assert (tracker.live_bytes, tracker.trace) == (0, [])
