"""Every pair of values of any two axes, run for real on CPU: each point trains like the plain run of the same update.

The points are a covering set of what the planner's rules let a CPU run (`covering_factory`): 123 of 38,000, in which
every pair of values meets. The first 43, the core, hold every value, and every pair of where state lives with method
and precision; the others belong to test-long. covering_points.txt lists them, so that collecting tests
computes nothing. A point is held against a run of one process in fp32, with nothing recomputed, moved or cut, of the
same optimizer and method. Plain AdamW itself is held against PyTorch without any of our code in `test_engines`.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from attempt_runs import engaged_of, losses_of
from covering_factory import Point, core, points
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from point_runs import NUM_STEPS, is_clipped, name_of, reference_of, run_points, tolerance

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

LISTED = Path(__file__).with_name("covering_points.txt")
PROGRAM = "import covering_factory as c; print('\\n'.join(point.name for point in c.covering(list(c.points()))))"
NAMES = LISTED.read_text().splitlines()
NUM_CORE = 43


@cache
def by_name() -> dict[str, Point]:
    return {point.name: point for point in points()}


def each_point(function):
    marks = (pytest.mark.long, pytest.mark.timeout(1800))  # the first trains them all
    others = [pytest.param(name, marks=marks) for name in NAMES[NUM_CORE:]]
    return pytest.mark.parametrize("name", [*NAMES[:NUM_CORE], *others])(function)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache_dir, run_ranks, request) -> Path:
    """Runs of the points of the tests that run, and the reference of each, in a few process groups."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = [by_name()[name] for name in dict.fromkeys(item.callspec.params["name"] for item in items)]
    runnable = [point for point in wanted if not (point.offload.uses_nvme and lacks_libaio())]
    if any(point.offload.uses_nvme for point in runnable):
        folder_with_operators("async_io")
    made, nvme = tmp_path_factory.mktemp("covering"), tmp_path_factory.mktemp("nvme")
    return run_points(runnable, made, cache_dir, nvme, run_ranks)


@pytest.fixture
def point(name: str) -> Point:
    found = by_name()[name]
    if found.offload.uses_nvme and lacks_libaio():
        pytest.skip(NO_LIBAIO)
    return found


@each_point
def test_a_point_trains_like_the_plain_run_of_its_update(point, folder):
    clip = float(is_clipped(point))
    found, expected = (losses_of(folder / name_of(each, clip=clip)) for each in (point, reference_of(point)))
    assert len(found) == NUM_STEPS
    assert expected[-1] < expected[0] or point.optimizer in (Optimizer.LOMO, Optimizer.SGD)
    assert found == pytest.approx(expected, abs=tolerance(point))


@each_point
def test_a_point_is_what_its_plan_says(point, folder):
    run_dir = folder / name_of(point, clip=float(is_clipped(point)))
    verified = engaged_of(run_dir)
    assert verified.world_size == point.num_ranks
    assert verified.precision == point.precision
    assert verified.loss == point.loss
    assert verified.accumulation == point.accumulation
    assert (verified.checkpointed_blocks > 0) is (point.checkpointing is not Checkpointing.NONE)
    assert (verified.sharded_parameters > 0) is point.sharding.shards_weights
    assert (verified.partition_elements is not None) is point.sharding.shards_optimizer
    facts = verified.facts
    assert point.activation_offload is ("in host RAM" in facts.get("activation_offload", ""))
    assert ("4-bit layers" in facts) is (point.method is Method.QLORA)
    assert ("adapters" in facts) is point.method.freezes_base
    assert ("projectors" in facts) is (point.method is Method.GALORE)


@pytest.mark.cold
def test_the_points_of_the_file_are_those_that_are_chosen_in_every_process():
    """Whatever the order of sets there. To write them anew, send what this program prints to the file."""
    paths = os.pathsep.join(map(str, (Path(__file__).parents[1] / "factories", Path(__file__).parents[2])))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True).stdout
    assert printed == LISTED.read_bytes()
    assert [point.name for point in core(list(by_name().values()))] == NAMES[:NUM_CORE]


def test_every_pair_of_values_that_can_meet_is_met():
    """The set covers the product it was made from."""
    wanted = {pair for point in by_name().values() for pair in point.pairs}
    assert {pair for name in NAMES for pair in by_name()[name].pairs} == wanted


def test_the_core_has_all_values_and_the_pairs_that_change_an_engine_most():
    some = [by_name()[name] for name in NAMES[:NUM_CORE]]
    met = {axis: {dict(point.values)[axis] for point in some} for axis, _ in some[0].values}
    assert met == {axis: {dict(point.values)[axis] for point in by_name().values()} for axis in met}
    assert met["optimizer"] == set(Optimizer)
    assert met["method"] == set(Method)
    assert met["checkpointing"] == set(Checkpointing)
    assert met["precision"] == {Precision.FP32, Precision.BF16_MIXED, Precision.BF16, Precision.FP16_MIXED}
    assert {point.sharding for point in some} == set(Sharding)
    for pair in (
        lambda point: (point.sharding, point.precision),
        lambda point: (point.sharding, point.offload, point.method),
    ):
        assert {pair(point) for point in some} == {pair(point) for point in by_name().values()}
