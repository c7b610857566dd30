"""Optimizers on what engines leave a rank: ZeRO's flat partitions, FSDP2's shards, and inside FSDP2's backward pass."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attempt_runs import engaged_of, losses_of
from rank_factory import NUM_STEPS, rank_plan, ranks_of

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan

CUT_ANYWHERE = 1e-5  # element by element
CUT_BLOCKS = 2e-3  # 256 elements with one scale are others in a flat partition

# (sharding, optimizer, inside the backward pass, largest difference of a loss from DDP's, seen of the state)
RUNS = [
    (Sharding.ZERO3, Optimizer.ADAMW_8BIT, False, CUT_BLOCKS, "state1: uint8"),
    (Sharding.FSDP, Optimizer.ADAMW_8BIT, True, CUT_BLOCKS, "state1: uint8"),
    (Sharding.FSDP, Optimizer.ADAMW_FUSED, True, CUT_ANYWHERE, "exp_avg: float32"),
    (Sharding.FSDP_GRAD_OP, Optimizer.LION, True, CUT_ANYWHERE, "exp_avg: float32"),
    # A rank has half of 8,192 elements of a matrix, which is enough for 8 bit; a quarter would not be.
    (Sharding.HSDP, Optimizer.ADAMW_8BIT, False, CUT_BLOCKS, "state1: uint8 (8 tensors)"),
    (Sharding.HSDP, Optimizer.ADAMW_FUSED, True, CUT_ANYWHERE, "exp_avg: float32"),
]
CASES = [pytest.param(*run, id=f"{run[0]}-{run[1]}{'-inside' if run[2] else ''}") for run in RUNS]
Case = tuple[Sharding, Optimizer, bool]


def plan_of(case: Case, cache_dir: Path) -> Plan:
    sharding, optimizer, inside = case
    return rank_plan(
        cache_dir, sharding, optimizer=optimizer, num_steps=NUM_STEPS, micro_batch=8 // ranks_of(sharding),
        accumulation=1,
        optimizer_in_backward=inside and sharding is not Sharding.DDP,
        clip=0.0 if inside else 1.0,  # an update inside the backward pass cannot be clipped
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Case], Path]:
    whole = [(Sharding.DDP, *kind) for kind in dict.fromkeys(run[1:3] for run in RUNS)]  # every tensor on each rank
    return run_dirs(lambda case, _: plan_of(case, cache_dir), [*whole, *(run[:3] for run in RUNS)])


@pytest.mark.parametrize(("sharding", "optimizer", "inside", "tolerance", "state"), CASES)
def test_a_sharded_optimizer_steps_as_one_with_whole_tensors(runs, sharding, optimizer, inside, tolerance, state):
    run_dir = runs((sharding, optimizer, inside))
    whole = losses_of(runs((Sharding.DDP, optimizer, inside)))
    assert max(abs(a - b) for a, b in zip(losses_of(run_dir), whole, strict=True)) < tolerance
    assert whole[-1] < whole[0] - 0.5
    for rank in (0, 1):
        facts = engaged_of(run_dir, rank).facts
        assert state in facts["optimizer_state"]
        assert ("inside the backward pass" in facts.get("updates", "")) == inside
    if sharding.uses_fsdp and tolerance == CUT_ANYWHERE:
        ranks = [(run_dir, 0), (run_dir, 1), (runs((Sharding.DDP, optimizer, inside)), 0)]
        held = [int(engaged_of(*rank).facts["optimizer_state_bytes"].replace(",", "")) for rank in ranks]
        assert sum(held[:2]) == held[2], "together the state once"


def test_all_matrices_of_a_rank_are_one_8_bit_partition_of_half_the_elements(runs):
    """Two flat tensors a rank: the matrices' share in 8 bit, the norms' 160 elements in fp32 as they are few."""
    facts = engaged_of(runs((Sharding.ZERO3, Optimizer.ADAMW_8BIT, False))).facts
    assert "state1: uint8 (1 tensors), float32 (1 tensors)" in facts["optimizer_state"]
    matrices = (2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)) // 2
    norms = 5 * 64 // 2
    assert facts["optimizer_state_bytes"] == f"{2 * matrices + 2 * 4 * matrices // 256 + 2 * 4 * norms:,}"
