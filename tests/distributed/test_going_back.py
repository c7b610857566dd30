"""A run whose steps cannot be taken goes back to its checkpoint under every engine, in the process, on all ranks alike.

The bad rows are on one rank of two in every step. What comes out is held against plain PyTorch that never saw the rows
which are passed over.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from rank_factory import rank_plan, write_attempt
from spoilt_rows import spoil, train_plainly

from shardwise.launch.engine.offload import check_nvme
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.runtime.run.state import STEPS_UNTIL_ROLL_BACK, PassedOver
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Limits, NvmeLimit
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead, Precision
from shardwise.trainer.spec.units import MIB

NUM_STEPS, SAVE_EVERY = 10, 3
BAD_STEPS = range(5, 5 + STEPS_UNTIL_ROLL_BACK)
PASSED_OVER = PassedOver(after_step=3, num_steps=BAD_STEPS[-1] - 3)
TAKEN = {step: step if step <= 3 else step + PASSED_OVER.num_steps for step in range(1, NUM_STEPS + 1)}
MODEL = {**TINY_LLAMA, "vocab_size": 8192}  # its tables are just large enough for DeepSpeed to swap them
LOCKABLE_BYTES = 12 * MIB

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


def name_of(case: Case) -> str:
    return "+".join(case)


def lacks_operator(case: Case) -> bool:
    return case[1].uses_nvme and lacks_libaio()


def model_of(case: Case) -> dict[str, Any]:
    return MODEL if case[1].uses_nvme else TINY_LLAMA


def plan_of(case: Case, cache_dir: Path, folder: Path) -> Plan:
    plan = rank_plan(
        cache_dir, *case, num_steps=NUM_STEPS, checkpoint_every_steps=SAVE_EVERY, num_ranks=2, micro_batch=2,
        accumulation=2, loss=LossHead.EAGER, precision=Precision.FP32,
        model_config=model_of(case),
        limits=Limits(nvme=NvmeLimit(path=str(folder / name_of(case) / "nvme"))),
    )  # fmt: skip
    if plan.chosen.strategy.base_config is None and case[1] is not Offload.NONE:
        strategy = msgspec.structs.replace(plan.chosen.strategy, base_config="ds_configs/zero3_nvme_optimizer.json")
        plan = msgspec.structs.replace(plan, candidates=(msgspec.structs.replace(plan.chosen, strategy=strategy),))
    if case[1].uses_nvme:
        host = msgspec.structs.replace(plan.hardware.host, memlock_limit_bytes=LOCKABLE_BYTES)
        hardware = msgspec.structs.replace(plan.hardware, host=host)
        plan = msgspec.structs.replace(plan, model_shape=read_model_shape(MODEL), hardware=hardware)
    return spoil(plan, folder / "extensions" / name_of(case), BAD_STEPS)


@pytest.fixture(scope="module")
def run_dir_of(tmp_path_factory, cache_dir, run_ranks) -> Callable[[Case], Path]:
    """Where a case ran; all cases of a list are trained in one group of two ranks, when the first is asked for."""
    folder = tmp_path_factory.mktemp("going-back")

    def train(cases: tuple[Case, ...]) -> None:
        cases = tuple(case for case in cases if not lacks_operator(case))
        if any(case[1].uses_nvme for case in cases):
            folder_with_operators("async_io")
        plans = {name_of(case): plan_of(case, cache_dir, folder) for case in cases}
        for plan in plans.values():
            check_nvme(plan)
        run_ranks([write_attempt(folder / name, plan) for name, plan in plans.items()], 2)

    def run_dir(case: Case) -> Path:
        if lacks_operator(case):
            pytest.skip(NO_LIBAIO)
        if not (folder / name_of(case)).exists():
            train(CASES if case in CASES else MORE_CASES)
        return folder / name_of(case)

    return run_dir


@pytest.fixture(scope="module")
def expected(cache_dir) -> Callable[[Case], tuple[dict[int, float], dict[str, torch.Tensor]]]:
    """Losses and weights of a run that passes over the same rows."""

    @cache
    def train(vocab_size: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        config = {**TINY_LLAMA, "vocab_size": vocab_size}
        return train_plainly(rank_plan(cache_dir, model_config=config, num_steps=NUM_STEPS), TAKEN)

    return lambda case: train(model_of(case)["vocab_size"])


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE_CASES)], ids=name_of
)
def test_the_steps_after_going_back_are_those_of_a_run_that_passed_over_the_rows(
    case, run_dir_of, expected, read_course
):
    run_dir = run_dir_of(case)
    course = read_course(run_dir)
    losses, weights = expected(case)
    first_time, again = BAD_STEPS[-1], NUM_STEPS - PASSED_OVER.after_step
    assert len(course.losses) == first_time + again
    assert course.losses[BAD_STEPS[0] - 1 : first_time] == [None] * STEPS_UNTIL_ROLL_BACK
    assert course.losses[:3] + course.losses[first_time:] == pytest.approx(list(losses.values()), abs=1e-5)
    for name, weight in weights.items():
        difference = (course.weights[name] - weight).abs()
        assert difference.mean() < 1e-6 and difference.max() < 1e-3, name
    manifest = open_checkpoint(run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}").manifest
    assert all(len(entry.state) == 2 for entry in manifest.parameters.values()), "also right after an evaluation"
    spikes = manifest.facts.spikes
    assert (spikes.passed_over, spikes.skipped_steps, spikes.in_a_row) == ((PASSED_OVER,), (), 0)
    assert list(spikes.losses) == pytest.approx(list(losses.values()), abs=1e-5)
