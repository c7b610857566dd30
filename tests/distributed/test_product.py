"""The full product of where state lives, optimizer, method and checkpointing that a CPU can run; belongs to test-long.

In fp32, where only the order of sums may differ, so that each point is held against its plain run as closely as can be.
"""

from functools import cache
from pathlib import Path

import pytest
from attempt_runs import losses_of
from covering_factory import Point, points
from outcome_file import DIFFERENCES, Difference
from point_runs import NUM_STEPS, is_clipped, name_of, reference_of, run_points, tolerance

from shardwise.trainer.spec.strategy import LossHead, Precision

pytestmark = pytest.mark.long
BATCH, NUM_BATCHES = 40, 25  # points of one process group


@cache
def product() -> list[Point]:
    """Every point in fp32, with chunked logits and the most accumulation that its optimizer allows."""
    plain = [
        point
        for point in points()
        if point.precision is Precision.FP32
        and point.loss is LossHead.CHUNKED
        and not point.activation_offload
        and not point.optimizer_in_backward
    ]
    most = {point._replace(accumulation=1): point.accumulation for point in sorted(plain)}
    return [point._replace(accumulation=accumulation) for point, accumulation in most.items()]


def group_of(point: Point) -> str:
    """What its differences are kept under: the points of a group differ in checkpointing alone."""
    return f"{point.sharding}+{point.offload} {point.optimizer} {point.method}".replace("+none ", " ")


@pytest.mark.parametrize("number", range(NUM_BATCHES))
def test_every_point_trains_like_the_plain_run_of_its_update(
    number, tmp_path: Path, cache_dir, run_ranks, record_property
):
    batch = product()[number * BATCH : (number + 1) * BATCH]
    folder = run_points(batch, tmp_path / "runs", cache_dir, tmp_path / "nvme", run_ranks)
    differences = {}
    for point in batch:
        clip = float(is_clipped(point))
        found, expected = (losses_of(folder / name_of(each, clip=clip)) for each in (point, reference_of(point)))
        assert len(found) == NUM_STEPS
        differences[point] = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    record_property(DIFFERENCES, [Difference(group_of(point), tolerance(point), differences[point]) for point in batch])
    assert not {point.name: worst for point, worst in differences.items() if not worst <= tolerance(point)}


def test_the_product_is_large_and_in_the_batches():
    """Several hundred: a rule that refuses too much would show here."""
    assert 600 < len(product()) <= NUM_BATCHES * BATCH
    assert len(product()) > (NUM_BATCHES - 1) * BATCH, "no batch is empty"
