"""The cards to plan for, and the sentences for the others."""

import pytest

from shardwise.launch.probe.gpus import select_gpus, visible_devices, visible_gpus
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Gpu, GpuProcess
from shardwise.trainer.spec.units import GIB


def make_gpu(index, **changes):
    values = {
        "name": "NVIDIA GeForce RTX 3090",
        "spec_name": "RTX-3090",
        "memory_bytes": 24 * GIB,
        "free_bytes": 24 * GIB,
        "uuid": f"GPU-{index}aaa",
        "compute_capability": (8, 6),
    }
    return Gpu(index=index, **{**values, **changes})


def make_4090(index, **changes):
    return make_gpu(index, name="NVIDIA GeForce RTX 4090", spec_name="RTX-4090", compute_capability=(8, 9), **changes)


def indices(gpus):
    return [gpu.index for gpu in gpus]


def test_equal_idle_cards_are_all_used_unless_some_are_requested_that_exist():
    gpus = (make_gpu(0), make_gpu(1))
    assert select_gpus(gpus, wanted=None) == (gpus, ())
    assert select_gpus([], wanted=None) == ((), ())
    chosen, (excluded,) = select_gpus([make_gpu(index) for index in range(8)], wanted=(1, 0))
    assert indices(chosen) == [0, 1]
    assert "GPUs 2 to 7" in excluded and "--gpus 1,0" in excluded
    with pytest.raises(InputError, match=r"--gpus 0,5: .*GPU 5.*GPUs 0 and 1"):
        select_gpus([make_gpu(0), make_gpu(1)], wanted=(0, 5))
    with pytest.raises(InputError, match="no GPU"):
        select_gpus([], wanted=(0,))


def test_a_busy_card_is_skipped_with_its_process_and_used_if_requested():
    process = GpuProcess(pid=4242, name="python", memory_bytes=12 * GIB)
    gpus = (make_gpu(0), make_gpu(1, free_bytes=12 * GIB, processes=(process,)))
    chosen, (excluded,) = select_gpus(gpus, wanted=None)
    assert indices(chosen) == [0]
    for fact in ("GPU 1 ", "python (pid 4242)", "12 GiB of 24 GiB", "--gpus 1"):
        assert fact in excluded
    assert select_gpus(gpus, wanted=(0, 1)) == (gpus, ())


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({"free_bytes": 18 * GIB}, True),  # a display uses a quarter at most
        ({"free_bytes": int(17.9 * GIB)}, False),
        ({"usable_bytes": 17 * GIB, "free_bytes": 17 * GIB}, True),  # what the driver keeps for itself
    ],
)
def test_a_card_is_busy_from_a_quarter_of_its_memory_on(changes, is_used):
    chosen, _ = select_gpus([make_gpu(0), make_gpu(1, **changes)], wanted=None)
    assert (1 in indices(chosen)) is is_used


@pytest.mark.parametrize(
    ("free_gib", "used"), [([10, 10, 1], [0, 1]), ([2, 16, 3], [1]), ([10], [0]), ([9, 8, 7], [0, 1, 2])]
)
def test_if_all_are_busy_the_most_free_memory_is_selected(free_gib, used):
    gpus = [make_gpu(index, free_bytes=free * GIB) for index, free in enumerate(free_gib)]
    chosen, excluded = select_gpus(gpus, wanted=None)
    assert indices(chosen) == used
    assert len(excluded) == len(free_gib) - len(used)


UNKNOWN = make_gpu(0, name="X", spec_name=None, memory_bytes=80 * GIB, free_bytes=None)
OLD = make_gpu(0, name="Old", spec_name=None, compute_capability=(6, 1))
SMALL = make_gpu(0, memory_bytes=12 * GIB, free_bytes=12 * GIB)


@pytest.mark.parametrize(
    ("gpus", "chosen", "rest"),
    [
        # 2 x 24 GiB and 142 TFLOP/s are worth more than 1 x 24 GiB and 165
        ([make_4090(0), make_gpu(1), make_gpu(2)], [1, 2], "GPU 0 (NVIDIA GeForce RTX 4090, 24 GiB)"),
        ([make_4090(0), make_gpu(1)], [0], "GPU 1 (NVIDIA GeForce RTX 3090, 24 GiB)"),
        ([UNKNOWN, make_gpu(1)], [0], "GPU 1"),  # memory alone decides
        ([OLD, make_gpu(1, spec_name=None)], [1], "GPU 0 (Old"),  # equal memory: the newer chip
        ([SMALL, make_gpu(1)], [1], "GPU 0 (NVIDIA GeForce RTX 3090, 12 GiB)"),  # one name, two sizes
    ],
)
def test_of_several_models_the_best_equal_ones_are_planned_for_and_the_rest_named(gpus, chosen, rest):
    found, (excluded,) = select_gpus(gpus, wanted=None)
    assert indices(found) == chosen and excluded.startswith(rest)
    slices = [make_gpu(index, is_mig_on=True, name="A100 MIG 3g.20gb", spec_name=None) for index in (2, 3)]
    found, (excluded,) = select_gpus(slices, wanted=None)
    assert indices(found) == [2] and "GPU 3" in excluded and "MIG" in excluded
    found, others = select_gpus([make_4090(0), make_gpu(1), make_gpu(2)], wanted=(0, 1))
    assert indices(found) == [0] and len(others) == 2, "also of requested ones"


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [0, 2]),
        ("1,1", [1]),
        ("0,7,1", [0]),  # CUDA stops at the first that does not exist
        ("GPU-1aaa", [1]),
        ("GPU-1", [1]),
        (" GPU-2aaa , 0", [0, 2]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(setting, seen):
    gpus = [make_gpu(0), make_gpu(1), make_gpu(2)]
    visible, sentences = visible_gpus(gpus, setting)
    assert indices(visible) == seen
    assert bool(sentences) is (len(seen) < 3)
    if seen == [0]:
        assert f"CUDA_VISIBLE_DEVICES={setting}" in sentences[0] and "GPUs 1 and 2" in sentences[0]


def test_processes_are_given_cards_by_uuid():
    assert visible_devices([make_gpu(2), make_gpu(0)]) == "GPU-2aaa,GPU-0aaa"
    assert visible_devices([make_gpu(3, uuid=None)]) == "3"
    assert visible_devices([]) == ""
