"""Optimizers on what engines leave a rank: ZeRO's flat partitions, FSDP2's shards, and inside FSDP2's backward pass."""

from pathlib import Path

import pytest
from attempt_runs import engaged_of, losses_of
from rank_factory import NUM_STEPS, rank_plan, write_attempt

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer

ZERO = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
CUT_ANYWHERE = 1e-5  # element by element
CUT_BLOCKS = 2e-3  # 256 elements with one scale are others in a flat partition

# (sharding, optimizer, inside the backward pass, largest difference of a loss from DDP's, seen of the state)
RUNS = [
    *((sharding, Optimizer.LION, False, CUT_ANYWHERE, "exp_avg: float32") for sharding in ZERO),
    *((sharding, Optimizer.ADAMW_8BIT, False, CUT_BLOCKS, "state1: uint8") for sharding in ZERO),
    (Sharding.ZERO2, Optimizer.LION_8BIT, False, CUT_BLOCKS, "state1: uint8"),
    (Sharding.ZERO3, Optimizer.ADEMAMIX_8BIT, False, CUT_BLOCKS, "state1: uint8"),
    (Sharding.ZERO2, Optimizer.PAGED_ADAMW, False, CUT_ANYWHERE, "state1: float32"),
    (Sharding.FSDP, Optimizer.LION, False, CUT_ANYWHERE, "exp_avg: float32"),
    (Sharding.FSDP, Optimizer.ADAMW_8BIT, False, CUT_BLOCKS, "state1: uint8"),
    (Sharding.FSDP, Optimizer.ADAMW_8BIT, True, CUT_BLOCKS, "state1: uint8"),
    (Sharding.FSDP, Optimizer.ADAMW_FUSED, True, CUT_ANYWHERE, "exp_avg: float32"),
    (Sharding.FSDP_GRAD_OP, Optimizer.LION, True, CUT_ANYWHERE, "exp_avg: float32"),
]
CASES = [pytest.param(*run, id=f"{run[0]}-{run[1]}{'-inside' if run[2] else ''}") for run in RUNS]


def name_of(sharding: Sharding, optimizer: Optimizer, *, inside: bool) -> str:
    return f"{sharding}-{optimizer}-{inside}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_dir, run_ranks) -> Path:
    """Every run and, for each optimizer, what it is held against: ranks that hold every tensor whole."""
    folder = tmp_path_factory.mktemp("optimizers")
    groups: dict[bool, list[Path]] = {}
    whole = [(Sharding.DDP, optimizer, inside) for optimizer, inside in dict.fromkeys(run[1:3] for run in RUNS)]
    for sharding, optimizer, inside in [*whole, *(run[:3] for run in RUNS)]:
        plan = rank_plan(
            cache_dir,
            sharding,
            optimizer=optimizer,
            optimizer_in_backward=inside and sharding is not Sharding.DDP,
            clip=0.0 if inside else 1.0,  # an update inside the backward pass cannot be clipped
            num_ranks=2,
            num_steps=NUM_STEPS,
            micro_batch=4,
            accumulation=1,
        )
        attempt = write_attempt(folder / name_of(sharding, optimizer, inside=inside), plan)
        groups.setdefault(sharding.uses_deepspeed, []).append(attempt)
    for attempts in groups.values():
        run_ranks(attempts, 2)
    return folder


@pytest.mark.parametrize(("sharding", "optimizer", "inside", "tolerance", "state"), CASES)
def test_a_sharded_optimizer_steps_as_one_with_whole_tensors(runs, sharding, optimizer, inside, tolerance, state):
    run_dir = runs / name_of(sharding, optimizer, inside=inside)
    whole = losses_of(runs / name_of(Sharding.DDP, optimizer, inside=inside))
    assert max(abs(a - b) for a, b in zip(losses_of(run_dir), whole, strict=True)) < tolerance
    assert whole[-1] < whole[0] - 0.5
    for rank in (0, 1):
        facts = engaged_of(run_dir, rank).facts
        assert state in facts["optimizer_state"]
        assert ("inside the backward pass" in facts.get("updates", "")) == inside


@pytest.mark.parametrize("sharding", ZERO)
def test_all_matrices_of_a_rank_are_one_8_bit_partition_of_half_the_elements(runs, sharding):
    """Two flat tensors a rank: the matrices' share in 8 bit, the norms' 160 elements in fp32 as they are few."""
    facts = engaged_of(runs / name_of(sharding, Optimizer.ADAMW_8BIT, inside=False)).facts
    assert "state1: uint8 (1 tensors), float32 (1 tensors)" in facts["optimizer_state"]
    matrices = (2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)) // 2
    norms = 5 * 64 // 2
    assert facts["optimizer_state_bytes"] == f"{2 * matrices + 2 * 4 * matrices // 256 + 2 * 4 * norms:,}"
