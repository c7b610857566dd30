"""A run whose steps cannot be taken goes back to its checkpoint under every engine, in the process, on all ranks alike.

The bad rows are on one rank of two in every step. What comes out is held against plain PyTorch that never saw the rows
which are passed over.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from engine_plan_factory import TINY_LLAMA
from plain_training import PlainCourse, train_plainly
from rank_factory import SWAPPED_LLAMA, offload_plan, rank_plan
from rank_scenarios import BAD_STEPS, NUM_STEPS_BACK, SAVED_STEP, TAKEN, check_going_back
from spoilt_rows import spoil

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead, Precision

Case = tuple[Sharding, Offload]
CASES: tuple[Case, ...] = (
    (Sharding.FSDP, Offload.NONE),
    (Sharding.ZERO3, Offload.NONE),
    (Sharding.ZERO2, Offload.OPTIMIZER),
)
MORE_CASES: tuple[Case, ...] = (
    (Sharding.DDP, Offload.NONE),
    (Sharding.ZERO1, Offload.NONE),
    (Sharding.ZERO2, Offload.NONE),
    (Sharding.FSDP_GRAD_OP, Offload.NONE),
    (Sharding.ZERO3, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.NVME_OPTIMIZER),
    (Sharding.ZERO3, Offload.NVME_ALL),
)


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    plan = offload_plan(
        cache_dir, *case, nvme=run_dir / "nvme", num_steps=NUM_STEPS_BACK, checkpoint_every_steps=SAVED_STEP,
        num_ranks=2, micro_batch=2, accumulation=2, loss=LossHead.EAGER, precision=Precision.FP32,
    )  # fmt: skip
    return spoil(plan, run_dir.with_name(f"extension of {run_dir.name}"), BAD_STEPS)


@pytest.fixture(scope="module")
def run_dir_of(run_dirs, cache_dir) -> Callable[[Case], Path]:
    return run_dirs(lambda case, run_dir: plan_of(case, cache_dir, run_dir), CASES, MORE_CASES)


@pytest.fixture(scope="module")
def expected(cache_dir) -> Callable[[Case], PlainCourse]:
    """A run that passes over the same rows."""
    models = {False: TINY_LLAMA, True: SWAPPED_LLAMA}  # by whether state is on NVMe
    train = cache(lambda is_swapped: train_plainly(
        rank_plan(cache_dir, model_config=models[is_swapped], num_steps=NUM_STEPS_BACK), TAKEN))  # fmt: skip
    return lambda case: train(case[1].uses_nvme)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE_CASES)], ids="+".join
)
def test_the_steps_after_going_back_are_those_of_a_run_that_passed_over_the_rows(case, run_dir_of, expected):
    check_going_back(run_dir_of(case), expected(case))
