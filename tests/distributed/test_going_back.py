"""A run whose steps cannot be taken goes back to its checkpoint; one that gains nothing exports its best weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import TINY_LLAMA
from plain_training import PlainCourse, train_plainly
from rank_factory import SWAPPED_LLAMA, offload_plan, rank_plan, ranks_of
from rank_scenarios import (
    BAD_STEPS,
    NUM_STEPS_BACK,
    SAVED_STEP,
    TAKEN,
    check_best_export,
    check_going_back,
    early_stop_plan,
)
from spoilt_rows import spoil

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead, Precision

Case = tuple[Any, ...]  # of a return the layout; of an early stop a word, the sharding, and the precision
BACK: tuple[Case, ...] = (
    (Sharding.FSDP, Offload.NONE), (Sharding.ZERO3, Offload.NONE), (Sharding.ZERO2, Offload.OPTIMIZER),
    (Sharding.HSDP, Offload.NONE),
)  # fmt: skip
MORE_BACK: tuple[Case, ...] = (
    *((each, Offload.NONE) for each in (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.FSDP_GRAD_OP)),
    *((Sharding.ZERO3, each) for each in (Offload.OPTIMIZER, Offload.NVME_OPTIMIZER, Offload.NVME_ALL)),
)
BEST: tuple[Case, ...] = (
    ("best", Sharding.FSDP, Precision.FP32),
    ("best", Sharding.ZERO2, Precision.BF16_MIXED),
    ("best", Sharding.ZERO3, Precision.BF16_MIXED),
    ("best", Sharding.HSDP, Precision.BF16_MIXED),
)


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    if case in BEST:
        return early_stop_plan(cache_dir, case[1], precision=case[2], micro_batch=8 // ranks_of(case[1]))
    plan = offload_plan(
        cache_dir, *case, nvme=run_dir / "nvme", num_steps=NUM_STEPS_BACK, checkpoint_every_steps=SAVED_STEP,
        micro_batch=4 // ranks_of(case[0]), accumulation=2, loss=LossHead.EAGER, precision=Precision.FP32,
    )  # fmt: skip
    return spoil(plan, run_dir.with_name(f"extension of {run_dir.name}"), BAD_STEPS)


@pytest.fixture(scope="module")
def run_dir_of(run_dirs, cache_dir) -> Callable[[Case], Path]:
    return run_dirs(lambda case, run_dir: plan_of(case, cache_dir, run_dir), BACK + BEST, MORE_BACK)


@pytest.fixture(scope="module")
def expected(cache_dir) -> Callable[[Case], PlainCourse]:
    models = {False: TINY_LLAMA, True: SWAPPED_LLAMA}  # by whether state is on NVMe
    train = cache(lambda is_swapped: train_plainly(
        rank_plan(cache_dir, model_config=models[is_swapped], num_steps=NUM_STEPS_BACK), TAKEN))  # fmt: skip
    return lambda case: train(case[1].uses_nvme)


@pytest.mark.parametrize(
    "case", [*BACK, *(pytest.param(case, marks=pytest.mark.long) for case in MORE_BACK)], ids="+".join
)
def test_the_steps_after_going_back_are_those_of_a_run_that_passed_over_the_rows(case, run_dir_of, expected):
    check_going_back(run_dir_of(case), expected(case))


@pytest.mark.parametrize("case", BEST, ids="-".join)
def test_the_export_is_of_the_best_step(case, run_dir_of):
    check_best_export(run_dir_of(case))
