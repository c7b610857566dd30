"""Every pair of values of any two axes, run for real on CPU: each point trains like the plain run of the same update.

The points are a covering set of what the planner's rules let a CPU run (`covering_factory`): 116 of 34,000. A point is
held against a run of one process in fp32, with nothing recomputed, moved or cut, of the same optimizer and method.
Plain AdamW itself is held against PyTorch without any of our code in `test_engines`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering_factory import Point, covering, points
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from point_runs import NUM_STEPS, is_clipped, losses, name_of, reference_of, run_points, tolerance

from trainer.spec import codec
from trainer.spec.report import Engaged
from trainer.spec.strategy import Checkpointing, Method, Optimizer, Precision, Sharding

POINTS = covering(list(points()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_dir, run_ranks) -> Path:
    """A folder of run directories: every point and every reference, in four process groups."""
    folder, nvme = tmp_path_factory.mktemp("covering"), tmp_path_factory.mktemp("nvme")
    runnable = [point for point in POINTS if not (point.offload.uses_nvme and lacks_libaio())]
    if any(point.offload.uses_nvme for point in runnable):
        folder_with_operators("async_io")
    return run_points(runnable, folder, cache_dir, nvme, run_ranks)


@pytest.fixture
def run_dir(point: Point, runs: Path) -> Path:
    if point.offload.uses_nvme and lacks_libaio():
        pytest.skip(NO_LIBAIO)
    return runs / name_of(point, clip=float(is_clipped(point)))


def each_point(function):
    return pytest.mark.parametrize("point", POINTS, ids=[point.name for point in POINTS])(function)


@each_point
def test_a_point_trains_like_the_plain_run_of_its_update(point, runs, run_dir):
    plain = runs / name_of(reference_of(point), clip=float(is_clipped(point)))
    found, expected = losses(run_dir), losses(plain)
    assert len(found) == NUM_STEPS
    assert expected[-1] < expected[0] or point.optimizer in (Optimizer.LOMO, Optimizer.SGD)
    assert found == pytest.approx(expected, abs=tolerance(point))


@each_point
def test_a_point_is_what_its_plan_says(point, run_dir):
    engaged = codec.read(run_dir / "attempts" / "1" / "engaged-0.json", Engaged)
    assert engaged.world_size == point.num_ranks
    assert engaged.precision == point.precision
    assert engaged.loss == point.loss
    assert engaged.accumulation == point.accumulation
    assert (engaged.checkpointed_blocks > 0) is (point.checkpointing is not Checkpointing.NONE)
    assert (engaged.sharded_parameters > 0) is point.sharding.shards_weights
    assert (engaged.partition_elements is not None) is point.sharding.shards_optimizer
    assert engaged.facts, "what only a step can show was looked at"


def test_every_pair_of_values_that_can_meet_is_met():
    """The set covers the product it was made from."""
    wanted = {pair for point in points() for pair in point.pairs}
    assert {pair for point in POINTS for pair in point.pairs} == wanted
    assert len(POINTS) < 130


def test_the_set_is_the_same_in_every_process():
    program = "import covering_factory as c; print([point.name for point in c.covering(list(c.points()))])"
    factories = str(Path(__file__).parents[1] / "factories")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([factories, str(Path(__file__).parents[2])])}
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def test_every_axis_has_all_its_values():
    met = {axis: {dict(point.values)[axis] for point in POINTS} for axis, _ in POINTS[0].values}
    assert met["optimizer"] == set(Optimizer)
    assert met["method"] == set(Method)
    assert met["checkpointing"] == set(Checkpointing)
    assert met["precision"] == {Precision.FP32, Precision.BF16_MIXED, Precision.BF16, Precision.FP16_MIXED}
    shardings = {layout[0] for layout in met["layout"]}
    assert shardings == set(Sharding)
