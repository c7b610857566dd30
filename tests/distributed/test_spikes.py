"""A step that is not to be taken, on two ranks of every engine: all skip it, and nothing of it is left."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from plain_training import PlainCourse, train_plainly
from rank_factory import SWAPPED_LLAMA, offload_plan, rank_plan, ranks_of
from safetensors.torch import load_file

from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

NUM_STEPS, SKIPPED = 7, (3, 4, 5)
WAS_SKIPPED = [step in SKIPPED for step in range(1, NUM_STEPS + 1)]
TAKEN = {step: step for step in range(1, NUM_STEPS + 1) if step not in SKIPPED}
FAULTS = ("the gradient norm is not finite", "the loss is not finite", "refused")
MODELS = {False: TINY_LLAMA, True: SWAPPED_LLAMA}  # by whether state is on NVMe

Case = tuple[Sharding, Offload, Precision]


class Run(NamedTuple):
    steps: list[list[dict]]  # of each rank
    weights: dict[str, torch.Tensor]


FP32, BF16 = Precision.FP32, Precision.BF16_MIXED
CASES: tuple[Case, ...] = (
    (Sharding.DDP, Offload.NONE, FP32),
    (Sharding.FSDP, Offload.NONE, FP32),
    (Sharding.ZERO2, Offload.NONE, BF16),
    (Sharding.ZERO3, Offload.NONE, FP32),
    (Sharding.ZERO2, Offload.OPTIMIZER, FP32),
)
MORE_CASES: tuple[Case, ...] = (
    *((each, Offload.NONE, FP32) for each in (Sharding.ZERO1, Sharding.ZERO2)),
    *((each, Offload.NONE, BF16) for each in (Sharding.FSDP_GRAD_OP, Sharding.ZERO3)),
    (Sharding.ZERO2, Offload.OPTIMIZER, BF16),
    (Sharding.ZERO3, Offload.OPTIMIZER, FP32),
    (Sharding.ZERO3, Offload.OPTIMIZER_PARAMS, BF16),
    (Sharding.ZERO3, Offload.NVME_OPTIMIZER, FP32),
    (Sharding.ZERO3, Offload.NVME_ALL, FP32),
)
HYBRID_CASES: tuple[Case, ...] = ((Sharding.HSDP, Offload.NONE, FP32), (Sharding.HSDP, Offload.NONE, BF16))
FP16_SHARDINGS = (Sharding.DDP, Sharding.FSDP, Sharding.ZERO2, Sharding.ZERO3)
FP16_CASES: tuple[Case, ...] = tuple((each, Offload.NONE, Precision.FP16_MIXED) for each in FP16_SHARDINGS)


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    sharding, offload, precision = case
    return offload_plan(
        cache_dir, sharding, offload, nvme=run_dir / "nvme", micro_batch=4 // ranks_of(sharding), accumulation=2,
        precision=precision, num_steps=NUM_STEPS, train={"check_first_steps": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def steps_of(run_dirs, cache_dir) -> Callable[[Case], Run]:
    run_dir_of = run_dirs(
        lambda case, run_dir: plan_of(case, cache_dir, run_dir), CASES, MORE_CASES, HYBRID_CASES, FP16_CASES,
        kind=":spikes",
    )  # fmt: skip

    def read(case: Case) -> Run:
        run_dir = run_dir_of(case)
        attempt = run_dir / "attempts" / "1"
        steps = [json.loads((attempt / f"steps-{rank}.json").read_text()) for rank in range(ranks_of(case[0]))]
        return Run(steps, load_file(run_dir / "export" / "model.safetensors"))

    return read


@pytest.fixture(scope="module")
def expected(cache_dir) -> Callable[[Case], PlainCourse]:
    plans = {swaps: rank_plan(cache_dir, model_config=MODELS[swaps], num_steps=NUM_STEPS) for swaps in MODELS}
    train = cache(lambda swaps: train_plainly(plans[swaps], TAKEN))
    return lambda case: train(case[1].uses_nvme)


def each(more_cases):
    more = [pytest.param(case, marks=pytest.mark.long) for case in more_cases]
    return pytest.mark.parametrize("case", [*CASES, *more], ids="+".join)


@each(MORE_CASES + HYBRID_CASES)
def test_every_rank_skips_the_same_steps_for_the_same_reason(case, steps_of):
    first, *others = steps_of(case).steps
    for steps in (first, *others):
        assert [step["was_skipped"] for step in steps] == WAS_SKIPPED
        assert tuple(steps[number - 1]["fault"] for number in SKIPPED) == FAULTS
        for figure in ("loss", "grad_norm"):
            assert [step[figure] for step in first] == [step[figure] for step in steps]
    if case in HYBRID_CASES:  # every machine has the same copy to the bit, of two shards
        digests = [[step["digests"] for step in steps] for steps in (first, *others)]
        assert digests[0] == digests[2] != digests[1] == digests[3]


@each(MORE_CASES + HYBRID_CASES + FP16_CASES)
def test_a_step_that_is_not_taken_changes_no_bit_of_weights_moments_and_counts(case, steps_of):
    for steps in steps_of(case).steps:
        for number, step in enumerate(steps, start=1):
            before, after = step["digests"]
            assert (before == after) == (number in SKIPPED), f"step {number}"
        if case in FP16_CASES:  # an overflow is no fault, and a step that is refused no overflow
            assert [step["loss_scale"] / INIT_SCALE for step in steps] == [1, 1, 1, 1 / 2, 1 / 4, 1 / 4, 1 / 4]
            assert [step["fault"] for step in steps] == [None] * 4 + ["refused"] + [None] * 2
            assert [step["was_skipped"] for step in steps] == WAS_SKIPPED


@each(MORE_CASES + HYBRID_CASES + FP16_CASES)
def test_the_other_steps_are_those_of_a_run_without_it(case, steps_of, expected):
    run, is_fp32 = steps_of(case), case[2] is FP32
    plain = expected(case)
    taken = {number: step["loss"] for number, step in enumerate(run.steps[0], start=1) if number in TAKEN}
    assert taken == pytest.approx(plain.losses, abs=1e-5 if is_fp32 else 3e-3)
    for name, weight in plain.weights.items():
        difference = (run.weights[name] - weight).abs()
        assert difference.mean() < (1e-6 if is_fp32 else 3e-3), f"{name}: ZeRO's are rounded to 16 bit"
        assert difference.max() < (1e-3 if is_fp32 else 2e-2), f"{name}: a gradient near 0 may have another sign"
