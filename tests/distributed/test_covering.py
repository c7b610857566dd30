"""Every pair of values of any two axes, run for real on CPU: each point trains like the plain run of the same update.

The points are a covering set of what the planner's rules let a CPU run (`covering_factory`): 123 of 38,000. The first
43, the core, hold every value; the others belong to test-long. A point is compared with one process in fp32 with
nothing recomputed, moved or cut, which `test_engines` compares with PyTorch.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from attempt_runs import losses_of
from covering_factory import IN_BACKWARD, PRECISIONS, Point, core, points
from programs import printed_by
from rank_factory import rank_plan

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import GaloreJob, Limits, LoraJob, NvmeLimit
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

LISTED = Path(__file__).with_name("covering_points.txt")
PROGRAM = "import covering_factory as c; print('\\n'.join(point.name for point in c.covering(list(c.points()))))"
NAMES = LISTED.read_text().splitlines()
NUM_CORE = 43
LONG = (pytest.mark.long, pytest.mark.timeout(1800))  # the first trains them all
LR = 1e-3  # differences of rounding grow with it
EXACT, SIGNED, ORTHOGONALISED, MIXED, ROUGH = 1e-5, 1e-4, 2e-4, 2e-3, 2e-2
LORA = LoraJob(rank=4, alpha=8.0)
GALORE = GaloreJob(rank=8, update_gap=2, scale=1.0)
STEP_BY_SHARE = frozenset({Optimizer.ADALOMO, Optimizer.ADAFACTOR, Optimizer.LAMB_8BIT})
CUT_ANYWHERE = frozenset(
    {Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.PAGED_ADAMW, Optimizer.LION, Optimizer.SGD,
     Optimizer.DEEPSPEED_CPU_ADAM}
)  # fmt: skip


def reference_of(point: Point) -> Point:
    """One process, fp32, and nothing that saves memory."""
    optimizer = Optimizer.ADAMW if point.optimizer is Optimizer.DEEPSPEED_CPU_ADAM else point.optimizer
    return Point(
        Sharding.NONE, Offload.NONE, optimizer, Precision.FP32, point.method, Checkpointing.NONE, LossHead.EAGER, 1,
        activation_offload=False, optimizer_in_backward=False,
    )  # fmt: skip


def runs_of(point: Point) -> list[tuple[Point, float]]:
    """A point and the plain run of its update, with their clip: inside the backward pass no whole gradient is there."""
    clip = float(not point.optimizer_in_backward and point.optimizer not in IN_BACKWARD)
    return [(point, clip), (reference_of(point), clip)]


def num_steps_of(point: Point) -> int:
    """GaLore finds its projectors anew in the third."""
    return 4 if point.method is Method.GALORE else 3


def plan_of(point: Point, clip: float, cache_dir: Path, nvme: Path) -> Plan:
    return rank_plan(
        cache_dir, num_steps=num_steps_of(point), clip=clip, lr=LR, train={"lora": LORA, "galore": GALORE},
        limits=Limits(nvme=NvmeLimit(path=str(nvme))), num_ranks=point.num_ranks,
        micro_batch=8 // (point.num_ranks * point.accumulation),
        checkpoint_every_n=2 if point.checkpointing is Checkpointing.EVERY_N else None, **point._asdict(),
    )  # fmt: skip


def tolerance(point: Point) -> float:
    """Largest difference of a loss that rounding explains."""
    if point.precision is Precision.FP32:
        if point.optimizer is Optimizer.MUON:
            return ORTHOGONALISED  # in bf16, by torch's implementation
        is_flat = point.sharding.uses_deepspeed and point.optimizer not in CUT_ANYWHERE
        if is_flat or (point.sharding.uses_fsdp and point.optimizer is Optimizer.ADAMW_8BIT):
            return MIXED  # blocks of 8-bit state fall elsewhere in a flat partition or a shard
        # A sum in another order moves an 8-bit code now and then, and with it the sign that is a whole step of Lion.
        return SIGNED if point.optimizer is Optimizer.LION_8BIT else EXACT
    if point.precision is Precision.BF16_MIXED and not point.sharding.uses_fsdp and point.method is not Method.GALORE:
        # Of Lion in other blocks rounding turns whole steps as well.
        return 2 * MIXED if point.sharding.uses_deepspeed and point.optimizer is Optimizer.LION_8BIT else MIXED
    # GaLore's projector turns with rounding; a step that is a share of the weight is rounded coarsely with it in bf16.
    return 2 * ROUGH if point.optimizer in STEP_BY_SHARE else ROUGH


@cache
def by_name() -> dict[str, Point]:
    return {point.name: point for point in points()}


@pytest.fixture(scope="module")
def run_dir_of(run_dirs, cache_dir, tmp_path_factory) -> Callable[[tuple[Point, float]], Path]:
    nvme, every = tmp_path_factory.mktemp("nvme"), {name: runs_of(by_name()[name]) for name in NAMES}
    first = [run for name in NAMES[:NUM_CORE] for run in every[name]]
    others = [run for name in NAMES[NUM_CORE:] for run in every[name] if run not in first]
    return run_dirs(lambda run, _: plan_of(run[0], run[1], cache_dir, nvme), first, others)


@pytest.mark.parametrize("name", [*NAMES[:NUM_CORE], *(pytest.param(each, marks=LONG) for each in NAMES[NUM_CORE:])])
def test_a_point_trains_like_the_plain_run_of_its_update(name, run_dir_of):
    point = by_name()[name]
    found, expected = (losses_of(run_dir_of(run)) for run in runs_of(point))
    assert len(found) == len(expected) == num_steps_of(point)
    assert expected[-1] < expected[0] or point.optimizer in (Optimizer.LOMO, Optimizer.SGD)
    assert found == pytest.approx(expected, abs=tolerance(point))


@pytest.mark.cold
def test_the_points_of_the_file_are_those_that_are_chosen_in_every_process():
    """Whatever the order of sets there. To write them anew, send what this program prints to the file."""
    paths = os.pathsep.join(map(str, (Path(__file__).parents[1] / "factories", Path(__file__).parents[2])))
    assert printed_by("-c", PROGRAM, PYTHONPATH=paths, PYTHONHASHSEED="1") == LISTED.read_text()
    assert [point.name for point in core(list(by_name().values()))] == NAMES[:NUM_CORE]


def test_every_pair_of_values_that_can_meet_is_met_and_the_core_has_every_value_of_every_axis():
    """The pairs are those of the product that the set was made from."""
    wanted = {pair for point in by_name().values() for pair in point.pairs}
    assert {pair for name in NAMES for pair in by_name()[name].pairs} == wanted
    met = {need for name in NAMES[:NUM_CORE] for need in by_name()[name].core_needs}
    assert met == {need for point in by_name().values() for need in point.core_needs}
    assert met >= {("optimizer", each) for each in Optimizer} | {("method", each) for each in Method}
    assert met >= {("checkpointing", each) for each in Checkpointing} | {("precision", each) for each in PRECISIONS}
    assert {by_name()[name].sharding for name in NAMES[:NUM_CORE]} == set(Sharding)
